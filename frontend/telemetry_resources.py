"""Who telemetry is about: this frontend, and each life of an engine, the same for spans and for metrics.

Owns the attributes of both and what of OTEL_RESOURCE_ATTRIBUTES an engine shares. Never exports anything. Made once by
`frontend.telemetry`, whatever was asked for; used by `frontend.tracing` and `frontend.otlp_metrics`.
"""

import importlib.metadata
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.otlp_environment import resource_attributes_from
from frontend.spans import Attributes

FRONTEND_SERVICE = "drafthouse-frontend"
ENGINE_SERVICE = "drafthouse-engine"
# What OTEL_RESOURCE_ATTRIBUTES says of the process it was set for, which is not the engine's.
_OWN_ATTRIBUTES = ("service.name", "service.instance.id", "service.version")
_OWN_PREFIXES = ("host.", "process.", "container.", "k8s.pod.")


@dataclass(frozen=True)
class TelemetryResources:
    frontend: Attributes
    shared: Attributes = ()  # of the environment's attributes those that hold for engines too

    def engine(self, engine_id: str, epoch: int) -> Attributes:
        """One life of an engine. OTEL_SERVICE_NAME does not rename it: it is another service."""
        identity = {"service.name": ENGINE_SERVICE, "service.instance.id": f"{engine_id}/{epoch}"}
        return tuple((identity | dict(self.shared)).items())


def resources_from(environment: Mapping[str, str]) -> TelemetryResources:
    """A new instance of this frontend. Raises ValueError for malformed OTEL_RESOURCE_ATTRIBUTES."""
    said = resource_attributes_from(environment)
    return TelemetryResources(
        frontend=tuple((_own_attributes() | said).items()),
        shared=tuple((name, value) for name, value in said.items() if not _is_own(name)),
    )


def version() -> str:
    """Of drafthouse, as spans, metrics and user agents carry it."""
    try:
        return importlib.metadata.version("drafthouse")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+source"


def _own_attributes() -> dict[str, str | int]:
    return {
        "service.name": FRONTEND_SERVICE,
        "service.version": version(),
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def _is_own(name: str) -> bool:
    return name in _OWN_ATTRIBUTES or name.startswith(_OWN_PREFIXES)
