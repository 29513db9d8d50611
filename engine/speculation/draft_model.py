"""A smaller model drafts: any decoder the engine can load, one token after the other, for all rows in one batch.

Owns what of each row the draft model has computed, and its pages under the target's block ids; never decides how much is
drafted. Built by `draft_model_recipe`. Source: speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318). n = rows that draft, W = max_draft_len, V = target vocabulary.

Nothing is computed twice. A round's first forward feeds the root, the next ones each drafted token but the last; of what
is committed, the keys are there already, except when all of a draft was accepted: then its last token was never fed. It
waits for the next draft, which feeds it together with the root, so that no forward is spent on it alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.kv.pool import KVPool
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.draft_step import DraftSpan, DraftStep
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator
from engine.speculation.vocabulary import TokenMap


@dataclass(frozen=True)
class _RowState:
    """Committed positions below `num_ready` have keys; `waiting` are the committed tokens from there on."""

    num_ready: int
    num_ahead: int = 0  # positions behind them that hold keys of proposed tokens
    waiting: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()  # cover what waits

    @property
    def end(self) -> int:
        return self.num_ready + len(self.waiting)


@dataclass(frozen=True)
class _Feed:
    """Tokens a row feeds at positions start, start + 1, ...; the slots up to `reach` are about to be written."""

    start: int
    token_ids: Sequence[int]
    block_ids: tuple[int, ...]
    reach: int

    @property
    def span(self) -> DraftSpan:
        return DraftSpan(self.start, len(self.token_ids), self.block_ids)


class _Proposal:
    """A draft while it grows, step by step. Probabilities are stored once, where the verdict reads them."""

    def __init__(self, lengths: Sequence[int], order: torch.Tensor, width: int) -> None:
        """`order` int64 [n]: the place, among the rows that were asked, of each row that drafts."""
        self._lengths = tuple(lengths)
        self._order = order
        self._tokens = torch.zeros(len(lengths), width, dtype=torch.int32, device=order.device)
        self._probs: torch.Tensor | None = None

    def put(self, step: int, tokens: torch.Tensor, probs: torch.Tensor | None) -> None:
        """Int64 [m] for the first m rows that draft, and the float32 [m, V] they were drawn from."""
        places = self._order[: tokens.shape[0]]
        self._tokens[:, step].index_copy_(0, places, tokens.to(torch.int32))
        if probs is not None:
            if self._probs is None:
                self._probs = probs.new_empty(*self._tokens.shape, probs.shape[1])
            self._probs[:, step].index_copy_(0, places, probs)

    def draft(self) -> Draft:
        """Lengths stay on the host, which made them: nobody has to fetch them."""
        return Draft(
            tokens=self._tokens,
            lengths=torch.tensor(self._lengths, dtype=torch.int32),
            parents=None,
            probs=self._probs,
            roots=None,
            sources=torch.zeros(len(self._lengths), dtype=torch.int8),
            num_forwards=max(self._lengths),
        )


class DraftModelSpeculator(Speculator):
    def __init__(self, model: DecoderModel, pool: KVPool, tokens: TokenMap, capabilities: Capabilities) -> None:
        """`pool`: of the model's shape, with the target's number of blocks."""
        self.capabilities = capabilities
        self._model = model
        self._pool = pool
        self._attention = GroupedAttention(pool, model.arch.num_heads)
        self._tokens = tokens
        self._rows: dict[int, _RowState] = {}

    def begin(self, start: SequenceStart) -> None:
        # Its first span says where it begins: behind what was found in the prefix cache.
        self._rows.pop(start.row, None)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """Compute the keys of prompts, and of tokens that no draft has fed since the last call."""
        heard = {span.row: self._heard(span) for span in spans}
        due = {row: state for row, state in {**self._rows, **heard}.items() if self._is_due(row, state)}
        if due:
            self._forward([_feed_waiting(state) for state in due.values()])
        # Only now: a call that raised is repeated row by row, and must find the rows as they were.
        self._rows |= heard
        self._rows |= {row: _RowState(state.end) for row, state in due.items()}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        lengths = [self._draft_len(row) for row in rows]
        # Longest first: the rows that still draft are always the first ones.
        order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
        if not order:
            return empty_draft(len(rows), self.capabilities.max_draft_len, torch.device("cpu"))
        proposal = _Proposal(lengths, self._pool.slots_tensor(order), self.capabilities.max_draft_len)
        self._draft([rows[index] for index in order], [lengths[index] for index in order], proposal)
        for index in order:
            self._rows[rows[index].row] = _RowState(len(rows[index].token_ids), lengths[index] - 1)
        return proposal.draft()

    def end(self, row: int) -> None:
        """A full block stays findable behind its sequence, so the keys that wait in one are computed now."""
        state = self._rows.pop(row, None)
        size = self._pool.block_size
        if state is not None and state.end // size * size > state.num_ready:
            self._forward([_feed_waiting(state)])

    # ---- what a row is about to feed ----

    def _draft_len(self, row: DraftRow) -> int:
        """How far the row can be drafted: no token is fed at a position the draft model was not made for."""
        positions_left = self._model.arch.context_length + 1 - len(row.token_ids)
        return max(0, min(row.budget, self.capabilities.max_draft_len, positions_left))

    def _heard(self, span: CommittedSpan) -> _RowState:
        """The row once the span is committed: keys of accepted tokens stay, the others are missing."""
        old = self._rows.get(span.row) or _RowState(span.start)
        context = self._model.arch.context_length
        if span.start >= context:
            return old
        end = min(span.start + len(span.token_ids), context)
        num_ready = max(old.num_ready, min(old.num_ready + old.num_ahead, end))
        first = span.start - len(old.waiting)
        committed = (*old.waiting, *span.token_ids)
        return _RowState(num_ready, 0, committed[num_ready - first : end - first], span.block_ids)

    def _is_due(self, row: int, state: _RowState) -> bool:
        """A single token may wait for one draft; prompts, and what waited already, may not."""
        before = self._rows.get(row)
        return len(state.waiting) > 1 or (bool(state.waiting) and before is not None and bool(before.waiting))

    def _first_feed(self, row: DraftRow, length: int) -> _Feed:
        """What waits, and the root. A row that is asked again for the same root feeds the root alone."""
        state, root = self._rows.get(row.row), len(row.token_ids) - 1
        if state is None:
            raise ValueError(f"row {row.row} drafts before anything of it was committed")
        start = min(state.num_ready, root)
        return _Feed(start, row.token_ids[start:], row.block_ids, root + length)

    # ---- forwards ----

    def _draft(self, rows: Sequence[DraftRow], lengths: Sequence[int], proposal: _Proposal) -> None:
        """A token per step for the rows whose draft is longer than it; `lengths` descending, at least 1."""
        draws = self.capabilities.gives_probs and not all(row.sampling.is_greedy for row in rows)
        choosers: dict[int, Chooser] = {}  # by how many rows still draft
        positions = self._pool.slots_tensor([len(row.token_ids) for row in rows])
        last = self._forward([self._first_feed(row, length) for row, length in zip(rows, lengths, strict=True)])
        for step in range(lengths[0]):
            logits = self._tokens.target_logits(self._model.logits(last))
            count, probs = logits.shape[0], None
            if draws:
                if count not in choosers:
                    choosers[count] = Chooser(rows[:count], self._tokens.target_size, self._pool.device)
                tokens, probs = choosers[count].choose(logits, positions[:count] + step)
            else:
                tokens = logits.argmax(dim=1)
            proposal.put(step, tokens, probs)
            going_on = sum(length > step + 1 for length in lengths)
            if going_on:
                last = self._step(rows[:going_on], step + 1, tokens[:going_on])

    def _forward(self, feeds: Sequence[_Feed]) -> torch.Tensor:
        """Feed tokens known to the host; the hidden states [len(feeds), hidden] of each feed's last one."""
        stale = [slot for feed in feeds for slot in self._stale_slots(feed)]
        if stale:
            self._pool.clear(self._pool.slots_tensor(stale))
        token_ids = self._pool.slots_tensor([token for feed in feeds for token in feed.token_ids])
        return self._run([feed.span for feed in feeds], token_ids)

    def _step(self, rows: Sequence[DraftRow], step: int, tokens: torch.Tensor) -> torch.Tensor:
        """Feed each row's draft token number `step` - 1, int64 [n], behind its root."""
        return self._run([DraftSpan(len(row.token_ids) - 1 + step, 1, row.block_ids) for row in rows], tokens)

    def _run(self, spans: Sequence[DraftSpan], token_ids: torch.Tensor) -> torch.Tensor:
        step = DraftStep.of(spans, self._pool)
        layout = self._attention.layout(step.layouts)
        fed = ForwardInput(self._tokens.fed_tokens(token_ids), step.positions, step.slots)
        hidden, _ = self._model.forward(fed, self._attention, layout)
        return hidden.index_select(0, step.last)

    def _stale_slots(self, feed: _Feed) -> Iterable[int]:
        """Slots behind the fed tokens in blocks the row enters: whole blocks are read under a mask, and 0 * NaN is NaN."""
        size = self._pool.block_size
        first_entered, end = -(-feed.start // size) * size, -(-feed.reach // size) * size
        behind = range(max(first_entered, feed.start + len(feed.token_ids)), end)
        return (self._pool.slot(feed.block_ids, position) for position in behind)


def _feed_waiting(state: _RowState) -> _Feed:
    return _Feed(state.num_ready, state.waiting, state.block_ids, state.end)
