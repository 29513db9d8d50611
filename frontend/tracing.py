"""Tracing switched on: settings from options and environment, the queue with its thread, and the resources of its spans.

Owns the queue and one resource object per life of an engine. Never decides what is traced and makes no span
(`frontend.trace_context`, `frontend.request_trace`). Built once by `frontend.telemetry`, which starts and closes it; without
it nothing of OpenTelemetry is loaded.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.config import FrontendConfig
from frontend.otlp_delivery import Delivery
from frontend.otlp_environment import (
    asks_for_traces,
    collector_from,
    queue_settings_from,
    refuse_unsupported,
    span_limits_from,
)
from frontend.otlp_transport import Collector, connect
from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.span_export import DEFAULT_CLOSE_S, ExportStats, QueueSettings, SpanQueue
from frontend.spans import Resource
from frontend.telemetry_resources import TelemetryResources, version

MAX_ENGINE_RESOURCES = 64  # lives of engines remembered

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracingSettings:
    collector: Collector
    queue: QueueSettings
    limits: SpanLimits


def settings_from(config: FrontendConfig, environment: Mapping[str, str]) -> TracingSettings | None:
    """None when tracing is off. Raises ValueError naming the variable or option that cannot be honoured."""
    if not asks_for_traces(config.otlp_traces_endpoint, environment):
        return None
    refuse_unsupported(environment)
    collector = collector_from(config.otlp_traces_endpoint, environment)
    return TracingSettings(
        collector,
        queue_settings_from(environment, collector.timeout_s),
        span_limits_from(environment),
    )


class Tracing:
    """What the rest of the frontend needs of an export. Nothing runs before `start`.

    Raises OSError for PEM files that cannot be read.
    """

    def __init__(self, settings: TracingSettings, resources: TelemetryResources) -> None:
        self._settings = settings
        self._resources = resources
        delivery = Delivery(connect(settings.collector, version()), settings.collector.shown)
        self.sink = SpanQueue(settings.queue, SpanEncoder(version(), settings.limits), delivery)
        self.frontend_resource = Resource(resources.frontend)
        self._engines: dict[tuple[str, int], Resource] = {}

    def engine_resource(self, engine_id: str, epoch: int) -> Resource:
        """The resource of one life of an engine: the same object every time, for spans are grouped by it."""
        found = self._engines.get((engine_id, epoch))
        if found is None:
            if len(self._engines) >= MAX_ENGINE_RESOURCES:
                self._engines.pop(next(iter(self._engines)))
            found = self._engines[engine_id, epoch] = Resource(self._resources.engine(engine_id, epoch))
        return found

    @property
    def stats(self) -> ExportStats:
        return self.sink.stats

    def start(self) -> None:
        """Begin to export; the first span opens the connection."""
        self.sink.start()
        logger.info(
            "tracing endpoint=%s protocol=%s queue=%d batch=%d",
            self._settings.collector.shown,
            self._settings.collector.protocol.value,
            self._settings.queue.capacity,
            self._settings.queue.batch_size,
        )

    def close(self, timeout_s: float = DEFAULT_CLOSE_S) -> None:
        """Flush, for at most `timeout_s`. Blocks: not for the event loop while it still serves."""
        self.sink.close(timeout_s)
