"""What is observed of a request and of exports, as data: the words between those who measure and those who count.

Never counts anything. Used by `frontend.metrics` and by what calls it or is read by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

TraceIds = tuple[str, str]  # (trace id, span id) in hex, of the request an observation belongs to


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One child of a request at its end, however it ended. Times in seconds, None where it never got that far."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    e2e_s: float
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
    operation: str = "chat"  # gen_ai.operation.name: chat or text_completion
    engine: str | None = None  # id of the engine that ran it; None: the only one

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time per token after the first; None where there was no second token."""
        if self.decode_s is None or self.generation_tokens < 2:
            return None
        return self.decode_s / (self.generation_tokens - 1)


class SpanStats(Protocol):
    """What the span export counts; read whenever somebody scrapes. Counts only rise."""

    @property
    def exported(self) -> int: ...

    @property
    def dropped(self) -> Mapping[str, int]: ...  # by label value of `reason`

    @property
    def failures(self) -> Mapping[str, int]: ...

    @property
    def size(self) -> int: ...  # spans waiting

    @property
    def capacity(self) -> int: ...


class OtlpObserver(Protocol):
    """The same observations as OTLP metrics (`frontend.otlp_metrics`). Never blocks, never raises."""

    @property
    def failures(self) -> int: ...  # exports that did not get through

    def request_finished(
        self, operation: str, seconds: float, error_type: str | None, trace: TraceIds | None
    ) -> None: ...

    def first_token(self, operation: str, seconds: float, trace: TraceIds | None) -> None: ...

    def time_per_output_token(self, operation: str, seconds: float, trace: TraceIds | None) -> None: ...
