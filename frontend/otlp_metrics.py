"""Metrics by OTLP: the conventions' server histograms of this frontend, and the sums of the engines it reports.

Owns the SDK's instruments, the thread that exports them, and what a failing collector looks like from outside: a count and two log
lines. Never touches a request: recording takes no I/O, exporting has a thread of its own. Built and started by `frontend.telemetry`
when asked for (docs/metrics.md), called by `frontend.metrics`. The SDK is loaded then, and only then.

The thread is ours, because the SDK's periodic reader exports nothing while this frontend measured nothing, and the engines' sums must
go out all the same.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from frontend.deltas import ObservedEngine
from frontend.engine_sums import EngineReport, EngineReporters, Point
from frontend.observations import TraceIds
from frontend.otlp_metrics_settings import ExemplarFilter, MetricsSettings
from frontend.otlp_transport import Compression, OtlpProtocol
from frontend.spans import Attributes
from frontend.telemetry_resources import TelemetryResources, version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        InMemoryMetricReader,
        MetricExporter,
        ResourceMetrics,
    )

SCOPE: Final = "drafthouse"
PROVIDER: Final = "drafthouse"
LAST_EXPORT_SHARE: Final = 0.9  # of the time to close; the rest is for giving up

# The conventions' own buckets (reference/ecosystem.md 2.1).
REQUEST_DURATION_BUCKETS: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

Engines = Callable[[], Sequence[ObservedEngine]]  # those that are known; called by any thread

logger = logging.getLogger(__name__)


class OtlpMetrics:
    """Records on the event loop's thread, exports on its own (`frontend.observations.OtlpObserver`).

    Nothing runs before `start`. Raises OSError for PEM files that cannot be read.
    """

    def __init__(self, settings: MetricsSettings, resources: TelemetryResources, engines: Engines) -> None:
        self._engines = engines
        self._server = settings.server_attributes
        self._attributes: dict[tuple[str, str | None, str], dict[str, str | int]] = {}
        self._reader = _reader(settings)
        provider = _provider(settings, self._reader, resources.frontend)
        meter = provider.get_meter(SCOPE, version())
        histogram = meter.create_histogram
        self._duration = histogram(
            "gen_ai.server.request.duration", "s", "Time of a request, from its arrival to the end of its answer.",
            explicit_bucket_boundaries_advisory=REQUEST_DURATION_BUCKETS,
        )  # fmt: skip
        self._first = histogram(
            "gen_ai.server.time_to_first_token", "s", "Arrival to first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )  # fmt: skip
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean time per token after the first.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )  # fmt: skip
        self._no_context, self._traced_context = _contexts()
        self._reporters = EngineReporters(engines, settings.is_delta)
        self._export = _Export(settings, self._reader, self._reporters, resources)

    @property
    def failures(self) -> int:
        return self._export.failures

    def request_finished(self, operation: str, seconds: float, error_type: str | None, trace: TraceIds | None) -> None:
        self._duration.record(seconds, self._of(operation, error_type), self._context(trace))
        self._reporters.recognise()

    def first_token(self, operation: str, seconds: float, trace: TraceIds | None) -> None:
        self._first.record(seconds, self._of(operation, None), self._context(trace))

    def time_per_output_token(self, operation: str, seconds: float, trace: TraceIds | None) -> None:
        self._per_token.record(seconds, self._of(operation, None), self._context(trace))

    def start(self) -> None:
        self._export.start()

    def close(self, timeout_s: float) -> None:
        """Export once more and end, within `timeout_s`; a collector that hangs is left behind. Blocks. Idempotent."""
        self._export.close(timeout_s)

    def _of(self, operation: str, error_type: str | None) -> dict[str, str | int]:
        hello = next((engine.latest.hello for engine in self._engines()), None)
        key = (operation, error_type, "" if hello is None else hello.model_name)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, **self._server}
            if hello is not None:  # one model is served, and a request for another is refused
                attributes |= {"gen_ai.request.model": hello.model_name, "gen_ai.response.model": hello.model_name}
            if error_type is not None:
                attributes["error.type"] = error_type
            self._attributes[key] = attributes
        return attributes

    def _context(self, trace: TraceIds | None) -> "Context":
        return self._no_context if trace is None else self._traced_context(trace)


class _Export:
    """The export thread and what it has seen of the collector."""

    def __init__(
        self,
        settings: MetricsSettings,
        reader: "InMemoryMetricReader",
        reporters: EngineReporters,
        resources: TelemetryResources,
    ) -> None:
        self.failures = 0
        self._settings = settings
        self._reader = reader
        self._reporters = reporters
        self._resources = resources
        self._sdk_log = _SdkLog()
        self._exporter = _exporter(settings)
        self._is_failing = False
        self._is_given_up = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp metrics", daemon=True)

    def start(self) -> None:
        self._sdk_log.take_over()
        self._thread.start()
        endpoint, interval_s = self._settings.collector.shown, self._settings.interval_s
        logger.info("otlp metrics endpoint=%s interval_s=%g", endpoint, interval_s)

    def close(self, timeout_s: float) -> None:
        if self._closing.is_set():
            return
        deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        self._thread.join(timeout_s * LAST_EXPORT_SHARE)
        self._is_given_up = True
        self._exporter.shutdown()  # ends a wait between two attempts
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._sdk_log.restore()

    def _run(self) -> None:
        while not self._closing.wait(self._settings.interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            has_arrived = self._send()
        except Exception:
            has_arrived = False
            if not self._is_failing and not self._is_given_up:
                logger.exception("otlp metrics could not be exported")
        if has_arrived is None:
            return
        endpoint = self._settings.collector.shown
        if not has_arrived:
            self.failures += 1
            if not self._is_failing:
                logger.warning("otlp metrics fail endpoint=%s reason=%r", endpoint, self._sdk_log.reason)
        elif self._is_failing:
            logger.info("otlp metrics arrive again endpoint=%s failures=%d", endpoint, self.failures)
        self._is_failing = not has_arrived

    def _send(self) -> bool | None:
        """Whether the collector took what there was; None when there was nothing."""
        from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

        measured = self._reader.get_metrics_data()
        temporality = _temporality(self._settings)
        found = list(measured.resource_metrics) if measured is not None else []
        for report in self._reporters.collect():
            attributes = self._resources.engine(report.hello.engine_id, report.hello.epoch)
            found.append(_engine_metrics(report, attributes, temporality))
        if not found:
            return None
        self._sdk_log.reason = _SdkLog.NO_TIME
        if self._exporter.export(MetricsData(found)) is not MetricExportResult.SUCCESS:
            return False
        self._reporters.exported()
        return True


class _SdkLog(logging.Handler):
    """Takes the exporters' line per attempt off the log and keeps why the last one failed.

    Of their words only codes and names of exceptions are kept: what a collector answered may repeat our headers.
    """

    LOGGER: Final = "opentelemetry.exporter.otlp"
    NO_TIME: Final = "no time for another attempt"  # all they say when the first wait would be too long

    def __init__(self) -> None:
        super().__init__()
        self.reason = self.NO_TIME
        self._logger = logging.getLogger(self.LOGGER)

    def take_over(self) -> None:
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        for argument in record.args if isinstance(record.args, tuple) else ():
            name = getattr(argument, "name", None)  # a gRPC status code
            if isinstance(argument, Exception):
                self.reason = type(argument).__name__
            elif isinstance(name, str):
                self.reason = name
            elif isinstance(argument, int) and argument >= HTTPStatus.BAD_REQUEST:
                self.reason = f"HTTP {argument}"
            elif argument in _PHRASES:
                self.reason = f"HTTP {_PHRASES[argument]}"

    def restore(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True


_PHRASES: Final[dict[object, int]] = {status.phrase: status.value for status in HTTPStatus}


# ---- the SDK's objects ----


def _temporality(settings: MetricsSettings) -> "AggregationTemporality":
    from opentelemetry.sdk.metrics.export import AggregationTemporality

    return AggregationTemporality.DELTA if settings.is_delta else AggregationTemporality.CUMULATIVE


def _reader(settings: MetricsSettings) -> "InMemoryMetricReader":
    from opentelemetry.sdk.metrics import Histogram
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.metrics.view import (
        Aggregation,
        ExplicitBucketHistogramAggregation,
        ExponentialBucketHistogramAggregation,
    )

    aggregation: Aggregation = ExplicitBucketHistogramAggregation()
    if settings.is_exponential:
        aggregation = ExponentialBucketHistogramAggregation()
    return InMemoryMetricReader({Histogram: _temporality(settings)}, {Histogram: aggregation})


def _provider(
    settings: MetricsSettings, reader: "InMemoryMetricReader", resource_attributes: Attributes
) -> "MeterProvider":
    from opentelemetry.sdk import metrics
    from opentelemetry.sdk.resources import Resource

    filters: dict[ExemplarFilter, Callable[[], metrics.ExemplarFilter]] = {
        ExemplarFilter.TRACE_BASED: metrics.TraceBasedExemplarFilter,
        ExemplarFilter.ALWAYS_ON: metrics.AlwaysOnExemplarFilter,
        ExemplarFilter.ALWAYS_OFF: metrics.AlwaysOffExemplarFilter,
    }
    return metrics.MeterProvider(
        [reader],
        Resource(dict(resource_attributes)),
        filters[settings.exemplar_filter](),
        shutdown_on_exit=False,  # closing is bounded, and the caller's
    )


def _contexts() -> "tuple[Context, Callable[[TraceIds], Context]]":
    """The context of an untraced measurement, and the one of a traced: what the SDK's exemplars are taken from."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    empty, sampled = Context(), TraceFlags(TraceFlags.SAMPLED)

    def traced(trace: TraceIds) -> Context:
        span = SpanContext(int(trace[0], 16), int(trace[1], 16), is_remote=False, trace_flags=sampled)
        return set_span_in_context(NonRecordingSpan(span), empty)

    return empty, traced


