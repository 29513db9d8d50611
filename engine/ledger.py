"""The books: the only place where a token is counted, and therefore the only one from which it can reach a client.

Owns accounts (one per child, opened once, closed once), the cumulative `Counters` and every `SequenceOutput` and
`StepOutput`. Never decides who runs. Called by engine.core (commit, close_step) and by the scheduler (as `Accounts`).
Counting follows section 1 of the telemetry contract, row by row.
"""

import logging
from collections.abc import Callable, Mapping, Set

import msgspec

from engine.accounts import Account, EngineIdentity, RequestAccount, StepEnd, shifted
from engine.plan import Span, SpanKind, SpanResult, StepPlan, StepResult
from engine.sequence import STOPPED, ChildKey, Committed, Outcome, Sequence
from protocol.codec import encode_counters
from protocol.counters import ITERATION_TOKENS_BUCKETS, STEP_SECONDS_BUCKETS, Counters
from protocol.messages import (
    Close,
    Event,
    EventKind,
    Finish,
    Load,
    Phase,
    PhaseTimes,
    PromptReport,
    Round,
    SequenceOutput,
    StepOutcome,
    StepOutput,
    Submit,
    TokenLogprobs,
)
from protocol.reasons import CloseReason, FinishReason
from protocol.sampling import MAX_N

logger = logging.getLogger(__name__)

NO_PHASES = PhaseTimes(spans=((0, 0),) * len(Phase), on_device=False)
_CLOSED = Finish(FinishReason.ABORT)
_ALL = -1  # Close.index that means every child


class LedgerError(Exception):
    """An account is opened or closed twice, or does not exist: a bug in the engine."""


