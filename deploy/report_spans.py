"""Requests as their spans tell them: OTLP JSON in, one tree per request out.

Owns the reading of OTLP JSON (one ExportTraceServiceRequest per line, as an OpenTelemetry collector's file exporter writes
it) and the search for drafthouse's requests in it. Never draws, never counts, never imports OpenTelemetry. Used by
the other report modules.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SERVER_KIND = 2  # OTLP's number
# Stages that lie directly under a request's own span (spec/telemetry.md section 4); whoever has one is a request.
TOP_STAGES = frozenset(
    {"tokenize", "api_server_dispatch", "request_process", "prefill_waiting", "prefill_forward", "decode_forward"}
)

_Number = int | Annotated[str, Meta(pattern=r"^-?[0-9]{1,20}$")]  # proto3 JSON writes 64-bit integers as strings
_TraceId = Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")]
_SpanId = Annotated[str, Meta(pattern="^[0-9a-fA-F]{16}$")]
_OptionalSpanId = Annotated[str, Meta(pattern="^([0-9a-fA-F]{16})?$")]


class MalformedTrace(ValueError):
    """What was read is not OTLP. The message is one sentence."""


@dataclass(frozen=True)
class Span:
    """One span. Ids in lower-case hex, `parent_id` empty for a root; times in unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, object] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()  # (name, unix nanoseconds)
    service: str = ""
    error: str | None = None  # description of a status ERROR, possibly empty

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def number(self, attribute: str) -> int:
        """An integer attribute; 0 when it is absent or something else."""
        value = self.attributes.get(attribute)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0


@dataclass(frozen=True)
class Request:
    """One request: its own span and everything below it, by start time."""

    root: Span
    spans: tuple[Span, ...]
    has_own_span: bool = True  # else `root` was made up from the stages

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_id == parent.span_id and span is not parent]


def read_lines(lines: Iterable[bytes], source: str) -> list[Span]:
    """The spans of OTLP JSON lines, each once however often it was sent. Raises `MalformedTrace` naming the line."""
    found: dict[tuple[str, str], Span] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            spans = _spans_of(msgspec.json.decode(line, type=_Export))
        except (msgspec.DecodeError, UnicodeDecodeError, MalformedTrace) as error:
            reason = str(error).replace("`", "")
            raise MalformedTrace(f"{source}, line {number}, is not an OTLP trace export: {reason}") from error
        found |= {(span.trace_id, span.span_id): span for span in spans}
    return list(found.values())


def find_requests(spans: Iterable[Span]) -> list[Request]:
    """Every request that has at least one stage of drafthouse, slowest first.

    A trace may hold several, and spans of other services; a request whose own span is missing gets one made of its stages.
    """
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    below: dict[tuple[str, str], list[Span]] = {}
    for span in by_id.values():
        below.setdefault((span.trace_id, span.parent_id), []).append(span)
    roots = {(span.trace_id, span.parent_id) for span in by_id.values() if span.name in TOP_STAGES and span.parent_id}
    requests = [_request(by_id.get(key), key, below) for key in sorted(roots)]
    return sorted(requests, key=lambda request: request.root.duration_ns, reverse=True)


def _request(own: Span | None, key: tuple[str, str], below: Mapping[tuple[str, str], list[Span]]) -> Request:
    root = own or _stand_in(key, below[key])
    seen = {root.span_id: root}
    left = [root]
    while left:
        for child in below.get((root.trace_id, left.pop().span_id), ()):
            if child.span_id not in seen:  # a file may claim a cycle
                seen[child.span_id] = child
                left.append(child)
    spans = tuple(sorted(seen.values(), key=lambda span: (span.start_ns, -span.end_ns)))
    return Request(root, spans, has_own_span=own is not None)


def _stand_in(key: tuple[str, str], stages: list[Span]) -> Span:
    trace_id, span_id = key
    start_ns = min(span.start_ns for span in stages)
    end_ns = max(span.end_ns for span in stages)
    return Span(trace_id, span_id, "", "request (its own span is missing)", SERVER_KIND, start_ns, end_ns)


# ---- OTLP JSON ----


class _Otlp(msgspec.Struct, rename="camel", frozen=True):
    pass


class _Value(_Otlp, frozen=True):
    string_value: str | None = None
    int_value: _Number | None = None
    double_value: float | str | None = None  # proto3 JSON writes NaN and infinities as strings
    bool_value: bool | None = None
    array_value: "_Values | None" = None

    def plain(self) -> object:
        if self.int_value is not None:
            return int(self.int_value)
        if self.array_value is not None:
            return tuple(value.plain() for value in self.array_value.values)
        given = (self.string_value, self.double_value, self.bool_value)
        return next((value for value in given if value is not None), None)


class _Values(_Otlp, frozen=True):
    values: tuple[_Value, ...] = ()


class _KeyValue(_Otlp, frozen=True):
    key: str
    value: _Value = _Value()


class _Event(_Otlp, frozen=True):
    time_unix_nano: _Number = 0
    name: str = ""


class _Status(_Otlp, frozen=True):
    code: int = 0
    message: str = ""


class _Span(_Otlp, frozen=True):
    trace_id: _TraceId
    span_id: _SpanId
    start_time_unix_nano: _Number
    end_time_unix_nano: _Number
    name: str = ""
    parent_span_id: _OptionalSpanId = ""
    kind: int = 0
    attributes: tuple[_KeyValue, ...] = ()
    events: tuple[_Event, ...] = ()
    status: _Status = _Status()


class _ScopeSpans(_Otlp, frozen=True):
    spans: tuple[_Span, ...] = ()


class _Resource(_Otlp, frozen=True):
    attributes: tuple[_KeyValue, ...] = ()


class _ResourceSpans(_Otlp, frozen=True):
    resource: _Resource = _Resource()
    scope_spans: tuple[_ScopeSpans, ...] = ()


class _Export(_Otlp, frozen=True):
    """One line. A collector may write metrics and logs into the same file; those lines have no spans."""

    resource_spans: tuple[_ResourceSpans, ...] | None = None
    resource_metrics: list[Any] | None = None
    resource_logs: list[Any] | None = None


_STATUS_ERROR = 2


def _spans_of(export: _Export) -> list[Span]:
    if export.resource_spans is None:
        if export.resource_metrics is None and export.resource_logs is None:
            raise MalformedTrace("it has no resourceSpans")
        return []
    return [
        _span(span, str(_attributes(entry.resource.attributes).get("service.name", "")))
        for entry in export.resource_spans
        for scope in entry.scope_spans
        for span in scope.spans
    ]


def _span(span: _Span, service: str) -> Span:
    start_ns, end_ns = int(span.start_time_unix_nano), int(span.end_time_unix_nano)
    if not 0 <= start_ns <= end_ns:
        raise MalformedTrace(f"span {span.span_id} ends before it starts")
    return Span(
        trace_id=span.trace_id.lower(),
        span_id=span.span_id.lower(),
        parent_id=span.parent_span_id.lower(),
        name=span.name,
        kind=span.kind,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_attributes(span.attributes),
        events=tuple((event.name, int(event.time_unix_nano)) for event in span.events),
        service=service,
        error=span.status.message if span.status.code == _STATUS_ERROR else None,
    )


def _attributes(pairs: Iterable[_KeyValue]) -> dict[str, object]:
    return {pair.key: pair.value.plain() for pair in pairs}
