"""The telemetry that a frontend was asked for, put together: who is traced, where spans and metrics go, and the end of it.

Owns the order: everything is checked and built before anything runs. Never measures anything. Built once by `frontend.__main__`; without a request for
tracing or OTLP metrics nothing of OpenTelemetry is loaded.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from frontend.config import FrontendConfig
from frontend.metrics import FrontendMetrics
from frontend.otlp_metrics import Engines, OtlpMetrics
from frontend.otlp_metrics_settings import metrics_settings
from frontend.spans import Surroundings, TraceLevel
from frontend.telemetry_resources import resources_from
from frontend.trace_context import RateLimit, follows_callers, sampler_from
from frontend.tracer import Tracer
from frontend.tracing import Tracing, settings_from

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What runs. Each part is None while it was not asked for."""

    tracer: Tracer | None
    tracing: Tracing | None
    otlp: OtlpMetrics | None

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Flush spans and metrics side by side, within `timeout_s` in all. Blocks: call it when nothing is served."""
        parts = [part for part in (self.tracing, self.otlp) if part is not None]
        if not parts:
            return
        pool = ThreadPoolExecutor(len(parts), thread_name_prefix="telemetry close")
        wait([pool.submit(part.close, timeout_s) for part in parts], timeout_s)
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The export's account in the words of /metrics."""

    exported: int
    dropped: Mapping[str, int]
    failures: Mapping[str, int]
    size: int
    capacity: int


def start_telemetry(
    config: FrontendConfig,
    environment: Mapping[str, str],
    metrics: FrontendMetrics,
    engines: Engines,
) -> Telemetry:
    """Begin what `config` and `environment` ask for.

    `engines`: whose totals are exported, where this frontend is their reporter. Raises ValueError naming the option or
    variable that cannot be honoured, OSError for key files that cannot be read; then no thread and no connection was begun.
    """
    traces, measurements = settings_from(config, environment), metrics_settings(config, environment)
    if traces is None and measurements is None:
        return Telemetry(None, None, None)
    resources = resources_from(environment)
    tracing = None if traces is None else Tracing(traces, resources)
    tracer = None if tracing is None else _tracer(config, environment, metrics, tracing)
    otlp = None if measurements is None else OtlpMetrics(measurements, resources, engines)
    if tracing is not None:
        metrics.trace_on()
        metrics.watch_spans(lambda: _labelled(tracing))
        tracing.start()
    if otlp is not None:
        metrics.watch_otlp(otlp)
        otlp.start()
    return Telemetry(tracer, tracing, otlp)


def _tracer(
    config: FrontendConfig, environment: Mapping[str, str], metrics: FrontendMetrics, tracing: Tracing
) -> Tracer:
    return Tracer(
        around=Surroundings(tracing.sink, tracing.frontend_resource, tracing.engine_resource),
        sampler=sampler_from(environment),
        limit=RateLimit(config.trace_max_per_second, time.monotonic),
        level=TraceLevel(config.trace_level),
        metrics=metrics,
        follows_callers=follows_callers(environment),
    )


def _labelled(tracing: Tracing) -> _Labelled:
    stats = tracing.stats
    return _Labelled(
        exported=stats.exported,
        dropped={reason.name.lower(): count for reason, count in stats.dropped.items()},
        failures={reason.name.lower(): count for reason, count in stats.failures.items()},
        size=stats.size + stats.in_flight,
        capacity=stats.capacity,
    )
