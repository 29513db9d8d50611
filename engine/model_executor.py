"""Mechanism: one step of the target model, from plan to result. The second of the two screens.

Owns rows, drafting, the forward and the verdict, in this order and under one clock; never counts, never sees a request,
never decides what runs. Called by `engine.core` through `engine.executor.Executor`; built by `engine.construction`.
B = spans that sample.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.accept import Verdict, accept, place_draft
from engine.batch import Batch, BatchBuilder, Rows, RowState
from engine.clock import PhaseClock
from engine.executor import DeviceFailure, Executor
from engine.logprobs import Logprobs, SpanVerdict, pack, token_logprobs, unpack, verdict_logprobs
from engine.plan import CHUNK_RESULT, RowCommit, Span, SpanResult, StepPlan, StepResult, failed_result
from engine.runner import Runner, TargetOutput
from engine.sampling import SamplingModel
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.messages import Phase, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Drafted:
    """The step's draft, one row per span that samples, and what the host must know of it."""

    draft: Draft
    lengths: tuple[int, ...]  # per span of the plan
    depths: tuple[int, ...]
    sources: tuple[int, ...]


class ModelExecutor(Executor):
    def __init__(self, runner: Runner, speculator: Speculator, sampling: SamplingModel, clock: PhaseClock) -> None:
        self.clock = clock  # a profile puts one around it while it runs, between steps
        self._runner = runner
        self._speculator = speculator
        self._device = sampling.device
        self._vocab_size = sampling.vocab_size
        self._rows = Rows(sampling)
        self._batches = BatchBuilder(runner.pool.block_size, sampling.device)
        self._broken: dict[int, str] = {}  # rows whose own bookkeeping raised: their spans fail, nobody else's

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.start()
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except RuntimeError as error:
            if is_device_error(error):
                raise DeviceFailure(f"the device failed: {_first_line(error)}") from error
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        if plan.ends or plan.begins or plan.commits:
            with self.clock.phase(Phase.OBSERVE):
                self._settle(plan)
        spans = [span for span in plan.spans if span.row not in self._broken]
        if not spans:
            results = [failed_result(self._broken[span.row]) for span in plan.spans]
            return StepResult(tuple(results), self.clock.read(), target_forwards=0, draft_forwards=0)
        rows = [self._rows[span.row] for span in spans]
        drafted = self._draft(spans, rows)
        with self.clock.phase(Phase.VERIFY):
            batch = self._batches.build(spans, rows, drafted.lengths, drafted.draft)
            output = self._runner.forward(batch)
            self._keep(batch, output)
        results = self._judge(batch, drafted, output)
        by_row = dict(zip((span.row for span in spans), results, strict=True))
        answers = (by_row.get(span.row) or failed_result(self._broken[span.row]) for span in plan.spans)
        return StepResult(tuple(answers), self.clock.read(), 1, drafted.draft.num_forwards)

    # ---- OBSERVE: row changes ----

    def _settle(self, plan: StepPlan) -> None:
        """Apply commits, ends and begins. A row whose change raises is broken; the others' changes still happen."""
        committed: list[CommittedSpan] = []
        for commit in plan.commits:
            self._guard(commit.row, self._commit, commit, committed)
        self._observe(committed)
        for row in plan.ends:
            self._rows.end(row)
            self._broken.pop(row, None)
            self._guard(row, self._speculator.end, row)
            self._broken.pop(row, None)  # a drafter that could not forget has nobody left to fail
        for begin in plan.begins:
            self._broken.pop(begin.row, None)
            self._guard(begin.row, self._rows.begin, begin)
            start = SequenceStart(
                begin.row, begin.token_ids, begin.num_prompt_tokens, begin.scope, begin.prediction_token_ids
            )
            self._guard(begin.row, self._speculator.begin, start)

    def _observe(self, committed: Sequence[CommittedSpan]) -> None:
        """One call for all rows, which a drafter with a model needs; row by row where that raises or on the host."""
        if not self._speculator.capabilities.drafts_on_host and committed:
            try:
                self._speculator.observe(committed)
            except Exception as error:  # the boundary of one row: which one is found below
                if is_device_error(error):
                    raise
            else:
                return
        for span in committed:
            self._guard(span.row, self._speculator.observe, [span])

    def _commit(self, commit: RowCommit, committed: list[CommittedSpan]) -> None:
        """Move accepted tree nodes, extend the history; what became permanent are the positions newly computed."""
        state = self._rows.commit(commit)
        span, taps = state.last_span, state.taps
        if span is None:
            raise ValueError(f"row {commit.row} is committed without having run")
        if commit.path:
            num_settled = len(span.token_ids) + state.has_root  # before the draft
            self._runner.pool.compact(span.block_ids, span.start + num_settled - 1, commit.path)
            if taps is not None:
                kept = [*range(num_settled), *(num_settled + node for node in commit.path)]
                taps = taps[kept]
        state.last_span = state.taps = None
        token_ids = state.token_ids[span.start : commit.num_computed]
        committed.append(
            CommittedSpan(
                row=commit.row,
                start=span.start,
                token_ids=token_ids,
                next_token_id=state.token_ids[commit.num_computed],
                block_ids=span.block_ids,
                taps=None if taps is None else taps[: len(token_ids)],
            )
        )

    def _guard(self, row: int, change: Callable[..., object], *arguments: object) -> None:
        """Run one row change; when it raises, the row is broken and its spans fail with the reason."""
        if row in self._broken:
            return
        try:
            change(*arguments)
        except Exception as error:  # the boundary of one row
            if is_device_error(error):
                raise
            logger.exception("row change failed row=%d", row)
            self._broken[row] = f"{type(error).__name__}: {_first_line(error)}"

    # ---- DRAFT ----

    def _draft(self, spans: Sequence[Span], rows: Sequence[RowState]) -> _Drafted:
        sampling = [index for index, span in enumerate(spans) if span.kind.samples]
        asking = [place for place, index in enumerate(sampling) if spans[index].budget > 0]
        if not asking:
            width = self._speculator.capabilities.max_draft_len
            none = empty_draft(len(sampling), width, self._device)
            zeros = (0,) * len(spans)
            return _Drafted(none, zeros, zeros, zeros)
        with self.clock.phase(Phase.DRAFT):
            wanted = [_draft_row(spans[sampling[place]], rows[sampling[place]]) for place in asking]
            draft = self._speculator.propose(wanted)
            lengths, depths, sources = self._read(draft, wanted)
            spread = place_draft(draft, asking, len(sampling))
        per_span = [[0] * len(spans) for _ in range(3)]
        for values, target in zip((lengths, depths, sources), per_span, strict=True):
            for place, value in zip(asking, values, strict=True):
                target[sampling[place]] = value
        return _Drafted(spread, tuple(per_span[0]), tuple(per_span[1]), tuple(per_span[2]))

    def _read(self, draft: Draft, wanted: Sequence[DraftRow]) -> tuple[list[int], list[int], list[int]]:
        """Lengths, depths and sources on the host: free for host drafters, whose drafts live there.

        Raises ValueError for a draft that breaks the seam's contract: that is the drafter's bug, met where it is made.
        """
        lengths = [int(length) for length in draft.lengths.tolist()]
        sources = [int(source) for source in draft.sources.tolist()]
        width = draft.tokens.shape[1]
        if draft.accepted is not None and not self._speculator.capabilities.synthetic:
            raise ValueError("the drafter decides which of its tokens stay, and does not say that it is synthetic")
        has_root = [False] * len(wanted) if draft.has_root is None else draft.has_root.tolist()
        for row, length, own in zip(wanted, lengths, has_root, strict=True):
            if not 0 <= length <= min(row.budget - own, width):
                raise ValueError(f"the drafter gave row {row.row} {length + own} tokens; its budget is {row.budget}")
            if own and row.sampling.logprobs is not None:
                raise ValueError(
                    f"the drafter gave row {row.row} a root, which comes without the log-probabilities asked"
                )
        if draft.tokens.device.type == "cpu" and any(lengths):
            valid = torch.arange(width) < draft.lengths[:, None]
            outside = valid & ((draft.tokens < 0) | (draft.tokens >= self._vocab_size))
            if bool(outside.any()):
                raise ValueError("the drafter gave a token outside the vocabulary")
        if draft.parents is None:
            return lengths, lengths, sources
        trees = draft.parents.tolist()
        return lengths, [_depth(tree[:length]) for tree, length in zip(trees, lengths, strict=True)], sources

    # ---- VERIFY and ACCEPT ----

    def _keep(self, batch: Batch, output: TargetOutput) -> None:
        """Remember, until their commit, where each row ran and the states a drafter may want."""
        first = 0
        for span, state, layout, has_root in zip(batch.spans, batch.rows, batch.layouts, batch.has_root, strict=True):
            state.last_span, state.has_root = span, has_root
            state.taps = None if output.taps is None else output.taps[first : first + layout.num_tokens]
            first += layout.num_tokens

    def _judge(self, batch: Batch, drafted: _Drafted, output: TargetOutput) -> list[SpanResult]:
        if not batch.sampling_spans and not batch.prompts:
            self._wait()
            return [CHUNK_RESULT] * len(batch.spans)
        with self.clock.phase(Phase.ACCEPT):
            verdict = accept(output.logits, drafted.draft, batch.sampling)
            asked = verdict_logprobs(output.logits, verdict, batch.sampling)
            verdicts, parts = self._bring_back(verdict, asked, self._prompt_logprobs(batch, output))
        prompts = _join(batch, parts)
        judged = dict(zip(batch.sampling_spans, verdicts, strict=True))
        return [_result(judged.get(index), drafted, index, prompts.get(index)) for index in range(len(batch.spans))]

    def _prompt_logprobs(self, batch: Batch, output: TargetOutput) -> list[Logprobs]:
        return [
            token_logprobs(logits, targets, prompt.num_top)
            for prompt in batch.prompts
            for logits, targets in self._runner.prompt_logits(output, prompt)
        ]

    def _bring_back(
        self, verdict: Verdict, asked: Sequence[Logprobs | None], prompts: Sequence[Logprobs]
    ) -> tuple[list[SpanVerdict], list[tuple[TokenLogprobs, ...]]]:
        """The step's one device-to-host copy, and its one synchronisation."""
        packed, layout = pack(verdict, asked, prompts)
        return unpack(packed.cpu(), layout)

    def _wait(self) -> None:
        """A step of chunks brings nothing back, but its end must be known: errors surface here, times are true."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def is_device_error(error: BaseException) -> bool:
    """The device itself failed (not: it is out of memory, which a smaller batch may survive)."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(("CUDA error", "CUDA driver error"))
    )


