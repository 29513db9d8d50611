"""Spans as data: what the frontend knows of a traced request, before anybody spells it for a collector.

Owns the record types that travel from the token path to the exporter, and the promise of the queue between them. Never
encodes and never sends. Made by `frontend.request_trace` and `frontend.stream_trace`; consumed by `frontend.span_encoding`.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import msgspec

from protocol.messages import PhaseTimes, Round

AttributeValue = str | int | float | bool | tuple[str, ...]
Attributes = tuple[tuple[str, AttributeValue], ...]


class TraceLevel(IntEnum):
    """How much of a request is traced; each level includes those below. 0 is untraced."""

    OFF = 0
    STAGES = 1
    ROUNDS = 2
    STEPS = 3


class SpanKind(IntEnum):
    """OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2


@dataclass(frozen=True, eq=False)
class Resource:
    """Who a span is about: this frontend, or one life of one engine. Compared by identity; few exist."""

    attributes: Attributes


class SpanEvent(msgspec.Struct, frozen=True, gc=False):
    name: str
    at_ns: int  # unix time
    attributes: Attributes = ()


class Trace(msgspec.Struct, frozen=True, gc=False):
    """What all spans of one request share."""

    trace_id: bytes  # 16
    state: str  # tracestate as it goes on; "" for none


class SpanRecord(msgspec.Struct, frozen=True, gc=False):
    """One finished span. Times are unix nanoseconds, end_ns >= start_ns."""

    resource: Resource
    trace: Trace
    span_id: bytes  # 8
    parent_id: bytes | None  # 8; None for a root
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Attributes = ()
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None  # status ERROR with this description; None leaves the status unset
    has_remote_parent: bool = False


class RoundParent(msgspec.Struct, frozen=True, gc=False):
    """What the spans of all rounds of one child share: the decode_forward span they lie under."""

    resource: Resource  # the engine's
    trace: Trace
    span_id: bytes  # of decode_forward
    offset_ns: int  # unix time minus the engine's monotonic clock
    sources: tuple[str, ...]  # names of draft sources, by Round.source
    level: TraceLevel
    speculates: bool  # without a speculator a round has neither spec_draft nor spec_verify

    @property
    def spans_per_round(self) -> tuple[int, int]:
        """Spans of a (plain, drafting) round."""
        steps = 1 if self.level >= TraceLevel.STEPS else 0
        return (steps + 1, steps + 2) if self.speculates else (steps, steps)


class RoundRecord(msgspec.Struct, frozen=True, gc=False):
    """One round of one traced child, not yet expanded: spec_draft (d >= 1), spec_verify, and decode_loop at level 3."""

    parent: RoundParent
    ordinal: int  # decode_ct: 0 for the child's first round
    started_ns: int  # of the step, engine's monotonic clock
    phases: PhaseTimes
    round: Round
    num_spans: int  # it becomes: parent.spans_per_round


Record = SpanRecord | RoundRecord


class DropReason(IntEnum):
    """Label values of drafthouse:spans_dropped_total, by name in lower case."""

    QUEUE_FULL = 0
    EXPORT_FAILED = 1  # the collector refused the batch, or retries ran out of time
    REJECTED = 2  # partial success: the collector took the batch and said how many spans it did not
    SHUTDOWN = 3  # the flush at the end ran out of time


class SpanSink(Protocol):
    """Where finished spans go. Called on the event loop's thread; never blocks, never raises."""

    def put(self, record: Record) -> None:
        """Queue it, or drop and count it when the queue is full."""


def end_of_step(phases: PhaseTimes) -> int:
    """When the last phase that ran was over, in ns since the step began."""
    return max(end for _, end in phases.spans)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The decision to trace: where the request's spans belong."""

    trace: Trace
    parent_id: bytes | None  # the caller's span
    level: TraceLevel


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all requests of a frontend share."""

    sink: SpanSink
    resource: Resource
    engine_resource: Callable[[str, int], Resource]  # by engine id and epoch
    wall_ns: Callable[[], int] = time.time_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns


def new_span_id() -> bytes:
    """64 random bits, never zero."""
    while True:
        made = os.urandom(8)
        if any(made):
            return made
