"""The persistent batch: what each row is, and one step's spans as flat tensors.

Owns the rows' history and sampling state, driven by `StepPlan` alone; never decides what runs. Used by
`engine.model_executor`, read by `engine.runner`. T = tokens of the step, B = spans that sample, R = logits rows of them.
A row contributes its span and its drafted tokens: there is no padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from engine.model.attention import SpanLayout
from engine.model.decoder import ForwardInput
from engine.plan import RowBegin, RowCommit, Span, SpanKind
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft
from protocol.sampling import SamplingParams


@dataclass
class RowState:
    """One sequence in its row, from begin to end."""

    row: int
    token_ids: list[int]  # committed history, the root last
    num_prompt_tokens: int
    sampling: SamplingState
    last_span: Span | None = None  # of the previous step, until its commit
    has_root: bool = False  # between the last span and its draft stood a token that drafting produced
    taps: torch.Tensor | None = None  # [tokens of the last span and its draft, taps, hidden]

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params

    def commit(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.sampling.commit(token_ids)


@dataclass(frozen=True)
class PromptRows:
    """Prompt positions of one span whose logprobs were asked for: hidden row first + i predicts target_ids[i]."""

    span: int  # index into the plan's spans
    first: int  # flat index of the hidden state
    target_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True)
class Batch:
    """One step on its way to the device. `lengths[i]` is the draft length of spans[i], 0 where it has none."""

    spans: tuple[Span, ...]
    rows: tuple[RowState, ...]  # one per span
    lengths: tuple[int, ...]
    has_root: tuple[bool, ...]  # one per span: a token that drafting produced stands between the span and its draft
    layouts: tuple[SpanLayout, ...]
    step: ForwardInput
    stale_slots: tuple[int, ...]  # to be cleared first: behind the end of blocks this step enters
    sampling_spans: tuple[int, ...]  # B indices into spans
    logit_index: torch.Tensor  # int64 [R], flat rows whose logits are wanted
    sampling: SamplingRows
    prompts: tuple[PromptRows, ...]


class UnknownRow(KeyError):
    """A plan speaks of a row that no sequence has taken."""


class Rows:
    """Every occupied row."""

    def __init__(self, model: SamplingModel) -> None:
        self._model = model
        self._rows: dict[int, RowState] = {}

    def begin(self, begin: RowBegin) -> RowState:
        sampling = SamplingState(begin.sampling, begin.seed, begin.token_ids, begin.num_prompt_tokens, self._model)
        state = RowState(begin.row, list(begin.token_ids), begin.num_prompt_tokens, sampling)
        self._rows[begin.row] = state
        return state

    def commit(self, commit: RowCommit) -> RowState:
        state = self[commit.row]
        state.commit(commit.token_ids)
        return state

    def end(self, row: int) -> None:
        """The row is free again; ending a row that never began well is fine."""
        self._rows.pop(row, None)

    def __getitem__(self, row: int) -> RowState:
        try:
            return self._rows[row]
        except KeyError:
            raise UnknownRow(f"row {row} holds no sequence") from None


class BatchBuilder:
    """Lays spans and drafts out flat; one upload for the integers of a step."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def build(self, spans: Sequence[Span], rows: Sequence[RowState], lengths: Sequence[int], draft: Draft) -> Batch:
        """`lengths[i]` drafted tokens follow spans[i]. `draft` has one row per span that samples, in their order."""
        flat = _Flat()
        sampling_spans = tuple(index for index, span in enumerate(spans) if span.kind.samples)
        parents = None if draft.parents is None else draft.parents.tolist()  # device drafters of trees pay a copy here
        has_root = _has_root(draft, sampling_spans, len(spans))
        prompts: list[PromptRows] = []
        for index, (span, state) in enumerate(zip(spans, rows, strict=True)):
            tree = None
            if parents is not None and lengths[index]:
                tree = tuple(parents[sampling_spans.index(index)][: lengths[index]])
            asked = _prompt_rows(index, span, state, flat.num_tokens)
            prompts += [] if asked is None else [asked]
            self._add(flat, span, lengths[index], tree, has_root[index])
        host = torch.tensor([*flat.token_ids, *flat.positions, *flat.slots, *flat.logit_index], dtype=torch.int64)
        sizes = [flat.num_tokens] * 3 + [len(flat.logit_index)]
        tokens, positions, slots, logit_index = torch.split_with_sizes(host.to(self._device, non_blocking=True), sizes)
        if any(lengths):
            self._place_draft(tokens, flat.logit_index, [lengths[index] for index in sampling_spans], draft)
        if any(has_root):
            self._place_roots(tokens, flat.logit_index, [lengths[index] for index in sampling_spans], draft)
        states = [rows[index].sampling for index in sampling_spans]
        counts = [1 + lengths[index] for index in sampling_spans]
        return Batch(
            spans=tuple(spans),
            rows=tuple(rows),
            lengths=tuple(lengths),
            has_root=has_root,
            layouts=tuple(flat.layouts),
            step=ForwardInput(tokens, positions, slots),
            stale_slots=tuple(flat.stale_slots),
            sampling_spans=sampling_spans,
            logit_index=logit_index,
            sampling=SamplingRows.build(states, counts, self._device),
            prompts=tuple(prompts),
        )

    def _add(
        self, flat: "_Flat", span: Span, num_drafted: int, parents: tuple[int, ...] | None, has_root: bool
    ) -> None:
        num_settled = len(span.token_ids) + has_root  # before the draft
        num_tokens = num_settled + num_drafted
        end, size = span.start + num_tokens, self._block_size
        if end > len(span.block_ids) * size:
            raise ValueError(f"row {span.row} needs slots up to {end}; {len(span.block_ids)} blocks were reserved")
        if span.kind.samples:
            flat.logit_index += range(flat.num_tokens + num_settled - 1, flat.num_tokens + num_tokens)
        tree = _behind_root(parents) if parents is not None and has_root else parents
        flat.layouts.append(SpanLayout(span.start, num_tokens, span.block_ids, tree))
        flat.slots += (span.block_ids[p // size] * size + p % size for p in range(span.start, end))
        flat.positions += _positions(span.start, num_settled, num_drafted, parents)
        flat.token_ids += span.token_ids
        flat.token_ids += (0,) * (has_root + num_drafted)  # filled on the device: the draft may live there
        if (end - 1) // size * size >= span.start:  # the last block is entered by this step
            last_slot = span.block_ids[(end - 1) // size] * size + (end - 1) % size
            flat.stale_slots += range(last_slot + 1, (last_slot // size + 1) * size)

    def _place_draft(
        self, token_ids: torch.Tensor, logit_index: Sequence[int], lengths: Sequence[int], draft: Draft
    ) -> None:
        """Copy drafted tokens into the flat step: they sit at the logits rows behind each span's first."""
        targets: list[int] = []
        sources: list[int] = []
        width, first = draft.tokens.shape[1], 0
        for index, length in enumerate(lengths):
            targets += logit_index[first + 1 : first + 1 + length]
            sources += range(index * width, index * width + length)
            first += 1 + length
        where = torch.tensor([*targets, *sources], dtype=torch.int64)
        chosen = draft.tokens.reshape(-1)[where[len(targets) :].to(draft.tokens.device, non_blocking=True)]
        # No upload waits for the device: the step's one synchronisation is the copy of its answer.
        where_to = where[: len(targets)].to(self._device, non_blocking=True)
        token_ids.index_copy_(0, where_to, chosen.to(self._device, torch.int64, non_blocking=True))

    def _place_roots(
        self, token_ids: torch.Tensor, logit_index: Sequence[int], lengths: Sequence[int], draft: Draft
    ) -> None:
        """Copy roots into the flat step: each sits at the first of its span's logits rows."""
        assert draft.roots is not None and draft.has_root is not None
        targets: list[int] = []
        sources: list[int] = []
        first = 0
        for index, (length, has_root) in enumerate(zip(lengths, draft.has_root.tolist(), strict=True)):
            if has_root:
                targets.append(logit_index[first])
                sources.append(index)
            first += 1 + length
        where = torch.tensor([*targets, *sources], dtype=torch.int64)
        chosen = draft.roots[where[len(targets) :].to(draft.roots.device, non_blocking=True)]
        where_to = where[: len(targets)].to(self._device, non_blocking=True)
        # A row without a drawn root fails by its verdict; until then it needs a token that exists.
        token_ids.index_copy_(0, where_to, chosen.clamp(min=0).to(self._device, torch.int64, non_blocking=True))


@dataclass
class _Flat:
    """The step's lists while they grow."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_index: list[int] = field(default_factory=list)
    stale_slots: list[int] = field(default_factory=list)
    layouts: list[SpanLayout] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _has_root(draft: Draft, sampling_spans: Sequence[int], num_spans: int) -> tuple[bool, ...]:
    """Per span of the plan; the draft has one row per span that samples."""
    flags = [False] * num_spans
    if draft.has_root is not None:
        for index, flag in zip(sampling_spans, draft.has_root.tolist(), strict=True):
            flags[index] = flag
    return tuple(flags)


def _behind_root(parents: Sequence[int]) -> tuple[int, ...]:
    """The tree as it hangs on the span's own token: the root is its first node, and the parent of the draft's first."""
    return (-1, *(parent + 1 for parent in parents))


def _positions(start: int, num_tokens: int, num_drafted: int, parents: tuple[int, ...] | None) -> Iterable[int]:
    """A tree node's position is its depth's; a chain's are consecutive."""
    if parents is None:
        return range(start, start + num_tokens + num_drafted)
    root = start + num_tokens - 1
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [*range(start, root + 1), *(root + depth for depth in depths)]


def _prompt_rows(index: int, span: Span, state: RowState, flat_start: int) -> PromptRows | None:
    """Positions start + 1 .. start + tokens that lie in the prompt (position 0 has no prediction)."""
    num_top = state.params.prompt_logprobs
    if num_top is None or span.kind not in (SpanKind.CHUNK, SpanKind.LAST_CHUNK):
        return None
    end = min(span.start + len(span.token_ids) + 1, state.num_prompt_tokens)
    targets = tuple(state.token_ids[span.start + 1 : end])
    return PromptRows(index, flat_start, targets, num_top) if targets else None
