"""Who runs, with how many tokens: the queue, the rows, chunked prefill, draft budgets, preemption, forks.

Owns the order of sequences and their blocks; turns arrivals into `StepPlan`s and results into places. Never counts and
never answers: that is the ledger's, reached through `Accounts`. Called by engine.core, one thread.
"""

import bisect
import heapq
from collections.abc import Callable, Iterable

import msgspec

from engine.accounts import Accounts
from engine.draft_lengths import DraftLengths
from engine.expiry import Expiry
from engine.intake import PolicySettings, overload, refusal, rejection
from engine.kv.cache import KVCache
from engine.plan import RowBegin, RowCommit, Span, SpanKind, StepPlan
from engine.sequence import Arrival, ChildKey, Committed, Outcome, Sequence
from engine.waiting import WaitingQueue
from protocol.messages import Close, Finish, Load, Submit
from protocol.reasons import RejectReason


class Scheduler:
    """The engine's policy. `rows` maps each running row to its sequence; treat as read-only."""

    def __init__(
        self,
        settings: PolicySettings,
        accounts: Accounts,
        now_ns: Callable[[], int],
        draw_seed: Callable[[], int],
    ) -> None:
        """`now_ns` is a monotonic clock; `draw_seed` gives a seed in [0, 2**63) for requests without one."""
        capacity = settings.capacity
        self._settings = settings
        self._capacity = capacity
        self._accounts = accounts
        self._now_ns = now_ns
        self._draw_seed = draw_seed
        self._cache = KVCache(capacity.num_blocks, capacity.block_size, capacity.prefix_caching, settings.lookahead)
        self._draft_lengths = DraftLengths(settings, self._cache, now_ns)
        # Blocks an admission leaves free, so that running rows can grow before somebody is preempted again.
        self._spare_blocks = max(1, capacity.num_blocks // 100)
        self.rows: dict[int, Sequence] = {}
        self.is_draining = False
        self._live: dict[ChildKey, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in order
        self._followers: dict[ChildKey, list[Sequence]] = {}  # children waiting for child 0 to compute their prompt
        self._expiry = Expiry(settings.queue_timeout_ns)
        self._free_rows = list(range(capacity.max_num_seqs))  # a heap: low rows keep the batch dense
        self._ends: list[int] = []
        self._begins: list[RowBegin] = []
        self._commits: dict[int, RowCommit] = {}
        self._num_paused = 0
        self._step_id = 0
        self._num_arrivals = 0

    # ---- arrivals ----

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Admit or reject requests, close children, drop what a frontend that left had submitted."""
        for frontend_id, message in arrivals:
            if isinstance(message, Submit):
                self._submit(frontend_id, message)
            elif isinstance(message, Close):
                for key in self._accounts.close(frontend_id, message):
                    self._remove(key)
            else:
                self._accounts.drop(frontend_id)
                for key in [key for key in self._live if key.frontend_id == frontend_id]:
                    self._remove(key)

    def end_all(self, finish: Finish) -> None:
        """End every sequence that still lives, with `finish`."""
        for key in list(self._live):
            self._accounts.end(key, finish)
            self._remove(key)

    def _submit(self, frontend_id: str, submit: Submit) -> None:
        if self._accounts.is_open(frontend_id, submit.request_id):
            self._accounts.refuse_duplicate(frontend_id, submit)
            return
        finish = refusal(submit, self._settings) or self._overload(submit)
        if finish is not None:
            self._accounts.reject(frontend_id, submit, finish)
            return
        children = self._children(frontend_id, submit)
        for child in children:
            self._live[child.key] = child
            self._expiry.add(child)
            self._accounts.open(child)
        self._waiting.add(children[0])
        if len(children) > 1:
            self._followers[children[0].key] = children[1:]

    def _overload(self, submit: Submit) -> Finish | None:
        if self.is_draining:
            return rejection(RejectReason.DRAINING, "the engine is shutting down and takes no new requests")
        return overload(submit, self._capacity, self._waiting, len(self._free_rows))

    def _children(self, frontend_id: str, submit: Submit) -> list[Sequence]:
        sampling = submit.sampling
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        now_ns = self._now_ns()
        rules = self._settings.stop_rules(submit)
        self._num_arrivals += 1
        children = []
        for index in range(submit.n):
            key = ChildKey(frontend_id, submit.request_id, index)
            child = Sequence(key, submit, rules, seed, self._num_arrivals)
            child.queued_ns = now_ns
            if submit.remaining_ns is not None:
                child.deadline_ns = now_ns + submit.remaining_ns
            children.append(child)
        return children

    # ---- planning ----

    def plan(self, paused: frozenset[str]) -> StepPlan:
        """The next step; it may be empty. Rows of `paused` frontends are left out.

        Rounds come first, then running prompts, then admissions; drafts only take blocks and tokens that nobody needs.
        """
        self._step_id += 1
        self._expire()
        rounds = self._reserve_roots(paused)
        spans, budget = self._plan_rounds(rounds)
        budget = self._plan_chunks(spans, budget, paused)
        self._admit(spans, budget, paused)
        self._num_paused = sum(s.key.frontend_id in paused for s in self._running) if paused else 0
        plan = StepPlan(
            step_id=self._step_id,
            ends=tuple(self._ends),
            begins=tuple(self._begins),
            commits=tuple(self._commits.values()),
            spans=tuple(spans),
        )
        self._ends, self._begins, self._commits = [], [], {}
        self._draft_lengths.begin_step(only_rounds=len(spans) == len(rounds))
        return plan

    def _expire(self) -> None:
        if self._expiry.next_ns is not None:
            for key, finish in self._expiry.due(self._now_ns(), self._has_started):
                self._accounts.end(key, finish)
                self._remove(key)

    def _has_started(self, key: ChildKey) -> bool:
        leader = self._live.get(key._replace(child=0))
        return self._live[key].scheduled_ns is not None or leader is None or leader.scheduled_ns is not None

    def _reserve_roots(self, paused: frozenset[str]) -> list[Sequence]:
        """The rows that decode in this step, each with room for one more token; preempts whoever comes last for it."""
        rounds: list[Sequence] = []
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            if sequence.is_decoding and (not paused or sequence.key.frontend_id not in paused):
                if not self._make_room(sequence):
                    continue  # it preempted itself: the next one took its position
                rounds.append(sequence)
            position += 1
        return rounds

    def _make_room(self, sequence: Sequence) -> bool:
        needed = len(sequence.token_ids)
        if sequence.sim is not None:
            # A script plays its run whatever the budget is, so the run's room is not optional.
            needed += min(self._settings.max_draft_len, sequence.num_remaining - 1)
        while not self._cache.grow(sequence, needed):
            if self._strip_waiting(sequence):
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_rounds(self, rounds: list[Sequence]) -> tuple[list[Span], int]:
        """Spans for `rounds` with their draft lengths, and the step's tokens left for prompts."""
        budget = self._capacity.max_num_batched_tokens - len(rounds)
        has_prompts = bool(self._waiting) or len(rounds) < len(self._running)
        # Half of the step stays with the prompts that wait: drafts must not starve them.
        lengths = self._draft_lengths.reserve(rounds, budget // 2 if has_prompts else budget)
        spans = [
            self._span(sequence, (sequence.token_ids[-1],), SpanKind.ROUND, num_draft)
            for sequence, num_draft in zip(rounds, lengths, strict=True)
        ]
        return spans, max(budget - sum(lengths), 0)

    def _plan_chunks(self, spans: list[Span], budget: int, paused: frozenset[str]) -> int:
        """Append the next chunk of every running prompt to `spans`; returns the tokens left."""
        for sequence in self._running:
            if budget <= 0:
                break
            if not sequence.is_decoding and sequence.key.frontend_id not in paused:
                budget = self._plan_chunk(spans, sequence, budget)
        return budget

    def _plan_chunk(self, spans: list[Span], sequence: Sequence, budget: int) -> int:
        end = min(len(sequence.token_ids), sequence.num_computed + budget)
        tokens = tuple(sequence.token_ids[sequence.num_computed : end])
        if end < len(sequence.token_ids):
            kind = SpanKind.CHUNK
        else:
            kind = SpanKind.LAST_RECOMPUTE if sequence.is_prompt_done else SpanKind.LAST_CHUNK
        spans.append(self._span(sequence, tokens, kind, 0))
        return budget - len(tokens)

    def _span(self, sequence: Sequence, tokens: tuple[int, ...], kind: SpanKind, budget: int) -> Span:
        assert sequence.row is not None  # narrowing: only running sequences are planned
        return Span(sequence.row, sequence.num_computed, tokens, kind, budget, sequence.block_ids)

    def _admit(self, spans: list[Span], budget: int, paused: frozenset[str]) -> None:
        """Give rows to waiting sequences, in order, as far as rows, blocks and the step's tokens go."""
        position = 0
        while position < len(self._waiting) and self._free_rows and budget > 0:
            sequence = self._waiting[position]
            if sequence.key.frontend_id in paused:
                position += 1
                continue
            num_hit = self._cache.admit(sequence, self._spare_blocks if self._running else 0)
            if num_hit is None and not self._running and self._strip_waiting(sequence):
                continue
            if num_hit is None:
                break
            self._waiting.remove(sequence)
            self._begin(sequence, num_hit)
            budget = self._plan_chunk(spans, sequence, budget)

    def _begin(self, sequence: Sequence, num_hit: int) -> None:
        sequence.row = row = heapq.heappop(self._free_rows)
        self.rows[row] = sequence
        bisect.insort(self._running, sequence, key=_order)
        if sequence.scheduled_ns is None:
            sequence.scheduled_ns = self._now_ns()
            self._expiry.scheduled(sequence.key)
            asks_cache = sequence.key.child == 0 and self._cache.can_read(sequence)
            self._accounts.scheduled(sequence, sequence.num_prompt if asks_cache else 0, num_hit if asks_cache else 0)
        else:
            self._accounts.resumed(sequence)
        sampling = sequence.sampling
        if sampling.prompt_logprobs is not None and (sequence.is_prompt_done or sequence.key.child != 0):
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # reported, or child 0 reports
        self._begins.append(
            RowBegin(
                row=row,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt,
                sampling=sampling,
                seed=sequence.seed,
                sim=sequence.sim,
                scope=sequence.submit.scope,
                prediction_token_ids=sequence.submit.prediction_token_ids,
            )
        )

    # ---- results ----

    def settle(self, committed: list[Committed], draft_ns: int) -> None:
        """Move every sequence to where the step brought it: lengths, blocks, forks; finished ones are freed.

        `draft_ns`: how long drafting took.
        """
        self._draft_lengths.end_step(committed, draft_ns)
        for item in committed:
            sequence = item.sequence
            if item.outcome is Outcome.CLOSED:
                continue  # its Close is in the inbox and comes first in the next step
            if item.outcome is Outcome.RETRACTED:
                self._retract(sequence)
                continue
            if item.samples or item.outcome is Outcome.ADVANCED:
                self._advance(item)
            if item.outcome is Outcome.FINISHED:
                self._remove(sequence.key)

    def _advance(self, item: Committed) -> None:
        sequence, row = item.sequence, item.sequence.row
        assert row is not None  # narrowing: it just ran
        if item.samples:
            # The root is the last token; its KV comes with the next span.
            sequence.num_computed = len(sequence.token_ids) - 1
            sequence.is_decoding = True
        else:
            sequence.num_computed = item.end
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)
        self._cache.commit(sequence)
        self._commits[row] = RowCommit(row, item.token_ids, sequence.num_computed, item.path)
        if item.samples and not sequence.is_prompt_done:
            sequence.is_prompt_done = True
            for child in self._followers.pop(sequence.key, ()):
                self._cache.fork(sequence, child)
                self._waiting.add(child)

    def _retract(self, sequence: Sequence) -> None:
        if sequence.sim is not None:
            sequence.sim = msgspec.structs.replace(sequence.sim, preempt_at=None)  # it happens once
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old place in line; everything is computed again later."""
        self._leave_row(sequence)
        self._cache.free(sequence)
        sequence.is_decoding = False
        self._accounts.retracted(sequence)
        self._waiting.add(sequence)

    def _strip_waiting(self, beneficiary: Sequence) -> bool:
        """Free the blocks that forked children hold while they wait; False when there were none."""
        stripped = False
        for sequence in self._waiting:
            if sequence.block_ids and sequence is not beneficiary:
                self._cache.free(sequence)
                self._waiting.recount(sequence)
                stripped = True
        return stripped

    # ---- places ----

    def _leave_row(self, sequence: Sequence) -> None:
        row = sequence.row
        if row is None:
            raise RuntimeError(f"{sequence.key} has no row to leave")
        sequence.row = None
        del self.rows[row]
        self._running.remove(sequence)
        self._ends.append(row)
        heapq.heappush(self._free_rows, row)

    def _remove(self, key: ChildKey) -> None:
        """Forget a live child wherever it is; a child that already ended is no error."""
        sequence = self._live.pop(key, None)
        if sequence is None:
            return
        self._expiry.forget(key)
        if sequence.row is not None:
            self._leave_row(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            group = self._followers[key._replace(child=0)]
            group.remove(sequence)
            if not group:
                del self._followers[key._replace(child=0)]
        self._cache.free(sequence)
        for child in self._followers.pop(key, ()):  # child 0 left before its prompt was done: each on its own
            self._waiting.add(child)

    # ---- gauges ----

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def next_deadline_ns(self) -> int | None:
        return self._expiry.next_ns

    def load(self, num_frontends: int, reporter: str = "") -> Load:
        """The gauges at this moment. `reporter`: the longest attached frontend, "" when there is none."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting) + sum(map(len, self._followers.values())),
            waiting_tokens=self._waiting.num_tokens,
            blocks_used=self._cache.num_held,
            blocks_total=self._capacity.num_blocks,
            frontends=num_frontends,
            paused=self._num_paused,
            draining=self.is_draining,
            reporter=reporter,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every held block belongs to exactly the live sequences that name it."""
        self._cache.check_integrity(self._live.values())


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
