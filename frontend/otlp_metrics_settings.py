"""What the standard OTEL_* variables and our options say of OTLP metrics, checked.

Owns the names, defaults and limits; every refusal names its variable, and none repeats a value that may be a secret. Never reads the
process's environment, never loads the SDK. Called by `frontend.otlp_metrics` at start.
"""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from frontend.config import FrontendConfig
from frontend.otlp_transport import Collector, Compression, OtlpProtocol

DEFAULT_TIMEOUT_S: Final = 10.0
DEFAULT_INTERVAL_MS: Final = 60_000.0
DEFAULT_EXPORT_TIMEOUT_MS: Final = 30_000.0
HTTP_PORT: Final = 4318
METRICS_PATH: Final = "/v1/metrics"
_WILDCARD_HOSTS: Final = ("0.0.0.0", "::", "*")

OPTION: Final = "--otlp-metrics-endpoint"
_Choice = TypeVar("_Choice", bound=StrEnum)


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


class _Exporter(StrEnum):
    OTLP = "otlp"
    NONE = "none"


class _Flag(StrEnum):
    TRUE = "true"
    FALSE = "false"


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
    """None when OTLP metrics are off, which they are unless asked for. Raises ValueError with a sentence."""
    read = _Environment(environment)
    if read.choice("OTEL_SDK_DISABLED", _Flag, _Flag.FALSE) is _Flag.TRUE:
        return None
    given = read.text("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    asked = config.otlp_metrics_endpoint is not None or given is not None
    exporter = read.choice("OTEL_METRICS_EXPORTER", _Exporter, _Exporter.OTLP if asked else _Exporter.NONE)
    if exporter is _Exporter.NONE:
        return None
    interval_ms = read.positive("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_MS)
    preference = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    aggregation = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
    return MetricsSettings(
        collector=_collector(config, read),
        interval_s=interval_ms / 1e3,
        is_delta=read.choice(preference, _Temporality, _Temporality.CUMULATIVE) is not _Temporality.CUMULATIVE,
        is_exponential=read.choice(aggregation, _Aggregation, _Aggregation.EXPLICIT) is _Aggregation.EXPONENTIAL,
        exemplar_filter=read.choice("OTEL_METRICS_EXEMPLAR_FILTER", ExemplarFilter, ExemplarFilter.TRACE_BASED),
        server_attributes=_server_attributes(config),
    )


class _Environment:
    """Typed reading of variables. An empty variable is one that is not set (OpenTelemetry's rule)."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, *names: str) -> str | None:
        found = self.named(*names)
        return None if found is None else found[1]

    def named(self, *names: str) -> tuple[str, str] | None:
        """The first of the variables that is set: (name, value)."""
        for name in names:
            value = self._variables.get(name, "").strip()
            if value:
                return name, value
        return None

    def signal(self, suffix: str) -> tuple[str, str] | None:
        """The metrics' own form of an exporter variable, else the general one."""
        return self.named(f"OTEL_EXPORTER_OTLP_METRICS_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}")

    def choice(self, name: str, kind: type[_Choice], default: _Choice) -> _Choice:
        return chosen(self.named(name), kind) or default

    def positive(self, name: str, default: float) -> float:
        found = self.named(name)
        return default if found is None else positive(*found)


def chosen(found: tuple[str, str] | None, kind: type[_Choice]) -> _Choice | None:
    """The member a variable names, in any case. Raises ValueError with what is supported."""
    if found is None:
        return None
    name, value = found
    for member in kind:
        if member.value == value.lower():
            return member
    raise ValueError(f"{name} is {value!r}, which is not supported: use {' or '.join(kind)}")


def positive(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return number


def _collector(config: FrontendConfig, read: _Environment) -> Collector:
    name, endpoint, is_base = _endpoint(config, read)
    protocol = chosen(read.signal("PROTOCOL"), OtlpProtocol) or _likely_protocol(endpoint)
    compression = chosen(read.signal("COMPRESSION"), Compression) or Compression.NONE
    timeout = read.signal("TIMEOUT")
    timeout_s = DEFAULT_TIMEOUT_S if timeout is None else positive(*timeout)
    export_timeout_ms = read.positive("OTEL_METRIC_EXPORT_TIMEOUT", DEFAULT_EXPORT_TIMEOUT_MS)
    if protocol is OtlpProtocol.HTTP:
        address, is_secure = _http_address(name, endpoint, METRICS_PATH if is_base else "")
    else:
        address, is_secure = _grpc_address(name, endpoint, read)
        if compression is Compression.DEFLATE:
            raise ValueError(
                "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION deflate is for http/protobuf: gRPC takes gzip or none"
            )
    return Collector(
        protocol=protocol,
        address=address,
        is_secure=is_secure,
        headers=_headers(read.signal("HEADERS")),
        timeout_s=min(timeout_s, export_timeout_ms / 1e3),
        compression=compression,
        certificate=_file(read.signal("CERTIFICATE")),
        client_key=_file(read.signal("CLIENT_KEY")),
        client_certificate=_file(read.signal("CLIENT_CERTIFICATE")),
    )


def _endpoint(config: FrontendConfig, read: _Environment) -> tuple[str, str, bool]:
    """(what named it, the endpoint, whether it is a base that paths of signals are appended to)."""
    if config.otlp_metrics_endpoint is not None:
        return OPTION, config.otlp_metrics_endpoint.strip(), False
    found = read.named("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    if found is not None:
        return *found, False
    found = read.named("OTEL_EXPORTER_OTLP_ENDPOINT")
    if found is not None:
        return *found, True
    protocol = chosen(read.signal("PROTOCOL"), OtlpProtocol)
    port = HTTP_PORT if protocol is OtlpProtocol.HTTP else HTTP_PORT - 1
    return "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://localhost:{port}", True


def _likely_protocol(endpoint: str) -> OtlpProtocol:
    """What an endpoint looks like, when nobody said: port 4318 and the signal's path are HTTP's; gRPC is Python's default."""
    is_http = endpoint.rstrip("/").endswith((f":{HTTP_PORT}", METRICS_PATH)) or f":{HTTP_PORT}/" in endpoint
    return OtlpProtocol.HTTP if is_http else OtlpProtocol.GRPC


def _http_address(name: str, endpoint: str, path: str) -> tuple[str, bool]:
    if not endpoint.startswith(("http://", "https://")) or not urlsplit(endpoint).hostname:
        raise ValueError(f"{name} must begin with http:// or https:// and name a host for http/protobuf")
    return endpoint.rstrip("/") + path if path else endpoint, endpoint.startswith("https://")


def _grpc_address(name: str, endpoint: str, read: _Environment) -> tuple[str, bool]:
    """(host:port, whether by TLS). The scheme decides; without one OTEL_EXPORTER_OTLP_INSECURE does."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        rest = endpoint
        is_secure = chosen(read.signal("INSECURE"), _Flag) is not _Flag.TRUE
    elif scheme in ("http", "https"):
        is_secure = scheme == "https"
    else:
        raise ValueError(f"{name} must be http://HOST:PORT, https://HOST:PORT or HOST:PORT for gRPC")
    address, _, path = rest.partition("/")
    if path or "?" in address:
        raise ValueError(f"{name} has a path, which gRPC has no use for: set OTEL_EXPORTER_OTLP_METRICS_PROTOCOL")
    if "@" in address or not address.strip(":"):
        raise ValueError(f"{name} must be http://HOST:PORT, https://HOST:PORT or HOST:PORT for gRPC")
    return address, is_secure


def _headers(found: tuple[str, str] | None) -> tuple[tuple[str, str], ...]:
    """`name=value,name=value`, values percent-encoded (W3C baggage). A refusal shows no value: it may be a key."""
    if found is None:
        return ()
    variable, text = found
    headers = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = entry.partition("=")
        name, value = unquote(name).strip().lower(), unquote(value).strip()
        if (
            not separator
            or not name.isascii()
            or not name
            or not name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        ):
            raise ValueError(f"{variable} must be name=value pairs, separated by commas")
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"{variable}: the value of {name} has characters that no header can carry")
        headers.append((name, value))
    return tuple(headers)


def _file(found: tuple[str, str] | None) -> str | None:
    if found is None:
        return None
    name, path = found
    try:
        with Path(path).open("rb"):
            return path
    except OSError as error:
        raise ValueError(f"{name} names {path}, which cannot be read: {error.strerror}") from error


def _server_attributes(config: FrontendConfig) -> dict[str, str | int]:
    """Where clients reach this frontend. A wildcard is no address, so the host's name is given; a free port is not known."""
    host = socket.gethostname() if config.host in _WILDCARD_HOSTS else config.host
    return {"server.address": host} | ({"server.port": config.port} if config.port else {})
