"""The spans of one traced request that the frontend itself makes: the SERVER span and the stages of its handler.

Owns when they begin and end; what the engine does for the request is `frontend.stream_trace`. Never encodes or sends:
finished spans go to a `SpanSink`. An untraced request has no object of this module.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.errors import ApiError
from frontend.spans import (
    Attributes,
    AttributeValue,
    Sampled,
    SpanKind,
    SpanRecord,
    Surroundings,
    TraceLevel,
    new_span_id,
)
from frontend.stream_trace import EngineClock, StreamTrace
from protocol.messages import Hello


class RequestTrace:
    """One HTTP request. `end` emits its SERVER span, once; streams may end later, when the engine has answered."""

    __slots__ = (
        "_around",
        "_attributes",
        "_begun_ns",
        "_failure",
        "_has_ended",
        "_offset_ns",
        "_sampled",
        "name",
        "span_id",
    )

    def __init__(self, around: Surroundings, sampled: Sampled, name: str) -> None:
        self.name = name
        self.span_id = new_span_id()
        self._around = around
        self._sampled = sampled
        self._offset_ns = around.wall_ns() - around.monotonic_ns()
        self._begun_ns = around.monotonic_ns()
        self._attributes: dict[str, AttributeValue] = {}
        self._failure: str | None = None
        self._has_ended = False

    @property
    def trace_id(self) -> str:
        """As people read it: 32 hex digits."""
        return self._sampled.trace.trace_id.hex()

    @property
    def exemplar(self) -> tuple[str, str]:
        """(trace id, span id) in hex, for the metrics that this request adds to."""
        return self.trace_id, self.span_id.hex()

    def set(self, name: str, value: AttributeValue | None) -> None:
        """Describe the request; None says nothing."""
        if value is not None:
            self._attributes[name] = value

    def fail(self, reason: str) -> None:
        """The request failed; the first reason stays, as description and as error.type. Never content of a request."""
        if self._failure is None:
            self._failure = reason
            self.set("error.type", reason)

    @contextmanager
    def stage(self, name: str, level: TraceLevel) -> Iterator[None]:
        """A child span around the block, if the request is traced so deeply. A refused request has its SERVER span only."""
        begun_ns = self._around.monotonic_ns()
        error: str | None = None
        is_refused = False
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            is_refused = isinstance(raised, ApiError)
            raise
        finally:
            if self._sampled.level >= level and not is_refused:
                span_id, parent_id = new_span_id(), self.span_id
                self._put(name, SpanKind.INTERNAL, span_id, parent_id, begun_ns, (), error)

    def stream(self, hello: Hello, offset_ns: int) -> StreamTrace:
        """The engine's part of one prompt. `offset_ns`: unix time minus the engine's monotonic clock."""
        around = self._around
        resource = around.engine_resource(hello.engine_id, hello.epoch)
        return StreamTrace(around, self._sampled, self.span_id, EngineClock(resource, offset_ns, hello))

    def end(self) -> None:
        """The answer is out, or given up. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        attributes = tuple(self._attributes.items())
        parent_id = self._sampled.parent_id
        self._put(self.name, SpanKind.SERVER, self.span_id, parent_id, self._begun_ns, attributes, self._failure)

    def _put(
        self,
        name: str,
        kind: SpanKind,
        span_id: bytes,
        parent_id: bytes | None,
        begun_ns: int,
        attributes: Attributes,
        error: str | None,
    ) -> None:
        ended_ns = max(self._around.monotonic_ns(), begun_ns)
        self._around.sink.put(
            SpanRecord(
                resource=self._around.resource,
                trace=self._sampled.trace,
                span_id=span_id,
                parent_id=parent_id,
                name=name,
                kind=kind,
                start_ns=self._offset_ns + begun_ns,
                end_ns=self._offset_ns + ended_ns,
                attributes=attributes,
                error=error,
                has_remote_parent=kind is SpanKind.SERVER and parent_id is not None,
            )
        )
