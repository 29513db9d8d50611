"""OpenTelemetry's standard environment variables for traces, read into settings or refused by name.

Owns names, defaults and syntax. Reads the mapping it is given, never the process's environment, and opens files only to see
that they can be. What cannot be honoured is a ValueError whose sentence names the variable; headers and addresses hold
keys, so it never shows one of those. Used by `frontend.tracing`. Source: OpenTelemetry specification 1.x, "Environment Variable
Specification" and "OTLP Exporter Configuration"; where it leaves a choice, Python's SDK 1.45 decides.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from frontend.otlp_transport import Collector, Compression, OtlpProtocol
from frontend.span_encoding import SpanLimits
from frontend.span_export import DEFAULT_BATCH_SIZE, DEFAULT_CAPACITY, DEFAULT_DELAY_S, QueueSettings

TRACES_PATH = "/v1/traces"
HTTP_PORT = 4318
DEFAULT_ADDRESS = {OtlpProtocol.GRPC: "http://localhost:4317", OtlpProtocol.HTTP: "http://localhost:4318/v1/traces"}
DEFAULT_TIMEOUT_S = 10.0
LONGEST_TIMEOUT_S = 600.0  # more is a number of milliseconds, which other languages' SDKs read here
DEFAULT_EXPORT_TIMEOUT_MS = 30_000
SMALLEST_QUEUE = 64  # a tenth is kept for stages, and a round has up to three spans
_UNSUPPORTED = (
    "OTEL_CONFIG_FILE",
    "OTEL_EXPERIMENTAL_CONFIG_FILE",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER",
)
_OURS = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding", "host", "user-agent"})
_HEADER_NAME = re.compile(r"[a-z0-9_.!#$%&'*+^`|~-]+")
_GRPC_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")

Environment = Mapping[str, str]


def asks_for_traces(option: str | None, environment: Environment) -> bool:
    """Whether spans are to be exported: an endpoint is set or OTEL_TRACES_EXPORTER=otlp, and nothing switches it off."""
    exporter = _value(environment, "OTEL_TRACES_EXPORTER").lower()
    if exporter not in ("", "otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER={exporter!r} is not supported: otlp or none")
    if _flag(environment, "OTEL_SDK_DISABLED") or exporter == "none":
        return False
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(option or exporter == "otlp" or any(_value(environment, name) for name in names))


def refuse_unsupported(environment: Environment) -> None:
    """Raise ValueError for a standard variable that would change what is exported and that nothing here reads."""
    for name in _UNSUPPORTED:
        if _value(environment, name):
            raise ValueError(f"{name} is not supported: drafthouse exports spans without the OpenTelemetry SDK")


def collector_from(option: str | None, environment: Environment) -> Collector:
    """Where spans go. `option` is --otlp-traces-endpoint: read like OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, and before it."""
    name, address, is_base = _endpoint(option, environment)
    parts = _split(name, address)
    protocol = _protocol(environment, parts)
    if not address:
        address, is_base = DEFAULT_ADDRESS[protocol], False
        parts = _split(name, address)
    if protocol is OtlpProtocol.HTTP:
        target, is_secure = _http_target(name, parts, is_base=is_base), parts.scheme == "https"
    else:
        target, is_secure = _grpc_target(name, parts, environment)
    certificate, client_key, client_certificate = _files(environment, protocol, is_secure=is_secure)
    return Collector(
        protocol,
        target,
        is_secure,
        headers=_headers(environment, protocol),
        timeout_s=_timeout_s(environment),
        compression=_compression(environment, protocol),
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
    delay_ms = _whole(environment, "OTEL_BSP_SCHEDULE_DELAY", 1, 3_600_000)
    export_timeout_ms = _whole(environment, "OTEL_BSP_EXPORT_TIMEOUT", 1, 3_600_000) or DEFAULT_EXPORT_TIMEOUT_MS
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
    for entry in filter(None, map(str.strip, _value(environment, "OTEL_RESOURCE_ATTRIBUTES").split(","))):
        name, is_pair, value = entry.partition("=")
        if not is_pair or not name.strip():
            raise ValueError(f"OTEL_RESOURCE_ATTRIBUTES must be name=value,name=value, got {entry!r}")
        found[name.strip()] = unquote(value.strip())
    if service_name := _value(environment, "OTEL_SERVICE_NAME"):
        found["service.name"] = service_name
    return found


# ---- the collector ----


def _endpoint(option: str | None, environment: Environment) -> tuple[str, str, bool]:
    """The name it has, the address ("" for the default), and whether it is a base to which a signal's path is added."""
    if option:
        return "--otlp-traces-endpoint", option.strip(), False
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if address := _value(environment, name):
        return name, address, False
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    return name, _value(environment, name), True


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


