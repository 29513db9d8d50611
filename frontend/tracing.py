"""Tracing switched on: settings from options and environment, the queue with its thread, and who the spans are about.

Owns the two resources: this frontend's, and one per life of an engine. Never decides what is traced and makes no span
(`frontend.trace_context`, `frontend.request_trace`). Built once by `frontend.__main__`, which closes it last; without it
nothing of OpenTelemetry is loaded.
"""

import importlib.metadata
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.config import FrontendConfig
from frontend.otlp_delivery import Delivery
from frontend.otlp_environment import (
    asks_for_traces,
    collector_from,
    queue_settings_from,
    refuse_unsupported,
    resource_attributes_from,
    span_limits_from,
)
from frontend.otlp_transport import Collector, connect
from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.span_export import DEFAULT_CLOSE_S, ExportStats, QueueSettings, SpanQueue
from frontend.spans import Attributes, Resource

FRONTEND_SERVICE = "drafthouse-frontend"
ENGINE_SERVICE = "drafthouse-engine"
MAX_ENGINE_RESOURCES = 64  # lives of engines remembered
# What OTEL_RESOURCE_ATTRIBUTES says of the process it was set for, which is not the engine's.
_OWN_ATTRIBUTES = ("service.name", "service.instance.id", "service.version")
_OWN_PREFIXES = ("host.", "process.", "container.", "k8s.pod.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracingSettings:
    collector: Collector
    queue: QueueSettings
    limits: SpanLimits
    resource: tuple[tuple[str, str], ...]  # what the environment says of this process


def settings_from(config: FrontendConfig, environment: Mapping[str, str]) -> TracingSettings | None:
    """None when tracing is off. Raises ValueError naming the variable or option that cannot be honoured."""
    if not asks_for_traces(config.otlp_traces_endpoint, environment):
        if config.otlp_traces_endpoint:
            logger.warning("tracing is off: the environment says so, otlp_traces_endpoint has no effect")
        return None
    refuse_unsupported(environment)
    collector = collector_from(config.otlp_traces_endpoint, environment)
    return TracingSettings(
        collector,
        queue_settings_from(environment, collector.timeout_s),
        span_limits_from(environment),
        tuple(resource_attributes_from(environment).items()),
    )


class Tracing:
    """What the rest of the frontend needs of a running export."""

    def __init__(self, sink: SpanQueue, environment_attributes: tuple[tuple[str, str], ...]) -> None:
        self.sink = sink
        self.frontend_resource = Resource(tuple((_own_attributes() | dict(environment_attributes)).items()))
        self._shared = {name: value for name, value in environment_attributes if not _is_own(name)}
        self._engines: dict[tuple[str, int], Resource] = {}

    def engine_resource(self, engine_id: str, epoch: int) -> Resource:
        """The resource of one life of an engine. OTEL_SERVICE_NAME does not rename it: it is another service."""
        found = self._engines.get((engine_id, epoch))
        if found is None:
            if len(self._engines) >= MAX_ENGINE_RESOURCES:
                self._engines.pop(next(iter(self._engines)))
            identity = {"service.name": ENGINE_SERVICE, "service.instance.id": f"{engine_id}/{epoch}"}
            found = self._engines[engine_id, epoch] = Resource(tuple((identity | self._shared).items()))
        return found

    @property
    def stats(self) -> ExportStats:
        return self.sink.stats

    def close(self, timeout_s: float = DEFAULT_CLOSE_S) -> None:
        """Flush, for at most `timeout_s`. Blocks: not for the event loop while it still serves."""
        self.sink.close(timeout_s)


def start_tracing(settings: TracingSettings) -> Tracing:
    """The queue, its thread running; the first request opens the connection. Raises OSError for unreadable PEM files."""
    transport = connect(settings.collector, _version())
    delivery = Delivery(transport, settings.collector.shown)
    sink = SpanQueue(settings.queue, SpanEncoder(_version(), settings.limits), delivery)
    sink.start()
    logger.info(
        "tracing endpoint=%s protocol=%s queue=%d batch=%d",
        settings.collector.shown,
        settings.collector.protocol.value,
        settings.queue.capacity,
        settings.queue.batch_size,
    )
    return Tracing(sink, settings.resource)


def resource_of(environment: Mapping[str, str]) -> Attributes:
    """Who this frontend is, for metrics that are exported while tracing is off."""
    return tuple((_own_attributes() | resource_attributes_from(environment)).items())


def _own_attributes() -> dict[str, str | int]:
    return {
        "service.name": FRONTEND_SERVICE,
        "service.version": _version(),
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def _is_own(name: str) -> bool:
    return name in _OWN_ATTRIBUTES or name.startswith(_OWN_PREFIXES)


def _version() -> str:
    return importlib.metadata.version("drafthouse")