class Ledger:
    """Counts, answers, closes. `counters` is for reading."""

    def __init__(
        self,
        identity: EngineIdentity,
        max_draft_len: int,
        num_sources: int,
        now_ns: Callable[[], int],
        check_laws: bool = False,
    ) -> None:
        """`check_laws`: raise ConservationError after the step whose counters contradict each other (10 us a step)."""
        self.counters = Counters.zero(max_draft_len, num_sources)
        self._identity = identity
        self._now_ns = now_ns
        self._check_laws = check_laws
        self._accounts: dict[ChildKey, Account] = {}
        self._requests: dict[tuple[str, int], RequestAccount] = {}
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._noted: list[Account] = []  # accounts with an event that no output carried yet
        self._num_refused = 0
        self._step_id = 0
        self._outcome = StepOutcome.EMPTY
        self._phases = NO_PHASES

    @property
    def num_open(self) -> int:
        """Children whose last word is not said: running, waiting, or finished and not yet closed by their frontend."""
        return len(self._accounts)

    # ---- what the scheduler reports ----

    def open(self, sequence: Sequence) -> None:
        key = sequence.key
        if key in self._accounts:
            raise LedgerError(f"account {key} is opened twice")
        request = self._requests.setdefault((key.frontend_id, key.request_id), RequestAccount())
        account = Account(sequence, request)
        self._accounts[key] = account
        request.open_children[key.child] = account
        if key.child == 0 and sequence.submit.received_ns:
            self._note(account, EventKind.RECEIVED, 0, sequence.submit.received_ns)
        self._note(account, EventKind.QUEUED, 0, sequence.queued_ns)

    def is_open(self, frontend_id: str, request_id: int) -> bool:
        """Whether any child of the request is still open."""
        return (frontend_id, request_id) in self._requests

    def refuse_duplicate(self, frontend_id: str, submit: Submit) -> None:
        """A Submit under an open request's id: counted as refused; an answer would reach the other request's stream."""
        self._num_refused += 1
        logger.warning("duplicate_request_id frontend=%s request_id=%d", frontend_id, submit.request_id)

    def reject(self, frontend_id: str, submit: Submit, finish: Finish) -> None:
        """Answer a request that never ran: one closing output per child."""
        for child in range(min(max(submit.n, 1), MAX_N)):
            self._answer(ChildKey(frontend_id, submit.request_id, child), 0, finish)

    def close(self, frontend_id: str, close: Close) -> list[ChildKey]:
        """End the children that `close` names and answer each; a child that is not open is answered too.

        Returns the children that were open; those that still hold a place must give it up.
        """
        request = self._requests.get((frontend_id, close.request_id))
        children = list(request.open_children) if request is not None else []
        if close.index != _ALL:
            children = [close.index] if close.index in children else []
        if not children:
            # Sent twice, or it crossed the last output on the way: the answer says that nothing is left to wait for.
            self._answer(ChildKey(frontend_id, close.request_id, max(close.index, 0)), 0, _CLOSED)
        keys = [ChildKey(frontend_id, close.request_id, child) for child in children]
        for key in keys:
            self._close_child(self._accounts[key], close)
        return keys

    def end(self, key: ChildKey, finish: Finish) -> None:
        """End one open child by policy: a deadline, a shutdown, a dead device."""
        account = self._account(key)
        self._emit(account, (), None, None, account.aborted_round, account.finish or finish)
        self._forget(account)

    def end_all(self, finish: Finish) -> None:
        """End every open account, also those that only wait for their frontend."""
        for key in list(self._accounts):
            self.end(key, finish)

    def drop(self, frontend_id: str) -> None:
        """The frontend is gone: close its accounts, with nobody to answer."""
        for key in [key for key in self._accounts if key.frontend_id == frontend_id]:
            self._forget(self._accounts[key])
        self._outputs.pop(frontend_id, None)

    def scheduled(self, sequence: Sequence, num_queried: int, num_hit: int) -> None:
        """The child got a row for the first time. Tokens asked of the prefix cache and found there, 0 if not asked."""
        account = self._account(sequence.key)
        account.request.num_cached += num_hit
        self.counters.prefix_cache_queries += num_queried
        self.counters.prefix_cache_hits += num_hit
        self._note(account, EventKind.SCHEDULED, 0, sequence.scheduled_ns)

    def resumed(self, sequence: Sequence) -> None:
        """The child got a row again after a preemption."""
        self._note(self._account(sequence.key), EventKind.SCHEDULED)

    def retracted(self, sequence: Sequence) -> None:
        """The child lost its row to a preemption."""
        self.counters.num_preemptions += 1
        self._note(self._account(sequence.key), EventKind.RETRACTED)

    # ---- one step ----

    def commit(
        self, plan: StepPlan, result: StepResult, rows: Mapping[int, Sequence], closed: Set[tuple[str, int, int]]
    ) -> list[Committed]:
        """Count every row of the step and put its tokens on the way; the only road from an executor to a client.

        `rows` maps a span's row to its sequence; `closed` names the children whose Close arrived while the step ran
        (index -1: all of a request): their rounds are counted as aborted and carried by the closing output.
        """
        self._step_id = plan.step_id
        self._phases = result.phases
        committed = []
        num_tokens = 0
        for span, answer in zip(plan.spans, result.spans, strict=True):
            item = self._commit_row(rows[span.row], span, answer, closed)
            num_tokens += len(item.token_ids) + (0 if span.kind is SpanKind.ROUND else len(span.token_ids))
            committed.append(item)
        self._count_step(plan, result, num_tokens)
        return committed

    def close_step(self, end: StepEnd) -> tuple[dict[str, StepOutput], StepOutput]:
        """One StepOutput per frontend, sharing one encoded set of counters, and the same step without outputs.

        Called exactly once after each `commit`, whatever the step came to.
        """
        for account in self._noted:
            if account.events:
                self._emit(account, (), None, None, None, None)
        self._noted.clear()
        counters = self.counters
        counters.refused_messages = end.refused_messages + self._num_refused
        counters.frontends_cut_off = end.frontends_cut_off
        counters.step_seconds.observe((self._now_ns() - end.started_ns) / 1e9, STEP_SECONDS_BUCKETS)
        if self._check_laws:
            counters.check()
        snapshot = self._step_output(end, encode_counters(counters), ())
        outputs = {
            frontend_id: self._step_output(end, snapshot.counters, tuple(self._outputs.get(frontend_id, ())))
            for frontend_id in end.frontends
        }
        self._outputs = {}
        return outputs, snapshot

    def snapshot(self, load: Load) -> StepOutput:
        """The books before the first step (step_id 0), for the first Hello."""
        now_ns = self._now_ns()
        return self._step_output(StepEnd(now_ns, now_ns, load, [], 0, 0), encode_counters(self.counters), ())

    # ---- rows ----

    def _commit_row(
        self, sequence: Sequence, span: Span, answer: SpanResult, closed: Set[tuple[str, int, int]]
    ) -> Committed:
        account = self._account(sequence.key)
        end = span.start + len(span.token_ids)
        if closed and _is_closed(sequence.key, closed):
            if span.kind.is_round and answer.failure is None and not answer.retracted:
                account.aborted_round = self._count_round(span, answer, None)
            return Committed(sequence, Outcome.CLOSED, False, end, (), None)
        if answer.failure is not None:
            self.end(sequence.key, Finish(FinishReason.ERROR, message=answer.failure))
            return Committed(sequence, Outcome.FINISHED, False, end, (), None)
        if answer.retracted:
            return Committed(sequence, Outcome.RETRACTED, False, end, (), None)
        self.counters.recomputed_tokens += max(0, min(end, sequence.num_seen) - span.start)
        if answer.prompt_logprobs is not None:
            self._collect_prompt_logprobs(account, span, answer.prompt_logprobs)
        if not span.kind.samples:
            self._note(account, EventKind.CHUNK, len(span.token_ids))
            return Committed(sequence, Outcome.ADVANCED, False, end, (), None)
        return self._commit_tokens(account, span, answer, end)

    def _commit_tokens(self, account: Account, span: Span, answer: SpanResult, end: int) -> Committed:
        sequence = account.sequence
        kept, finish = sequence.append(answer.tokens)
        if finish is None and answer.ended:
            finish = STOPPED
        self.counters.generation_tokens += len(kept)
        round_, prompt = None, None
        if span.kind.is_round:
            round_ = self._count_round(span, answer, len(kept))
        else:
            self.counters.first_tokens += len(kept)
            self._note(account, EventKind.CHUNK, len(span.token_ids))
            prompt = self._count_prompt(account)
        logprobs = None if answer.logprobs is None else answer.logprobs[: len(kept)]
        self._emit(account, kept, logprobs, prompt, round_, finish)
        if finish is not None and sequence.submit.awaits_close:
            account.finish = finish
        elif finish is not None:
            self._forget(account)
        outcome, drafted = Outcome.ADVANCED if finish is None else Outcome.FINISHED, answer.drafted
        accepted, roots = answer.accepted, max(answer.non_draft - 1, 0)
        return Committed(sequence, outcome, True, end, kept, answer.path, drafted, answer.depth, accepted, roots)

    def _count_round(self, span: Span, answer: SpanResult, num_kept: int | None) -> Round:
        """Count one verify. `num_kept` None: the request was closed while it ran, nothing is committed."""
        counters = self.counters
        drafted, accepted = answer.drafted, answer.accepted
        cut = accepted + answer.non_draft - (num_kept or 0)
        if drafted >= 1:
            counters.draft_rounds += 1
            counters.draft_tokens += drafted
            counters.accepted_tokens += accepted
            for position in range(accepted):
                counters.accepted_per_pos[position] += 1
            counters.draft_depth += answer.depth
            counters.draft_tokens_by_source[answer.source] += drafted
            counters.accepted_tokens_by_source[answer.source] += accepted
        else:
            counters.plain_rounds += 1
        counters.non_draft_tokens += answer.non_draft
        counters.cut_tokens += cut
        if num_kept is None:
            counters.aborted_rounds += 1
        return Round(drafted, answer.depth, accepted, answer.non_draft, cut, answer.source, num_kept is None)

    def _count_prompt(self, account: Account) -> PromptReport | None:
        """The request's prompt is done: counted and reported once, by the first child that gets there."""
        request, sequence = account.request, account.sequence
        if request.is_prompt_counted:
            return None
        request.is_prompt_counted = True
        self.counters.prompt_tokens += sequence.num_prompt
        self.counters.prompt_tokens_cached += request.num_cached
        logprobs = None if sequence.sampling.prompt_logprobs is None else (None, *account.prompt_logprobs)
        account.prompt_logprobs = []
        return PromptReport(
            num_tokens=sequence.num_prompt,
            num_cached_tokens=request.num_cached,
            queued_ns=sequence.queued_ns,
            scheduled_ns=sequence.scheduled_ns or sequence.queued_ns,
            logprobs=logprobs,
        )

    def _collect_prompt_logprobs(self, account: Account, span: Span, logprobs: tuple[TokenLogprobs, ...]) -> None:
        if span.start == 0:
            account.prompt_logprobs = []  # a preempted prompt starts again
        account.prompt_logprobs.extend(logprobs)

    def _count_step(self, plan: StepPlan, result: StepResult, num_tokens: int) -> None:
        """Outcome, forwards and times. A step is failed when it had rows and none of them got a verdict."""
        counters = self.counters
        if not plan.spans:
            self._outcome = StepOutcome.EMPTY
            counters.steps_empty += 1
            return
        if all(answer.failure is not None for answer in result.spans):
            self._outcome = StepOutcome.FAILED
            counters.steps_failed += 1
        else:
            self._outcome = StepOutcome.OK
            counters.steps_ok += 1
        counters.target_forwards += result.target_forwards
        counters.draft_forwards += result.draft_forwards
        counters.iteration_tokens.observe(num_tokens, ITERATION_TOKENS_BUCKETS)
        histograms = (
            counters.observe_seconds,
            counters.draft_seconds,
            counters.verify_seconds,
            counters.accept_seconds,
        )
        for histogram, (start, end) in zip(histograms, result.phases.spans, strict=True):
            if end > start:
                histogram.observe((end - start) / 1e9, STEP_SECONDS_BUCKETS)

    # ---- accounts ----

    def _account(self, key: ChildKey) -> Account:
        account = self._accounts.get(key)
        if account is None:
            raise LedgerError(f"account {key} is not open: never opened, or closed twice")
        return account

    def _close_child(self, account: Account, close: Close) -> None:
        finish = account.finish
        if close.reason is CloseReason.STOP_STRING:
            finish = STOPPED
        if close.reason is not CloseReason.CLIENT_GONE:
            # A count beyond what was sent would break the laws for everybody; one frontend's mistake must not.
            kept = min(max(close.kept, 0), account.num_sent)
            self.counters.trimmed_tokens += account.num_sent - kept
        self._emit(account, (), None, None, account.aborted_round, finish or _CLOSED)
        self._forget(account)

    def _forget(self, account: Account) -> None:
        key = account.sequence.key
        if self._accounts.pop(key, None) is not account:
            raise LedgerError(f"account {key} is closed twice")
        account.events.clear()
        del account.request.open_children[key.child]
        if not account.request.open_children:
            del self._requests[key.frontend_id, key.request_id]

    def _note(self, account: Account, kind: EventKind, num_tokens: int = 0, at_ns: int | None = None) -> None:
        """Remember an event of a traced request; an untraced one costs a comparison."""
        if account.sequence.submit.trace_level > 0:
            account.events.append(Event(kind, self._now_ns() if at_ns is None else at_ns, num_tokens))
            self._noted.append(account)

    # ---- outputs ----

    def _emit(
        self,
        account: Account,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt: PromptReport | None,
        round_: Round | None,
        finish: Finish | None,
    ) -> None:
        key = account.sequence.key
        events: tuple[Event, ...] = ()
        if account.events:
            events = tuple(account.events)
            account.events.clear()
        output = SequenceOutput(
            key.request_id, key.child, account.num_sent, token_ids, logprobs, prompt, round_, events, finish
        )
        account.num_sent += len(token_ids)
        self._outputs.setdefault(key.frontend_id, []).append(output)

    def _answer(self, key: ChildKey, first_index: int, finish: Finish) -> None:
        """A closing output for a child without an account."""
        output = SequenceOutput(key.request_id, key.child, first_index, (), None, None, None, (), finish)
        self._outputs.setdefault(key.frontend_id, []).append(output)

    def _step_output(self, end: StepEnd, counters: msgspec.Raw, outputs: tuple[SequenceOutput, ...]) -> StepOutput:
        return StepOutput(
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            step_id=self._step_id,
            started_ns=end.started_ns,
            outcome=self._outcome,
            phases=shifted(self._phases, end.executed_ns - end.started_ns),
            counters=counters,
            load=end.load,
            outputs=outputs,
        )


def _is_closed(key: ChildKey, closed: Set[tuple[str, int, int]]) -> bool:
    return key in closed or (key.frontend_id, key.request_id, _ALL) in closed
