"""One prompt of a request on its way: where it runs, what its children have said, and how it begins anew at another engine.

Owns what belongs to one attempt: the stream, its children, their times and the prompt's report; all of it is replaced when the
engine is lost, except children that had ended. Never decides whether to begin anew, never measures. Used by
`frontend.generation`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from frontend.choices import Choice
from frontend.packed_logprobs import PackedLogprobs
from protocol.messages import PromptReport, SequenceOutput
from protocol.reasons import CloseReason
from protocol.sampling import SamplingParams


class OutputStream(Protocol):
    """What a submitted request gives back (`frontend.streams.Stream`, `frontend.retry.RetriedStream`)."""

    @property
    def engine_id(self) -> str: ...  # of the engine that runs it now

    @property
    def sources(self) -> Sequence[str]: ...  # names of its drafts

    async def next(self) -> list[SequenceOutput]: ...

    def close(self, index: int, reason: CloseReason, kept: int = 0) -> None: ...

    def abandon(self) -> None: ...

    def restart(self) -> bool: ...  # whether it begins anew at another engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to run. `text` as the client wrote it, None when it sent token ids."""

    token_ids: tuple[int, ...]
    text: str | None
    sampling: SamplingParams


@dataclass(slots=True)
class Times:
    """Of one child, in seconds of the frontend's clock."""

    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class PromptRun:
    """One submitted prompt. `submitted_s`: when, to the engine that has it now."""

    prompt: Prompt
    stream: OutputStream
    choices: list[Choice]
    submitted_s: float
    times: list[Times] = field(default_factory=list)
    report: PromptReport | None = None  # without the log-probabilities
    prompt_logprobs: PackedLogprobs | None = None
    task: "asyncio.Task[list[SequenceOutput]] | None" = None

    def __post_init__(self) -> None:
        self.times = [Times() for _ in self.choices]

    def take_report(self, report: PromptReport) -> None:
        if report.logprobs is not None:
            self.prompt_logprobs = PackedLogprobs(report.logprobs)
        self.report = msgspec.structs.replace(report, logprobs=None)

    @property
    def is_over(self) -> bool:
        return all(choice.is_closed for choice in self.choices)

    @property
    def can_begin_anew(self) -> bool:
        """Whether nobody has seen a part of an answer that would be another one then."""
        return all(choice.is_complete or not choice.is_seen for choice in self.choices)

    def begin_anew(self, fresh: Callable[[int], Choice], now_s: float) -> int | None:
        """Give the prompt to another engine; None when no engine takes it. Returns how many tokens are thus lost.

        Children that had ended keep their answers: they are closed over there at once. `fresh` makes one that has said
        nothing, by the client's number.
        """
        if not self.stream.restart():
            return None
        self.submitted_s = now_s
        num_lost = 0
        for child, choice in enumerate(self.choices):
            if choice.is_complete:
                self.stream.close(child, CloseReason.CLIENT_GONE)
                continue
            num_lost += choice.num_tokens
            self.choices[child] = fresh(choice.index)
            self.times[child] = Times()
        if not any(choice.is_complete for choice in self.choices):
            self.report = None  # else it stands until the other engine's comes
        return num_lost

    def give_up_waiting(self) -> list[int]:
        """End the children that only wait for the engine to confirm their end; returns which, by their place here."""
        waiting = [child for child, choice in enumerate(self.choices) if choice.is_closing]
        for child in waiting:
            self.choices[child].give_up_waiting()
        return waiting
