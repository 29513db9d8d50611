"""OpenTelemetry's standard environment variables, of traces and of metrics, read into settings or refused by name.

Owns names, defaults and syntax of what the two have in common, and of the spans' own. Reads the mapping it is given, never
the process's environment, and opens files only to see that they can be. What cannot be honoured is a ValueError whose
sentence names the variable; headers and addresses hold keys, so it never shows one of those. Used by `frontend.tracing`,
`frontend.otlp_metrics_settings` and `frontend.telemetry_resources`. Source: OpenTelemetry specification 1.x, "Environment
Variable Specification" and "OTLP Exporter Configuration"; where it leaves a choice, Python's SDK 1.45 decides.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from frontend.otlp_transport import Collector, Compression, OtlpProtocol
from frontend.span_encoding import SpanLimits
from frontend.span_export import DEFAULT_BATCH_SIZE, DEFAULT_CAPACITY, DEFAULT_DELAY_S, QueueSettings

HTTP_PORT = 4318
DEFAULT_BASE = {OtlpProtocol.GRPC: "http://localhost:4317", OtlpProtocol.HTTP: "http://localhost:4318"}
DEFAULT_TIMEOUT_S = 10.0
LONGEST_TIMEOUT_S = 600.0  # more is a number of milliseconds, which other languages' SDKs read here
LONGEST_MS = 3_600_000
DEFAULT_EXPORT_TIMEOUT_MS = 30_000
SMALLEST_QUEUE = 64  # a tenth is kept for stages, and a round has up to three spans
GENERAL_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_UNSUPPORTED = (
    "OTEL_CONFIG_FILE",
    "OTEL_EXPERIMENTAL_CONFIG_FILE",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_METRICS_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_METRICS_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES",
)
_OURS = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding", "host", "user-agent"})
_HEADER_NAME = re.compile(r"[a-z0-9_.!#$%&'*+^`|~-]+")
_GRPC_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")

Environment = Mapping[str, str]
Choice = TypeVar("Choice", bound=StrEnum)

logger = logging.getLogger(__name__)


class Signal(StrEnum):
    """What is exported; its name is in its option, its path and its variables."""

    TRACES = "traces"
    METRICS = "metrics"

    @property
    def option(self) -> str:
        return f"--otlp-{self}-endpoint"

    @property
    def path(self) -> str:
        return f"/v1/{self}"

    def variable(self, part: str) -> str:
        return f"OTEL_EXPORTER_OTLP_{self.upper()}_{part}"


class _Exporter(StrEnum):
    OTLP = "otlp"
    NONE = "none"


def asks_for_traces(option: str | None, environment: Environment) -> bool:
    """Whether spans are to be exported: an endpoint is set or OTEL_TRACES_EXPORTER=otlp, and nothing switches it off."""
    return _asks_for(Signal.TRACES, option, environment, (Signal.TRACES.variable("ENDPOINT"), GENERAL_ENDPOINT))


def asks_for_metrics(option: str | None, environment: Environment) -> bool:
    """The same of metrics, except that the general endpoint does not ask for them: who scrapes would have them twice."""
    return _asks_for(Signal.METRICS, option, environment, (Signal.METRICS.variable("ENDPOINT"),))


def refuse_unsupported(environment: Environment) -> None:
    """Raise ValueError for a standard variable that would change what is exported and that nothing here reads."""
    for name in _UNSUPPORTED:
        if value_of(environment, name):
            raise ValueError(f"{name} is not supported: drafthouse reads OpenTelemetry's variables without its SDK")


def collector_from(option: str | None, environment: Environment, signal: Signal = Signal.TRACES) -> Collector:
    """Where a signal goes. `option` is its --otlp-*-endpoint: read like its endpoint variable, and before it."""
    name, address, is_base = _endpoint(signal, option, environment)
    parts = _split(name, address)
    protocol = _protocol(signal, environment, parts)
    if not address:
        parts = _split(name, DEFAULT_BASE[protocol])
    if protocol is OtlpProtocol.HTTP:
        target, is_secure = _http_target(name, parts, signal.path if is_base else ""), parts.scheme == "https"
    else:
        target, is_secure = _grpc_target(name, parts, signal, environment)
    certificate, client_key, client_certificate = _files(signal, environment, protocol, is_secure=is_secure)
    return Collector(
        protocol,
        target,
        is_secure,
        headers=_headers(signal, environment, protocol),
        timeout_s=_timeout_s(signal, environment),
        compression=_compression(signal, environment, protocol),
        certificate=certificate,
        client_key=client_key,
        client_certificate=client_certificate,
    )


def queue_settings_from(environment: Environment, timeout_s: float) -> QueueSettings:
    """The OTEL_BSP_* variables; `timeout_s` is the exporter's own, and the shorter one holds for a request."""
    capacity = _whole(environment, "OTEL_BSP_MAX_QUEUE_SIZE", SMALLEST_QUEUE, 1 << 24) or DEFAULT_CAPACITY
    batch_size = _whole(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 1, 1 << 24)
    if batch_size is not None and batch_size > capacity:
        raise ValueError(f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={batch_size} exceeds the queue of {capacity} spans")
    delay_ms = milliseconds_of(environment, "OTEL_BSP_SCHEDULE_DELAY")
    export_timeout_ms = milliseconds_of(environment, "OTEL_BSP_EXPORT_TIMEOUT") or DEFAULT_EXPORT_TIMEOUT_MS
    return QueueSettings(
        capacity=capacity,
        batch_size=min(DEFAULT_BATCH_SIZE, capacity) if batch_size is None else batch_size,
        delay_s=DEFAULT_DELAY_S if delay_ms is None else delay_ms / 1e3,
        timeout_s=min(timeout_s, export_timeout_ms / 1e3),
    )


def span_limits_from(environment: Environment) -> SpanLimits:
    """The attribute and event limits; the variable for spans wins over the general one. Links there are none."""
    defaults = SpanLimits()

    def limit(*names: str) -> int | None:
        found = (_whole(environment, name, 0) for name in names)
        return next((value for value in found if value is not None), None)

    attributes = limit("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    event_attributes = limit("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    events = limit("OTEL_SPAN_EVENT_COUNT_LIMIT")
    return SpanLimits(
        defaults.attributes if attributes is None else attributes,
        defaults.event_attributes if event_attributes is None else event_attributes,
        defaults.events if events is None else events,
        limit("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    )


def resource_attributes_from(environment: Environment) -> dict[str, str]:
    """OTEL_RESOURCE_ATTRIBUTES, with OTEL_SERVICE_NAME over its service.name."""
    found = {}
    for entry in filter(None, map(str.strip, value_of(environment, "OTEL_RESOURCE_ATTRIBUTES").split(","))):
        name, is_pair, value = entry.partition("=")
        if not is_pair or not name.strip():
            raise ValueError(f"OTEL_RESOURCE_ATTRIBUTES must be name=value,name=value, got {entry!r}")
        found[name.strip()] = unquote(value.strip())
    if service_name := value_of(environment, "OTEL_SERVICE_NAME"):
        found["service.name"] = service_name
    return found


# ---- the collector ----


def _asks_for(signal: Signal, option: str | None, environment: Environment, endpoints: Sequence[str]) -> bool:
    exporter = choice_of(environment, f"OTEL_{signal.upper()}_EXPORTER", list(_Exporter))
    if flag_of(environment, "OTEL_SDK_DISABLED") or exporter is _Exporter.NONE:
        if option:
            logger.warning("%s are off: the environment says so, %s has no effect", signal.value, signal.option)
        return False
    return bool(option or exporter is _Exporter.OTLP or any(value_of(environment, name) for name in endpoints))


def _endpoint(signal: Signal, option: str | None, environment: Environment) -> tuple[str, str, bool]:
    """The name it has, the address ("" for the default), and whether it is a base to which a signal's path is added."""
    if option:
        return signal.option, option.strip(), False
    name, address = _otlp(signal, environment, "ENDPOINT")
    return name, address, name == GENERAL_ENDPOINT


def _split(name: str, address: str) -> SplitResult:
    """The parts of a URL, or of host:port without a scheme."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        _ = parts.port  # raises when it is none
    except ValueError:
        raise ValueError(f"{name} is no valid address") from None
    if address and (not parts.hostname or parts.scheme not in ("", "http", "https")):
        raise ValueError(f"{name} must be an http:// or https:// URL, or host:port for grpc")
    return parts


def _protocol(signal: Signal, environment: Environment, parts: SplitResult) -> OtlpProtocol:
    """What is asked for; else what the address is known for; else gRPC, which is the default of Python's SDK."""
    name, _ = _otlp(signal, environment, "PROTOCOL")
    is_http = parts.port == HTTP_PORT or parts.path.rstrip("/").endswith(signal.path)
    likely = OtlpProtocol.HTTP if is_http else OtlpProtocol.GRPC
    return choice_of(environment, name, list(OtlpProtocol)) or likely


def _http_target(name: str, parts: SplitResult, path: str) -> str:
    if not parts.scheme:
        raise ValueError(f"{name} must begin with http:// or https:// for http/protobuf")
    return parts.geturl().removesuffix("/") + path if path else parts.geturl()


def _grpc_target(name: str, parts: SplitResult, signal: Signal, environment: Environment) -> tuple[str, bool]:
    """host:port, and whether over TLS: the scheme says so, and without one OTEL_EXPORTER_OTLP_INSECURE."""
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{name} has a path, which gRPC does not: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")
    if "@" in parts.netloc:
        raise ValueError(f"{name} has a user or password, which gRPC does not: use OTEL_EXPORTER_OTLP_HEADERS")
    insecure_name, _ = _otlp(signal, environment, "INSECURE")
    is_insecure = flag_of(environment, insecure_name)
    return parts.netloc, parts.scheme == "https" if parts.scheme else not is_insecure


def _headers(signal: Signal, environment: Environment, protocol: OtlpProtocol) -> tuple[tuple[str, str], ...]:
    """`name=value,name=value`, URL-encoded (W3C baggage)."""
    name, value = _otlp(signal, environment, "HEADERS")
    found = {}
    allowed = _GRPC_HEADER_NAME if protocol is OtlpProtocol.GRPC else _HEADER_NAME
    for number, entry in enumerate(value.split(","), 1):
        if not entry.strip():
            continue
        key, is_pair, content = entry.partition("=")
        key, content = unquote(key).strip().lower(), unquote(content).strip()
        if not is_pair or not allowed.fullmatch(key) or not _HEADER_VALUE.fullmatch(content):
            raise ValueError(f"{name}: entry {number} is no name=value with URL-encoded printable ASCII")
        if key in _OURS or (protocol is OtlpProtocol.GRPC and (key.startswith("grpc-") or key.endswith("-bin"))):
            raise ValueError(f"{name}: entry {number} sets {key}, which cannot be set")
        found[key] = content
    return tuple(found.items())


def _timeout_s(signal: Signal, environment: Environment) -> float:
    """In seconds, as Python's SDK reads it."""
    name, value = _otlp(signal, environment, "TIMEOUT")
    if not value:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0 and up to {LONGEST_TIMEOUT_S:g}")
    return timeout_s


def _compression(signal: Signal, environment: Environment, protocol: OtlpProtocol) -> Compression:
    name, _ = _otlp(signal, environment, "COMPRESSION")
    allowed = [each for each in Compression if protocol is OtlpProtocol.HTTP or each is not Compression.DEFLATE]
    return choice_of(environment, name, allowed, f" for {protocol.value}") or Compression.NONE


def _files(
    signal: Signal, environment: Environment, protocol: OtlpProtocol, *, is_secure: bool
) -> tuple[str | None, str | None, str | None]:
    """The PEM files of TLS: CA, client's key, client's certificate. One that cannot be read would fail every export."""
    found: list[str | None] = []
    for part in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        name, path = _otlp(signal, environment, part)
        if path and is_secure:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"{name}: cannot read {path}: {error.strerror}") from None
        found.append(path or None)
    certificate, client_key, client_certificate = found
    if client_key and not client_certificate:
        raise ValueError("OTEL_EXPORTER_OTLP_CLIENT_KEY needs OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE")
    if client_certificate and not client_key and protocol is OtlpProtocol.GRPC:
        raise ValueError("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE needs OTEL_EXPORTER_OTLP_CLIENT_KEY")
    return certificate, client_key, client_certificate


def _otlp(signal: Signal, environment: Environment, part: str) -> tuple[str, str]:
    """The name and value of a signal's own form of an exporter variable, or of its general form when that is not set."""
    name = signal.variable(part)
    value = value_of(environment, name)
    if value:
        return name, value
    name = f"OTEL_EXPORTER_OTLP_{part}"
    return name, value_of(environment, name)


# ---- values ----


def value_of(environment: Environment, name: str) -> str:
    """An empty variable is an unset one, says the specification."""
    return environment.get(name, "").strip()


def flag_of(environment: Environment, name: str) -> bool:
    value = value_of(environment, name).lower()
    if value not in ("", "true", "false"):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value == "true"


def choice_of(environment: Environment, name: str, allowed: Sequence[Choice], where: str = "") -> Choice | None:
    """What a variable names, in any case; None when it is not set. Raises ValueError saying what is `allowed`."""
    value = value_of(environment, name)
    for member in allowed:
        if member.value == value.lower():
            return member
    if value:
        raise ValueError(f"{name}={value!r} is not supported{where}: {' or '.join(allowed)}")
    return None


def milliseconds_of(environment: Environment, name: str) -> int | None:
    return _whole(environment, name, 1, LONGEST_MS)


def _whole(environment: Environment, name: str, least: int, most: int = 1 << 31) -> int | None:
    value = value_of(environment, name)
    if not value:
        return None
    if not value.isascii() or not value.isdecimal() or not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}")
    return int(value)
