"""The data of one step: what policy asks for (`StepPlan`) and what mechanism answers (`StepResult`).

Plain values without torch, so that a simulated engine needs none and a plan can be broadcast to other ranks as it is.
Built by the scheduler, consumed by an Executor; the ledger reads both. B = spans of the plan, W = max_draft_len.
"""

from enum import IntEnum

import msgspec

from protocol.messages import PhaseTimes, SimScript, TokenLogprobs
from protocol.sampling import SamplingParams


class _Data(msgspec.Struct, frozen=True, gc=False):
    pass


class SpanKind(IntEnum):
    """What a span's forward is for. Only the last three kinds sample."""

    CHUNK = 0  # part of a prompt, not its end; or part of a recompute
    LAST_CHUNK = 1  # the end of a prompt: gives the first token; not a round
    LAST_RECOMPUTE = 2  # the end of a recompute after preemption: a plain round
    ROUND = 3  # draft and verify behind the root

    @property
    def samples(self) -> bool:
        return self is not SpanKind.CHUNK

    @property
    def is_round(self) -> bool:
        return self >= SpanKind.LAST_RECOMPUTE


class RowBegin(_Data, frozen=True):
    """A sequence takes a row of the persistent batch (first time, or again after preemption)."""

    row: int
    token_ids: tuple[int, ...]  # everything committed so far: the prompt, and on a resume the generated tokens
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # resolved: of this child, in [0, 2**63)
    sim: SimScript | None
    scope: str = ""  # whose text it is, for drafters that learn across sequences
    prediction_token_ids: tuple[int, ...] = ()  # what the client expects as the answer


class RowCommit(_Data, frozen=True):
    """What the previous step made permanent for a row."""

    row: int
    token_ids: tuple[int, ...]  # appended to the row's history; empty for a prompt chunk
    num_computed: int  # positions whose KV is valid and final
    path: tuple[int, ...] | None  # accepted tree nodes, None for chains


class Span(_Data, frozen=True):
    """The tokens one row feeds to this step's forward, at positions start, start + 1, ...

    A ROUND span holds the root only; the executor appends the draft (at most `budget` tokens), whose slots
    `block_ids` already covers: position p lives in block_ids[p // block_size] at p % block_size.
    """

    row: int
    start: int
    token_ids: tuple[int, ...]
    kind: SpanKind
    budget: int  # most draft tokens; 0 for every kind but ROUND
    block_ids: tuple[int, ...]


class StepPlan(_Data, frozen=True):
    """Everything an executor needs for one step, in the order it applies it: commits, ends, begins, spans.

    What a row committed is told even when the row ends with it: its blocks may be in the prefix cache, and there a
    tree's nodes must be in order and a drafter's keys must be where the target's are.
    """

    step_id: int
    ends: tuple[int, ...]  # rows whose sequence finished, was aborted or preempted
    begins: tuple[RowBegin, ...]
    commits: tuple[RowCommit, ...]  # of the rows as they were before `ends`
    spans: tuple[Span, ...]

    def only(self, span: Span) -> "StepPlan":
        """This plan reduced to one span, its row changes left out: the retry after they were applied."""
        return StepPlan(step_id=self.step_id, ends=(), begins=(), commits=(), spans=(span,))


class SpanResult(_Data, frozen=True):
    """What one span came to, on the host. `tokens` are the accepted draft tokens, then the target's own.

    For a chunk everything is zero. `failure` set: the row failed (non-finite logits, or the exception its retry raised)
    and nothing else counts. `ended`: the sequence ends behind `tokens` without an EOS token (simulated scripts).
    `retracted`: the result was lost to a preemption in flight (simulated scripts); it is no round.
    """

    drafted: int
    depth: int
    source: int
    accepted: int
    non_draft: int
    tokens: tuple[int, ...]  # accepted + non_draft entries
    path: tuple[int, ...] | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, when the row asked
    prompt_logprobs: (
        tuple[TokenLogprobs, ...] | None
    )  # of prompt positions start+1 .. start+len(tokens) (the last chunk: one fewer)
    failure: str | None = None
    ended: bool = False
    retracted: bool = False


CHUNK_RESULT = SpanResult(0, 0, 0, 0, 0, (), None, None, None)


def failed_result(reason: str) -> SpanResult:
    return SpanResult(0, 0, 0, 0, 0, (), None, None, None, failure=reason)


class StepResult(_Data, frozen=True):
    """Executor's answer: one `SpanResult` per span of the plan, in its order, and when the phases ran."""

    spans: tuple[SpanResult, ...]
    phases: PhaseTimes  # relative to the start of `execute`
    target_forwards: int
    draft_forwards: int