def _protocol(environment: Environment, parts: SplitResult) -> OtlpProtocol:
    """What is asked for; else what the address is known for; else gRPC, which is the default of Python's SDK."""
    name, value = _otlp(environment, "PROTOCOL")
    if not value:
        is_http = parts.port == HTTP_PORT or parts.path.endswith(TRACES_PATH)
        return OtlpProtocol.HTTP if is_http else OtlpProtocol.GRPC
    try:
        return OtlpProtocol(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not supported: grpc or http/protobuf") from None


def _http_target(name: str, parts: SplitResult, *, is_base: bool) -> str:
    if not parts.scheme:
        raise ValueError(f"{name} must begin with http:// or https:// for http/protobuf")
    return parts.geturl().removesuffix("/") + TRACES_PATH if is_base else parts.geturl()


def _grpc_target(name: str, parts: SplitResult, environment: Environment) -> tuple[str, bool]:
    """host:port, and whether over TLS: the scheme says so, and without one OTEL_EXPORTER_OTLP_INSECURE."""
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{name} has a path, which gRPC does not: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")
    if "@" in parts.netloc:
        raise ValueError(f"{name} has a user or password, which gRPC does not: use OTEL_EXPORTER_OTLP_HEADERS")
    insecure_name, _ = _otlp(environment, "INSECURE")
    is_insecure = _flag(environment, insecure_name)
    return parts.netloc, parts.scheme == "https" if parts.scheme else not is_insecure


def _headers(environment: Environment, protocol: OtlpProtocol) -> tuple[tuple[str, str], ...]:
    name, value = _otlp(environment, "HEADERS")
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


def _timeout_s(environment: Environment) -> float:
    """In seconds, as Python's SDK reads it."""
    name, value = _otlp(environment, "TIMEOUT")
    if not value:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0 and up to {LONGEST_TIMEOUT_S:g}")
    return timeout_s


def _compression(environment: Environment, protocol: OtlpProtocol) -> Compression:
    name, value = _otlp(environment, "COMPRESSION")
    allowed = [each for each in Compression if protocol is OtlpProtocol.HTTP or each is not Compression.DEFLATE]
    for each in allowed:
        if value.lower() == each or (not value and each is Compression.NONE):
            return each
    raise ValueError(f"{name}={value!r} is not supported for {protocol.value}: {', '.join(allowed)}")


def _files(
    environment: Environment, protocol: OtlpProtocol, *, is_secure: bool
) -> tuple[str | None, str | None, str | None]:
    """The PEM files of TLS: CA, client's key, client's certificate. One that cannot be read would fail every export."""
    found: list[str | None] = []
    for part in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        name, path = _otlp(environment, part)
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


# ---- values ----


def _otlp(environment: Environment, part: str) -> tuple[str, str]:
    """The name and value of the traces form of an exporter variable, or of its general form when that is not set."""
    name = f"OTEL_EXPORTER_OTLP_TRACES_{part}"
    value = _value(environment, name)
    if value:
        return name, value
    name = f"OTEL_EXPORTER_OTLP_{part}"
    return name, _value(environment, name)


def _value(environment: Environment, name: str) -> str:
    """An empty variable is an unset one, says the specification."""
    return environment.get(name, "").strip()


def _flag(environment: Environment, name: str) -> bool:
    value = _value(environment, name).lower()
    if value not in ("", "true", "false"):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value == "true"


def _whole(environment: Environment, name: str, least: int, most: int = 1 << 31) -> int | None:
    value = _value(environment, name)
    if not value:
        return None
    if not value.isascii() or not value.isdecimal() or not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}")
    return int(value)