def _draft_row(span: Span, state: RowState) -> DraftRow:
    return DraftRow(
        row=span.row,
        token_ids=state.token_ids,
        budget=span.budget,
        num_prompt_tokens=state.num_prompt_tokens,
        sampling=state.params,
        seed=state.sampling.seed,
        block_ids=span.block_ids,
    )


def _depth(parents: Sequence[int]) -> int:
    """Of a tree in topological order; 0 for an empty one."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _join(batch: Batch, parts: Sequence[tuple[TokenLogprobs, ...]]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Slices of prompt positions back into one tuple per span."""
    prompts: dict[int, tuple[TokenLogprobs, ...]] = {}
    remaining = iter(parts)
    for prompt in batch.prompts:
        positions: tuple[TokenLogprobs, ...] = ()
        while len(positions) < len(prompt.target_ids):
            positions += next(remaining)
        prompts[prompt.span] = positions
    return prompts


def _result(
    verdict: SpanVerdict | None, drafted: _Drafted, index: int, prompt: tuple[TokenLogprobs, ...] | None
) -> SpanResult:
    if verdict is None:
        return CHUNK_RESULT if prompt is None else SpanResult(0, 0, 0, 0, 0, (), None, None, prompt)
    if verdict.failure is not None:
        return failed_result(verdict.failure)
    return SpanResult(
        drafted=drafted.lengths[index],
        depth=drafted.depths[index],
        source=drafted.sources[index],
        accepted=verdict.accepted,
        non_draft=verdict.non_draft,
        tokens=verdict.tokens,
        path=verdict.path if drafted.lengths[index] else None,
        logprobs=verdict.logprobs,
        prompt_logprobs=prompt,
    )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
