"""Hand-written OTLP bytes, held to opentelemetry-proto's decoder and to the encoder of the OpenTelemetry SDK."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace import SpanKind as SdkKind

from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.spans import (
    Attributes,
    Resource,
    RoundParent,
    RoundRecord,
    SpanEvent,
    SpanKind,
    SpanRecord,
    Trace,
    TraceLevel,
)
from protocol.messages import PhaseTimes, Round

FRONTEND = Resource((("service.name", "drafthouse-frontend"), ("process.pid", 7)))
ENGINE = Resource((("service.name", "drafthouse-engine"), ("service.instance.id", "0/12")))
TRACE = Trace(bytes(range(16)), "")
SOURCES = ("model", "ngram")
PHASES = PhaseTimes(((1, 5), (10, 20), (30, 70), (70, 90)), on_device=False)
START_NS = 1_700_000_000_000_000_000


def decoded(*records: SpanRecord | RoundRecord, limits: SpanLimits | None = None) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest.FromString(SpanEncoder("1.2", limits or SpanLimits()).encode(records))
    known = ExportTraceServiceRequest()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    assert known.ByteSize() == request.ByteSize(), "a field that OTLP does not have"
    return request


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


def values(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def stage(**changes: object) -> SpanRecord:
    fields: dict[str, object] = {
        "resource": FRONTEND,
        "trace": TRACE,
        "span_id": b"spanspan",
        "parent_id": b"parentid",
        "name": "tokenize",
        "kind": SpanKind.INTERNAL,
        "start_ns": START_NS,
        "end_ns": START_NS + 5,
    }
    return SpanRecord(**(fields | changes))  # type: ignore[arg-type]


def parent(level: int = TraceLevel.ROUNDS, *, speculates: bool = True, trace: Trace = TRACE) -> RoundParent:
    return RoundParent(ENGINE, trace, b"decodefw", START_NS, SOURCES, TraceLevel(level), speculates)


def one_round(
    under: RoundParent, drafted: int = 4, accepted: int = 2, source: int = 1, **changes: object
) -> RoundRecord:
    verdict = Round(drafted, drafted, accepted, 1, 0, source, False)
    fields: dict[str, object] = {"parent": under, "ordinal": 3, "started_ns": 1000, "phases": PHASES, "round": verdict}
    fields["num_spans"] = under.spans_per_round[verdict.drafted > 0]
    return RoundRecord(**(fields | changes))  # type: ignore[arg-type]


# ---- rounds ----


def test_a_round_is_a_draft_and_a_verify_under_decode_forward():
    draft, verify = spans_of(decoded(one_round(parent())))
    assert (draft.name, verify.name) == ("spec_draft", "spec_verify")
    assert values(draft) == {"num_draft_tokens": 4, "source": "ngram"}
    assert values(verify) == {"num_correct_drafts": 2}
    base = START_NS + 1000
    assert (draft.start_time_unix_nano, draft.end_time_unix_nano) == (base + 10, base + 20)
    assert (verify.start_time_unix_nano, verify.end_time_unix_nano) == (base + 30, base + 90)
    for span in (draft, verify):
        assert span.trace_id == TRACE.trace_id and span.parent_span_id == b"decodefw"
        assert span.kind == Span.SPAN_KIND_INTERNAL and span.flags == 0x101 and not span.trace_state
        assert len(span.span_id) == 8 and any(span.span_id)
    assert draft.span_id != verify.span_id


def test_a_round_without_a_draft_has_no_spec_draft():
    (verify,) = spans_of(decoded(one_round(parent(), drafted=0, accepted=0)))
    assert verify.name == "spec_verify" and values(verify) == {"num_correct_drafts": 0}


def test_a_draft_without_a_phase_of_its_own_takes_no_time_before_its_verify():
    phases = PhaseTimes(((0, 0), (0, 0), (30, 70), (70, 90)), on_device=False)
    draft, verify = spans_of(decoded(one_round(parent(), phases=phases)))
    assert draft.start_time_unix_nano == draft.end_time_unix_nano == verify.start_time_unix_nano == START_NS + 1030


def test_a_verify_without_an_accept_phase_ends_with_its_forward():
    phases = PhaseTimes(((0, 0), (10, 20), (30, 70), (0, 0)), on_device=True)
    _, verify = spans_of(decoded(one_round(parent(), phases=phases)))
    assert verify.end_time_unix_nano == START_NS + 1070


def test_level_three_adds_the_whole_step():
    _, _, loop = spans_of(decoded(one_round(parent(TraceLevel.STEPS))))
    assert loop.name == "decode_loop" and values(loop) == {"decode_ct": 3}
    assert (loop.start_time_unix_nano, loop.end_time_unix_nano) == (START_NS + 1000, START_NS + 1090)


@pytest.mark.parametrize("level", [TraceLevel.ROUNDS, TraceLevel.STEPS])
def test_without_a_speculator_a_round_leaves_neither_draft_nor_verify(level: TraceLevel):
    record = one_round(parent(level, speculates=False), drafted=0, accepted=0)
    names = [span.name for span in spans_of(decoded(record))]
    assert names == (["decode_loop"] if level is TraceLevel.STEPS else [])
    assert len(names) == record.num_spans


@given(
    level=st.sampled_from([TraceLevel.ROUNDS, TraceLevel.STEPS]),
    speculates=st.booleans(),
    rounds=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 1)), max_size=8),
    state=st.sampled_from(["", "vendor=value", "k=" + "v" * 400]),
)
def test_every_round_expands_to_as_many_spans_as_it_is_counted_for(level, speculates, rounds, state):
    under = parent(level, speculates=speculates, trace=Trace(b"t" * 16, state))
    records = [one_round(under, drafted, accepted, source) for drafted, accepted, source in rounds]
    spans = spans_of(decoded(*records))
    assert len(spans) == sum(record.num_spans for record in records)
    assert all(span.trace_state == state and span.trace_id == b"t" * 16 for span in spans)
    verifies = [values(span)["num_correct_drafts"] for span in spans if span.name == "spec_verify"]
    assert verifies == ([accepted for _, accepted, _ in rounds] if speculates else [])
    drafts = [tuple(values(span).values()) for span in spans if span.name == "spec_draft"]
    expected = [(drafted, SOURCES[source]) for drafted, _, source in rounds if drafted and speculates]
    assert drafts == expected
    assert len({span.span_id for span in spans}) == len(spans)


def test_parents_seen_in_earlier_batches_are_not_mistaken_for_each_other():
    encoder = SpanEncoder("1", SpanLimits())
    for number in range(5000):  # more than are remembered; freed parents would reuse identities
        under = RoundParent(ENGINE, TRACE, struct.pack(">Q", number + 1), 0, SOURCES, TraceLevel.ROUNDS, True)
        body = encoder.encode([one_round(under)])
        spans = spans_of(ExportTraceServiceRequest.FromString(body))
        assert {span.parent_span_id for span in spans} == {under.span_id}


def test_a_source_the_engine_never_named_is_an_error_not_a_wrong_name():
    with pytest.raises(IndexError):
        SpanEncoder("1", SpanLimits()).encode([one_round(parent(), source=2)])


# ---- stages ----

ATTRIBUTES = st.lists(
    st.tuples(
        st.text(min_size=1),
        st.one_of(
            st.text(),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.lists(st.text()).map(tuple),
        ),
    ),
    max_size=6,
    unique_by=lambda each: each[0],
).map(tuple)


@given(
    attributes=ATTRIBUTES,
    event_attributes=ATTRIBUTES,
    name=st.text(),
    parent_id=st.one_of(st.none(), st.binary(min_size=8, max_size=8).filter(any)),
    kind=st.sampled_from(SpanKind),
    error=st.one_of(st.none(), st.text()),
    remote=st.booleans(),
)
def test_a_span_reads_as_the_sdk_would_have_written_it(
    attributes, event_attributes, name, parent_id, kind, error, remote
):
    remote = remote and parent_id is not None
    record = stage(
        name=name,
        kind=kind,
        parent_id=parent_id,
        attributes=attributes,
        events=(SpanEvent("retract", START_NS + 2, event_attributes),),
        error=error,
        trace=Trace(b"\x01" * 16, "a=1,b=2"),
        has_remote_parent=remote,
    )
    ours = decoded(record)
    sdk = encode_spans([as_sdk_span(record)])
    expected = spans_of(sdk)[0]
    expected.flags |= 0x1  # the SDK leaves out W3C's sampled flag, which OTLP asks for in bits 0-7
    if error is None:
        expected.ClearField("status")  # an empty status message says the same as none
    assert spans_of(ours)[0] == expected
    assert ours.resource_spans[0].resource == sdk.resource_spans[0].resource
    assert ours.resource_spans[0].scope_spans[0].scope == sdk.resource_spans[0].scope_spans[0].scope


def as_sdk_span(record: SpanRecord) -> ReadableSpan:
    def context(span_id: bytes, *, is_remote: bool) -> SpanContext:
        state = TraceState([tuple(entry.split("=", 1)) for entry in record.trace.state.split(",")])
        trace_id = int.from_bytes(record.trace.trace_id, "big")
        return SpanContext(trace_id, int.from_bytes(span_id, "big"), is_remote, TraceFlags(1), state)

    parent_id = record.parent_id
    return ReadableSpan(
        name=record.name,
        context=context(record.span_id, is_remote=False),
        parent=None if parent_id is None else context(parent_id, is_remote=record.has_remote_parent),
        resource=SdkResource(dict(record.resource.attributes)),
        attributes=dict(record.attributes),
        events=[SdkEvent(each.name, dict(each.attributes), each.at_ns) for each in record.events],
        kind={SpanKind.INTERNAL: SdkKind.INTERNAL, SpanKind.SERVER: SdkKind.SERVER}[record.kind],
        status=Status(StatusCode.UNSET) if record.error is None else Status(StatusCode.ERROR, record.error),
        start_time=record.start_ns,
        end_time=record.end_ns,
        instrumentation_scope=InstrumentationScope("drafthouse", "1.2"),
    )


def test_integers_beyond_64_bits_become_their_decimal_text():
    (span,) = spans_of(decoded(stage(attributes=(("seed", 2**63), ("low", -(2**63) - 1)))))
    assert values(span) == {"seed": str(2**63), "low": str(-(2**63) - 1)}


def test_text_that_is_no_unicode_does_not_spoil_the_request():
    (span,) = spans_of(decoded(stage(attributes=(("url.path", "/\udcff"),))))
    assert values(span) == {"url.path": "/?"}


def test_a_number_that_is_not_finite_stays_what_it_is():
    (span,) = spans_of(decoded(stage(attributes=(("x", float("nan")), ("y", float("-inf"))))))
    assert str(values(span)) == "{'x': nan, 'y': -inf}"


@pytest.mark.parametrize(
    "broken", [{"span_id": b"short"}, {"parent_id": b""}, {"trace": Trace(b"", "")}, {"attributes": (("x", None),)}]
)
def test_what_would_be_an_invalid_span_is_refused(broken: dict[str, object]):
    with pytest.raises((ValueError, TypeError)):
        SpanEncoder("1", SpanLimits()).encode([stage(**broken)])


# ---- requests ----


def test_spans_are_grouped_by_resource_under_one_scope():
    request = decoded(stage(), one_round(parent()), stage(name="second"), stage(resource=ENGINE))
    names = [[span.name for scope in group.scope_spans for span in scope.spans] for group in request.resource_spans]
    assert names == [["tokenize", "second"], ["spec_draft", "spec_verify", "tokenize"]]
    for group in request.resource_spans:
        assert [(scope.scope.name, scope.scope.version) for scope in group.scope_spans] == [("drafthouse", "1.2")]


def test_requests_joined_end_to_end_are_one_request():
    encoder = SpanEncoder("1", SpanLimits())
    joined = encoder.encode([stage()]) + encoder.encode([one_round(parent())])
    names = [span.name for span in spans_of(ExportTraceServiceRequest.FromString(joined))]
    assert names == ["tokenize", "spec_draft", "spec_verify"]


def test_no_records_are_an_empty_request():
    assert SpanEncoder("1", SpanLimits()).encode([]) == b""


def test_what_is_over_the_limits_is_left_out_and_counted():
    many: Attributes = (("a", "long text"), ("b", ("long", "text")), ("c", 3))
    events = (SpanEvent("one", START_NS, many), SpanEvent("two", START_NS))
    limits = SpanLimits(attributes=2, event_attributes=1, events=1, value_length=4)
    (span,) = spans_of(decoded(stage(attributes=many, events=events), limits=limits))
    assert [each.key for each in span.attributes] == ["a", "b"] and span.dropped_attributes_count == 1
    assert span.attributes[0].value.string_value == "long"
    assert [each.string_value for each in span.attributes[1].value.array_value.values] == ["long", "text"]
    assert [event.name for event in span.events] == ["one"] and span.dropped_events_count == 1
    assert len(span.events[0].attributes) == 1 and span.events[0].dropped_attributes_count == 2


def test_the_limits_hold_for_rounds_too():
    draft, verify = spans_of(decoded(one_round(parent()), limits=SpanLimits(attributes=1)))
    assert values(draft) == {"num_draft_tokens": 4} and draft.dropped_attributes_count == 1
    assert values(verify) == {"num_correct_drafts": 2} and verify.dropped_attributes_count == 0
