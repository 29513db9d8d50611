"""OTLP metrics against real receivers: the conventions' histograms, the engine's sums, and collectors that fail."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import msgspec
import pytest
from opentelemetry.proto.metrics.v1 import metrics_pb2

from frontend.config import FrontendConfig
from frontend.deltas import LatestSnapshot, ObservedEngine
from frontend.otlp_metrics import (
    FIRST_TOKEN_BUCKETS,
    PER_TOKEN_BUCKETS,
    REQUEST_DURATION_BUCKETS,
    Engines,
    OtlpMetrics,
)
from frontend.otlp_metrics_settings import metrics_settings
from frontend.telemetry_resources import TelemetryResources
from protocol.messages import StepOutput
from tests.frontend.otlp_metric_receivers import MetricReceiver, grpc_receiver, http_receiver, plain
from tests.timing import at_most_s
from tests.wiring import EPOCH, IDLE, hello, step, totals

FRONTEND, ENGINE = "drafthouse-frontend", "drafthouse-engine"
RESOURCE = (("service.name", FRONTEND), ("service.instance.id", "f1"), ("process.pid", 7))
IDS = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
NEVER_MS, SOON_MS = "3600000", "20"
LOAD = msgspec.structs.replace(IDLE, reporter="me")
CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
DELTA = metrics_pb2.AGGREGATION_TEMPORALITY_DELTA
BOTH = pytest.mark.parametrize("receiving", [http_receiver, grpc_receiver], ids=["http", "grpc"])


def attached(generation_tokens: int = 0) -> LatestSnapshot:
    latest = LatestSnapshot()
    latest.observe(hello(load=LOAD))
    latest.observe(stepped(1, generation_tokens))
    return latest


def stepped(step_id: int, generation_tokens: int) -> StepOutput:
    return msgspec.structs.replace(step(step_id, counters=totals(generation_tokens=generation_tokens)), load=LOAD)


def engines(latest: LatestSnapshot, is_reporter: Callable[[], bool] = lambda: True) -> Engines:
    """The one engine there is."""
    return lambda: (ObservedEngine("0", latest, is_reporter),)


def start(
    receiver: MetricReceiver, environment: dict[str, str], known: Engines, shared: tuple[tuple[str, str], ...] = ()
) -> OtlpMetrics:
    settings = metrics_settings(FrontendConfig(otlp_metrics_endpoint=receiver.url), environment)
    assert settings is not None
    started = OtlpMetrics(settings, TelemetryResources(RESOURCE, shared), known)
    started.start()
    return started


@contextmanager
def exporting(
    receiver: MetricReceiver,
    latest: LatestSnapshot | None = None,
    is_reporter: Callable[[], bool] = lambda: False,
    **variables: str,
) -> Iterator[OtlpMetrics]:
    """OTLP metrics to `receiver`, by default once, when the block ends."""
    environment = {"OTEL_METRIC_EXPORT_INTERVAL": NEVER_MS, **variables}
    started = start(receiver, environment, engines(latest or attached(), is_reporter))
    try:
        yield started
    finally:
        started.close(5.0)


@BOTH
def test_the_conventions_histograms_arrive_with_their_buckets_and_attributes(receiving):
    with receiving() as receiver:
        with exporting(receiver) as metrics:
            metrics.first_token("chat", 0.03, None)
            metrics.time_per_output_token("chat", 0.02, None)
            metrics.request_finished("text_completion", 0.5, None, None)
            metrics.request_finished("text_completion", 0.7, "503", None)
        [resource] = receiver.resources(FRONTEND)
        [found] = receiver.metrics(FRONTEND)
    assert plain(resource.resource.attributes) == dict(RESOURCE)
    assert {name: tuple(metric.histogram.data_points[0].explicit_bounds) for name, metric in found.items()} == {
        "gen_ai.server.request.duration": REQUEST_DURATION_BUCKETS,
        "gen_ai.server.time_to_first_token": FIRST_TOKEN_BUCKETS,
        "gen_ai.server.time_per_output_token": PER_TOKEN_BUCKETS,
    }
    assert {metric.unit for metric in found.values()} == {"s"}
    assert {metric.histogram.aggregation_temporality for metric in found.values()} == {CUMULATIVE}
    [first] = found["gen_ai.server.time_to_first_token"].histogram.data_points
    common = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "drafthouse",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "server.address": "127.0.0.1",
        "server.port": 8000,
    }
    assert plain(first.attributes) == common and (first.count, first.sum) == (1, 0.03)
    assert first.bucket_counts[FIRST_TOKEN_BUCKETS.index(0.04)] == 1
    well, failed = found["gen_ai.server.request.duration"].histogram.data_points
    assert plain(well.attributes) == common | {"gen_ai.operation.name": "text_completion"}
    assert plain(failed.attributes) == plain(well.attributes) | {"error.type": "503"}
    assert (well.sum, failed.sum) == (0.5, 0.7)


@BOTH
def test_traced_requests_leave_exemplars(receiving):
    with receiving() as receiver:
        with exporting(receiver) as metrics:
            metrics.first_token("chat", 0.03, IDS)
            metrics.first_token("chat", 0.5, None)
            metrics.time_per_output_token("chat", 0.02, None)
        [found] = receiver.metrics(FRONTEND)
    [point] = found["gen_ai.server.time_to_first_token"].histogram.data_points
    [exemplar] = point.exemplars
    assert (exemplar.trace_id.hex(), exemplar.span_id.hex(), exemplar.as_double) == (*IDS, 0.03)
    assert not found["gen_ai.server.time_per_output_token"].histogram.data_points[0].exemplars


def test_the_exemplar_filter_is_the_standard_one():
    for value, expected in (("always_off", []), ("always_on", [IDS[0], ""])):
        with http_receiver() as receiver:
            with exporting(receiver, OTEL_METRICS_EXEMPLAR_FILTER=value) as metrics:
                metrics.first_token("chat", 0.03, IDS)
                metrics.first_token("chat", 0.5, None)
            [point] = receiver.metrics(FRONTEND)[0]["gen_ai.server.time_to_first_token"].histogram.data_points
        assert [exemplar.trace_id.hex() for exemplar in point.exemplars] == expected


def test_temporality_and_aggregation_as_preferred():
    variables = {
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta",
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
        "OTEL_METRIC_EXPORT_INTERVAL": SOON_MS,
    }
    latest = attached(generation_tokens=10)
    with http_receiver() as receiver:
        with exporting(receiver, latest, lambda: True, **variables) as metrics:
            receiver.wait(lambda: receiver.metrics(ENGINE))
            metrics.first_token("chat", 0.03, None)
            receiver.wait(lambda: receiver.metrics(FRONTEND))
            latest.observe(stepped(2, 25))
            metrics.first_token("chat", 0.03, None)
        measured = [found["gen_ai.server.time_to_first_token"] for found in receiver.metrics(FRONTEND)]
        generated = [found["drafthouse.generation_tokens"].sum for found in receiver.metrics(ENGINE)]
    assert {metric.WhichOneof("data") for metric in measured} == {"exponential_histogram"}
    assert [metric.exponential_histogram.data_points[0].count for metric in measured] == [1, 1]
    assert {one.aggregation_temporality for one in generated} == {DELTA}
    assert sum(one.data_points[0].as_int for one in generated) == 25, "from zero at Hello, and nothing twice"
    spans = [(one.data_points[0].start_time_unix_nano, one.data_points[0].time_unix_nano) for one in generated]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@BOTH
def test_the_reporter_exports_its_engine_under_the_engines_resource(receiving):
    with receiving() as receiver:
        with exporting(receiver, attached(generation_tokens=12), lambda: True):
            pass  # this frontend served nothing: the engine's sums go out all the same
        [resource] = receiver.resources(ENGINE)
        [found] = receiver.metrics(ENGINE)
        assert receiver.resources(FRONTEND) == []
    assert plain(resource.resource.attributes) == {"service.name": ENGINE, "service.instance.id": f"0/{EPOCH}"}
    assert {scope.scope.name for scope in resource.scope_metrics} == {"drafthouse"}
    generated = found["drafthouse.generation_tokens"].sum
    assert (generated.is_monotonic, generated.aggregation_temporality) == (True, CUMULATIVE)
    [point] = generated.data_points
    assert (point.as_int, point.start_time_unix_nano) == (12, EPOCH)
    assert plain(point.attributes) == {"gen_ai.response.model": "tiny", "engine": "0"}
    positions = found["drafthouse.spec_decode.accepted_tokens_per_pos"].sum.data_points
    assert [plain(point.attributes)["position"] for point in positions] == [0, 1, 2]
    rounds = found["drafthouse.verify_rounds"].sum.data_points
    assert [plain(point.attributes)["kind"] for point in rounds] == ["draft", "plain"]


def test_whoever_is_not_the_reporter_exports_nothing_of_the_engine():
    with http_receiver() as receiver:
        with exporting(receiver) as metrics:
            metrics.first_token("chat", 0.1, None)
        assert len(receiver.requests) == 1 and receiver.resources(ENGINE) == []
        with exporting(receiver):
            pass
        assert len(receiver.requests) == 1, "nothing to say, nothing sent"


def test_the_engines_sums_carry_what_the_environment_says_of_every_service():
    with http_receiver() as receiver:
        start(receiver, {}, engines(attached()), shared=(("team", "b"),)).close(5.0)
        [resource] = receiver.resources(ENGINE)
    identity = {"service.name": ENGINE, "service.instance.id": f"0/{EPOCH}"}
    assert plain(resource.resource.attributes) == identity | {"team": "b"}


@BOTH
def test_headers_and_compression_reach_the_collector(receiving):
    with receiving() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip"}
        with exporting(receiver, is_reporter=lambda: True, **variables):
            pass
        [headers] = receiver.headers
    assert headers["x-key"] == "a b"
    if receiving is http_receiver:
        assert headers[":path"] == "/v1/metrics" and headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("receiving", "answer", "reason"),
    [(http_receiver, 400, "HTTP 400"), (grpc_receiver, grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")],
    ids=["http", "grpc"],
)
def test_failures_are_counted_and_told_twice(receiving, answer, reason: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    variables = {
        "OTEL_METRIC_EXPORT_INTERVAL": SOON_MS,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=s3cret",
    }
    with receiving() as receiver:
        receiver.answers.extend([answer] * 3)
        with exporting(receiver, attached(9), lambda: True, **variables) as metrics:
            receiver.wait(lambda: receiver.requests)
            assert metrics.failures == receiver.refused == 3
        [found, *_] = receiver.metrics(ENGINE)
        assert found["drafthouse.generation_tokens"].sum.data_points[0].as_int == 9
    told = [(record.name, record.levelname) for record in caplog.records if "otlp metrics fail" in record.message]
    assert told == [("frontend.otlp_metrics", "WARNING")]
    assert [record.levelname for record in caplog.records if "arrive again" in record.message] == ["INFO"]
    assert f"reason={reason!r}" in caplog.text and "s3cret" not in caplog.text
    assert not any(record.name.startswith("opentelemetry") for record in caplog.records)


def test_a_collector_that_is_not_there_is_a_failure_with_its_reason(caplog: pytest.LogCaptureFixture):
    with http_receiver() as receiver:
        pass  # its port is free again
    for timeout_s, reason in (("0.2", "no time for another attempt"), ("2", "ConnectionError")):
        with exporting(receiver, is_reporter=lambda: True, OTEL_EXPORTER_OTLP_TIMEOUT=timeout_s) as metrics:
            pass
        assert metrics.failures == 1
        assert f"reason={reason!r}" in caplog.text


def test_an_error_of_our_own_is_a_failure_too_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture):
    answers = iter([RuntimeError("of our own"), RuntimeError("again"), True])

    def is_reporter() -> bool:
        answer = next(answers, False)
        if isinstance(answer, Exception):
            raise answer
        return answer

    variables = {"OTEL_METRIC_EXPORT_INTERVAL": SOON_MS}
    with http_receiver() as receiver, exporting(receiver, attached(), is_reporter, **variables) as metrics:
        receiver.wait(lambda: receiver.requests)
        assert metrics.failures == 2
    assert caplog.text.count("of our own") == 1 and "again\n" not in caplog.text.replace("arrive again", "")


@BOTH
def test_closing_is_bounded_with_a_collector_that_hangs(receiving):
    with receiving() as receiver:
        receiver.hanging = threading.Event()
        started = start(receiver, {}, engines(attached()))
        before_s = time.monotonic()
        started.first_token("chat", 0.1, None)
        started.close(0.5)
        started.close(0.5)
        started.first_token("chat", 0.1, None)  # late requests are no error
        at_most_s(time.monotonic() - before_s, 3.0, "closing")
        receiver.hanging.set()


def test_closing_interrupts_the_wait_between_attempts():
    with http_receiver() as receiver:
        receiver.answers.extend([503] * 100)
        before_s = time.monotonic()
        with exporting(receiver, is_reporter=lambda: True, OTEL_METRIC_EXPORT_INTERVAL=SOON_MS) as metrics:
            receiver.wait(lambda: receiver.refused)
            metrics.close(0.5)
        at_most_s(time.monotonic() - before_s, 5.0, "closing")
        assert metrics.failures >= 1
