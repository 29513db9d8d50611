"""Who is traced: W3C headers, samplers against the SDK's own, and the rate limit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import TraceState

from frontend.trace_context import (
    Caller,
    RateLimit,
    Sampler,
    follows_callers,
    new_trace_id,
    read_caller,
    sampler_from,
    tracestate,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


def headers(*traceparents: str, state: tuple[str, ...] = ()) -> CIMultiDict[str]:
    return CIMultiDict([("Traceparent", one) for one in traceparents] + [("tracestate", one) for one in state])


def test_a_good_traceparent_names_the_callers_span():
    caller, is_malformed = read_caller(headers(GOOD, state=("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",)))
    assert not is_malformed
    assert caller == Caller(
        bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID), True, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    )


def test_no_traceparent_is_no_caller_and_no_fault():
    assert read_caller(headers(state=("a=b",))) == (None, False)


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_only_the_lowest_flag_means_sampled(flags, is_sampled):
    caller, _ = read_caller(headers(GOOD[:-2] + flags))
    assert caller is not None and caller.is_sampled is is_sampled


@pytest.mark.parametrize("given", [f"01{GOOD[2:]}", f"01{GOOD[2:]}-what-a-future-version-adds", f"fe{GOOD[2:]}-"])
def test_a_future_version_is_read_by_the_fields_that_are_known(given):
    caller, is_malformed = read_caller(headers(given))
    assert not is_malformed and caller is not None and caller.trace_id.hex() == TRACE_ID


MALFORMED = [
    "", "x", GOOD.upper(), GOOD[:-1], GOOD + "0", GOOD + "-", GOOD + "-more", "ff" + GOOD[2:], f"00-{'0' * 32}-{SPAN_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01", GOOD.replace("-", "_"), GOOD + "\u0661", "a" * 10_000, f"00-{TRACE_ID}-{SPAN_ID}-0g", "00" + GOOD,
]  # fmt: skip


@pytest.mark.parametrize("given", MALFORMED)
def test_a_malformed_traceparent_is_ignored_and_said_to_be_malformed(given):
    assert read_caller(headers(given)) == (None, True)


def test_two_traceparents_are_malformed():
    assert read_caller(headers(GOOD, GOOD)) == (None, True)


@given(st.text(alphabet="0123456789abcdefABCDEFg- ", max_size=60))
def test_whatever_the_sdk_takes_as_version_00_is_taken_the_same(given):
    caller, _ = read_caller(headers(given))
    context = TraceContextTextMapPropagator().extract({"traceparent": given})
    taken_there = bool(context)
    if given.strip(" \t").startswith("00"):
        assert (caller is not None) == taken_there


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (("a=1,b=2",), "a=1,b=2"),
        (("a=1", "b=2"), "a=1,b=2"),
        ((" a=1 , ,b=2 ",), "a=1,b=2"),
        (("t@vendor=x", ), "t@vendor=x"),
        (("a=1,a=2",), ""),
        (("A=1",), ""),
        (("a",), ""),
        (("a=\u00e4",), ""),
        (("a=1=2",), ""),
        ((",".join(f"k{n}=v" for n in range(33)),), ""),
        ((f"a={'x' * 600}",), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_a_tracestate_is_passed_on_whole_or_not_at_all(given, kept):
    assert tracestate(given) == kept


@given(
    st.lists(
        st.from_regex(r"[a-z][a-z0-9]{0,5}=[a-z0-9]{1,5}", fullmatch=True),
        max_size=5,
        unique_by=lambda m: m.split("=")[0],
    )
)
def test_a_plain_tracestate_means_the_same_to_the_sdk(members):
    kept = tracestate((",".join(members),))
    assert dict(TraceState.from_header([kept]) if kept else {}) == dict(member.split("=") for member in members)


@pytest.mark.parametrize("ratio", [0.0, 1e-3, 0.1, 0.5, 0.999, 1.0])
def test_a_ratio_takes_the_traces_that_the_sdk_takes(ratio):
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    ours, theirs = Sampler(ratio, follows_caller=False), TraceIdRatioBased(ratio)
    for _ in range(2_000):
        trace_id = draw.randbytes(16)
        expected = theirs.should_sample(None, int.from_bytes(trace_id), "x").decision.is_sampled()
        assert ours.takes(trace_id, None) is expected, f"seed {seed}"


def test_the_lowest_and_the_highest_trace_id_are_taken_as_the_sdk_takes_them():
    for ratio in (0.0, 0.5, 1.0):
        for low in (b"\0" * 8, b"\xff" * 8):
            expected = TraceIdRatioBased(ratio).should_sample(None, int.from_bytes(low), "x").decision.is_sampled()
            assert Sampler(ratio, follows_caller=False).takes(b"\1" * 8 + low, None) is expected


CALLER = Caller(b"\1" * 16, b"\2" * 8, True, "")


@pytest.mark.parametrize(
    ("name", "argument", "alone", "sampled_caller", "unsampled_caller"),
    [
        ("", "", True, True, False),
        ("always_on", "", True, True, True),
        ("always_off", "", False, False, False),
        ("parentbased_always_on", "", True, True, False),
        ("parentbased_always_off", "", False, True, False),
        ("parentbased_traceidratio", "0", False, True, False),
        ("traceidratio", "0", False, False, False),
        ("traceidratio", "", True, True, True),
        ("Always_Off", "", False, False, False),
    ],
)
def test_each_sampler_decides_as_the_specification_says(name, argument, alone, sampled_caller, unsampled_caller):
    sampler = sampler_from({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert sampler.takes(new_trace_id(), None) is alone
    assert sampler.takes(CALLER.trace_id, CALLER) is sampled_caller
    assert sampler.takes(CALLER.trace_id, CALLER._replace(is_sampled=False)) is unsampled_caller


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER 'jaeger_remote'"),
        ({"OTEL_TRACES_SAMPLER": "parentbased_"}, "OTEL_TRACES_SAMPLER"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"}, "got 'half'"),
    ],
)
def test_a_sampler_that_is_not_offered_is_refused_by_name(environment, named):
    with pytest.raises(ValueError, match=named):
        sampler_from(environment)


@pytest.mark.parametrize(
    ("propagators", "follows"),
    [("", True), ("tracecontext,baggage", True), ("Baggage", False), ("none", False), (" tracecontext ", True)],
)
def test_the_propagators_say_whether_a_caller_is_followed(propagators, follows):
    assert follows_callers({"OTEL_PROPAGATORS": propagators}) is follows


def test_a_propagator_that_is_not_offered_is_refused_by_name():
    with pytest.raises(ValueError, match="OTEL_PROPAGATORS 'b3'"):
        follows_callers({"OTEL_PROPAGATORS": "tracecontext,b3"})


def test_the_rate_limit_holds_over_any_second_and_refills():
    now = 0.0
    limit = RateLimit(10.0, lambda: now)
    assert sum(limit.takes() for _ in range(100)) == 10
    now = 0.5
    assert sum(limit.takes() for _ in range(100)) == 5
    now = 100.0
    assert sum(limit.takes() for _ in range(100)) == 10


def test_a_rate_below_one_per_second_lets_one_through_now_and_then():
    now = 0.0
    limit = RateLimit(0.1, lambda: now)
    assert limit.takes() and not limit.takes()
    now = 9.0
    assert not limit.takes()
    now = 10.5
    assert limit.takes()


def test_trace_ids_are_128_random_bits():
    made = {new_trace_id() for _ in range(1_000)}
    assert len(made) == 1_000 and all(len(one) == 16 and any(one[:8]) for one in made)
