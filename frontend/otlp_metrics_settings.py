"""What OTLP metrics were asked to be: their own standard variables, and the shared ones of `frontend.otlp_environment`.

Owns how often, in which form and with which exemplars metrics leave. Where they go and how is read as for traces. Never
reads the process's environment, never loads the SDK. Called by `frontend.telemetry` at start.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from frontend.config import FrontendConfig
from frontend.otlp_environment import (
    DEFAULT_EXPORT_TIMEOUT_MS,
    Signal,
    asks_for_metrics,
    choice_of,
    collector_from,
    milliseconds_of,
    refuse_unsupported,
)
from frontend.otlp_transport import Collector

DEFAULT_INTERVAL_MS: Final = 60_000
_WILDCARD_HOSTS: Final = ("0.0.0.0", "::", "*")


class ExemplarFilter(StrEnum):
    TRACE_BASED = "trace_based"
    ALWAYS_ON = "always_on"
    ALWAYS_OFF = "always_off"


class _Temporality(StrEnum):
    CUMULATIVE = "cumulative"
    DELTA = "delta"
    LOWMEMORY = "lowmemory"  # delta for histograms and counters, which is all there is here


class _Aggregation(StrEnum):
    EXPLICIT = "explicit_bucket_histogram"
    EXPONENTIAL = "base2_exponential_bucket_histogram"


@dataclass(frozen=True)
class MetricsSettings:
    """How OTLP metrics are exported. Times in seconds."""

    collector: Collector
    interval_s: float
    is_delta: bool
    is_exponential: bool  # histograms with base-2 buckets instead of the conventions' own
    exemplar_filter: ExemplarFilter
    server_attributes: dict[str, str | int]


def metrics_settings(config: FrontendConfig, environment: Mapping[str, str]) -> MetricsSettings | None:
    """None when OTLP metrics are off, which they are unless asked for. Raises ValueError naming variable or option."""
    if not asks_for_metrics(config.otlp_metrics_endpoint, environment):
        return None
    refuse_unsupported(environment)
    collector = collector_from(config.otlp_metrics_endpoint, environment, Signal.METRICS)
    interval_ms = milliseconds_of(environment, "OTEL_METRIC_EXPORT_INTERVAL") or DEFAULT_INTERVAL_MS
    export_timeout_ms = milliseconds_of(environment, "OTEL_METRIC_EXPORT_TIMEOUT") or DEFAULT_EXPORT_TIMEOUT_MS
    temporality = choice_of(environment, Signal.METRICS.variable("TEMPORALITY_PREFERENCE"), list(_Temporality))
    aggregation = choice_of(environment, Signal.METRICS.variable("DEFAULT_HISTOGRAM_AGGREGATION"), list(_Aggregation))
    exemplar_filter = choice_of(environment, "OTEL_METRICS_EXEMPLAR_FILTER", list(ExemplarFilter))
    return MetricsSettings(
        # an attempt ends with the export that it belongs to
        collector=replace(collector, timeout_s=min(collector.timeout_s, export_timeout_ms / 1e3)),
        interval_s=interval_ms / 1e3,
        is_delta=temporality in (_Temporality.DELTA, _Temporality.LOWMEMORY),
        is_exponential=aggregation is _Aggregation.EXPONENTIAL,
        exemplar_filter=exemplar_filter or ExemplarFilter.TRACE_BASED,
        server_attributes=_server_attributes(config),
    )


def _server_attributes(config: FrontendConfig) -> dict[str, str | int]:
    """Where clients reach this frontend. A wildcard is no address, so the host's name is given; a free port is not known."""
    host = socket.gethostname() if config.host in _WILDCARD_HOSTS else config.host
    return {"server.address": host} | ({"server.port": config.port} if config.port else {})