def _exporter(settings: MetricsSettings) -> "MetricExporter":
    """The SDK's exporter for a collector. Everything is passed: nothing is read from the environment a second time."""
    collector = settings.collector
    if collector.protocol is OtlpProtocol.HTTP:
        from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(
            endpoint=collector.address,
            certificate_file=collector.certificate,
            client_key_file=collector.client_key,
            client_certificate_file=collector.client_certificate,
            headers=dict(collector.headers),
            timeout=collector.timeout_s,
            compression=HttpCompression(collector.compression.value),
        )
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

    credentials = None
    if collector.is_secure:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_contents(collector.certificate),
            private_key=_contents(collector.client_key),
            certificate_chain=_contents(collector.client_certificate),
        )
    is_gzip = collector.compression is Compression.GZIP
    return GrpcExporter(
        endpoint=collector.address,
        insecure=not collector.is_secure,
        credentials=credentials,
        headers=collector.headers,
        timeout=collector.timeout_s,
        compression=grpc.Compression.Gzip if is_gzip else grpc.Compression.NoCompression,
    )


def _engine_metrics(
    report: EngineReport, attributes: Attributes, temporality: "AggregationTemporality"
) -> "ResourceMetrics":
    from opentelemetry.sdk.metrics.export import Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    def point(given: Point) -> NumberDataPoint:
        return NumberDataPoint(given.attributes, report.start_ns, report.end_ns, given.value)

    sums = [
        Metric(kind.name, kind.help, kind.unit, Sum([point(given) for given in points], temporality, is_monotonic=True))
        for kind, points in report.sums
    ]
    scope = ScopeMetrics(InstrumentationScope(SCOPE, version()), sums, schema_url="")
    return ResourceMetrics(Resource(dict(attributes)), [scope], schema_url="")


def _contents(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
