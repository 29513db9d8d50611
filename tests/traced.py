"""Spans of a run, read back from the very bytes a collector would get, and the claims that hold for any of them.

Owns the reading and the shape of a request's trace; never runs an engine or a server. Used by the span contract, and by
tests over HTTP.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.spans import Record, RoundRecord

ENGINE, FRONTEND = "drafthouse-engine", "drafthouse-frontend"
ENGINE_STAGES = {"request_process", "prefill_waiting", "prefill_forward", "chunked_prefill", "decode_forward", "decode_loop", "spec_draft", "spec_verify"}  # fmt: skip
# name -> (level, name of the parent; "" is the server span)
TABLE = {
    "tokenize": (1, ""),
    "api_server_dispatch": (2, ""),
    "request_process": (2, ""),
    "prefill_waiting": (1, ""),
    "prefill_forward": (1, ""),
    "chunked_prefill": (3, "prefill_forward"),
    "decode_forward": (1, ""),
    "decode_loop": (3, "decode_forward"),
    "spec_draft": (2, "decode_forward"),
    "spec_verify": (2, "decode_forward"),
}


@dataclass(frozen=True)
class Span:
    """One span as a collector sees it."""

    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    events: tuple[str, ...]
    is_error: bool
    message: str
    state: str


class ListSink:
    """A queue without an end."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        self.records.append(record)

    @property
    def num_spans(self) -> int:
        return sum(record.num_spans if isinstance(record, RoundRecord) else 1 for record in self.records)

    def spans(self) -> list[Span]:
        return read(SpanEncoder("0", SpanLimits()).encode(self.records)) if self.records else []


def read(body: bytes) -> list[Span]:
    """The spans of one export request."""
    request = ExportTraceServiceRequest.FromString(body)
    found: list[Span] = []
    for group in request.resource_spans:
        about = {one.key: plain(one.value) for one in group.resource.attributes}
        found.extend(_span(about, span) for scope in group.scope_spans for span in scope.spans)
    return found


def _span(about: dict[str, object], span: ProtoSpan) -> Span:
    return Span(
        service=str(about.get("service.name")),
        instance=str(about.get("service.instance.id")),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={one.key: plain(one.value) for one in span.attributes},
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
        state=span.trace_state,
    )


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def named(spans: Iterable[Span], name: str) -> list[Span]:
    """Spans of one name, in time order."""
    return sorted((span for span in spans if span.name == name), key=lambda span: (span.start_ns, span.end_ns))


def total(spans: Iterable[Span], name: str, attribute: str) -> int:
    return sum(int(str(span.attributes[attribute])) for span in named(spans, name))


def by_trace(spans: Iterable[Span]) -> dict[str, list[Span]]:
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    return traces


def check_trace(spans: Sequence[Span], server_id: str, level: int) -> None:
    """What holds for the spans of any one request, its SERVER span left out. Raises AssertionError."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span id is used twice"
    assert len({span.trace_id for span in spans}) <= 1
    for span in spans:
        least, parent = TABLE[span.name]
        assert least <= level, f"{span.name} is of level {least}, not of {level}"
        assert span.end_ns >= span.start_ns > 0, span
        assert span.service == (ENGINE if span.name in ENGINE_STAGES else FRONTEND), span
        if parent:
            above = by_id[span.parent_id]
            assert above.name == parent, f"{span.name} lies under {above.name}"
            assert above.start_ns <= span.start_ns and span.end_ns <= above.end_ns, (above, span)
        else:
            assert span.parent_id == server_id, span
    check_rounds(spans, level)


def check_rounds(spans: Sequence[Span], level: int) -> None:
    """Every decode span's own totals are those of the rounds below it."""
    below: dict[str, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent_id, []).append(span)
    for decode in named(spans, "decode_forward"):
        rounds = below.get(decode.span_id, [])
        counts = Counter(span.name for span in rounds)
        said = decode.attributes
        assert said["clock"] in ("host", "device")
        assert all(set(span.attributes) == {"num_correct_drafts"} for span in named(rounds, "spec_verify"))
        assert all(set(span.attributes) == {"num_draft_tokens", "source"} for span in named(rounds, "spec_draft"))
        if level >= 2 and counts["spec_verify"]:
            assert counts["spec_verify"] == said["num_rounds"]
            assert counts["spec_draft"] == said["num_drafts"]
            assert total(rounds, "spec_draft", "num_draft_tokens") == said["num_draft_tokens"]
            assert total(rounds, "spec_verify", "num_correct_drafts") == said["num_correct_drafts"]
        if level >= 3:
            loops = named(rounds, "decode_loop")
            assert [span.attributes["decode_ct"] for span in loops] == list(range(int(str(said["num_rounds"]))))
