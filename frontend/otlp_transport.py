"""One attempt to hand an encoded trace request to a collector, over HTTP or gRPC.

Owns the two connections, what leaves on them, and what an answer means: taken, taken in part, worth another attempt, or
refused. Never retries, waits, counts or logs (`frontend.otlp_delivery` does), and never lets anything of an answer but its
status into a `detail`: a collector may repeat our headers. requests and grpc are loaded when a transport is built.
"""

import email.utils
import gzip
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

TRACE_SERVICE = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
MAX_REPLY_BYTES = 1 << 16
GZIP_LEVEL = 1  # half of a span is random ids: higher levels gain nothing but time
RECONNECT_BACKOFF_MS = (500, 5_000)  # first and longest; gRPC's own go up to two minutes
_REASON_LENGTH = 200


class OtlpProtocol(StrEnum):
    GRPC = "grpc"
    HTTP = "http/protobuf"


class Compression(StrEnum):
    NONE = "none"
    GZIP = "gzip"
    DEFLATE = "deflate"  # HTTP only


class FailureReason(IntEnum):
    """Label values of drafthouse:span_export_failures_total, by name in lower case. One per failed attempt."""

    UNAVAILABLE = 0  # nobody answers, the connection broke, or the collector says that it is not there
    TIMEOUT = 1
    THROTTLED = 2
    REFUSED = 3  # any other answer: another attempt would end the same
    INTERNAL = 4  # ours: a record that cannot be spelled, or an error nobody foresaw


@dataclass(frozen=True)
class Collector:
    """Where requests go, and how."""

    protocol: OtlpProtocol
    address: str = field(repr=False)  # HTTP: the whole URL, which may hold a password; gRPC: host:port
    is_secure: bool  # TLS; for HTTP the URL says the same
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # lower-case names; may hold keys
    timeout_s: float = 10.0
    compression: Compression = Compression.NONE
    certificate: str | None = None  # paths of PEM files
    client_key: str | None = None
    client_certificate: str | None = None

    @property
    def shown(self) -> str:
        """For logs: without user, password and query, where credentials hide."""
        if self.protocol is OtlpProtocol.GRPC:
            return f"grpc{'s' if self.is_secure else ''}://{self.address}"
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True)
class Reply:
    """What became of one attempt."""

    failure: FailureReason | None = None  # None: the collector took the request
    detail: str = ""
    rejected: int = 0  # spans of a request taken in part that the collector did not keep
    is_retryable: bool = False
    retry_after_s: float | None = None  # what the collector asked for


class Transport(Protocol):
    def send(self, body: bytes, timeout_s: float) -> Reply:
        """One attempt, over after `timeout_s`. Called by one thread; what it raises is a bug."""

    def close(self) -> None:
        """Give up connections. May be called while another thread sends."""


def connect(collector: Collector, version: str) -> Transport:
    """The transport for a collector; connects with the first request. Raises OSError for files that cannot be read."""
    user_agent = f"drafthouse/{version}"
    if collector.protocol is OtlpProtocol.HTTP:
        return HttpTransport(collector, user_agent)
    return GrpcTransport(collector, user_agent)


class HttpTransport:
    """OTLP over HTTP/1.1 with a kept connection. Source: OTLP specification 1.x, section OTLP/HTTP."""

    _THROTTLED = 429
    _RETRYABLE = frozenset({429, 502, 503, 504})

    def __init__(self, collector: Collector, user_agent: str) -> None:
        import requests

        self._errors = requests.exceptions
        self._url = collector.address
        self._compression = collector.compression
        self._session = requests.Session()
        self._session.headers.clear()
        self._session.headers.update({"user-agent": user_agent, **dict(collector.headers)})
        self._session.headers["content-type"] = "application/x-protobuf"
        if collector.compression is not Compression.NONE:
            self._session.headers["content-encoding"] = collector.compression.value
        # Proxies and CA bundles of the environment are looked up once: per request they were a third of its cost.
        found = self._session.merge_environment_settings(self._url, {}, None, collector.certificate or True, None)
        self._session.trust_env = False
        self._session.proxies = found["proxies"]
        self._verify = found["verify"]
        self._certificate: str | tuple[str, str] | None = collector.client_certificate
        if collector.client_certificate and collector.client_key:
            self._certificate = (collector.client_certificate, collector.client_key)

    def send(self, body: bytes, timeout_s: float) -> Reply:
        deadline_s = time.monotonic() + timeout_s
        try:
            with self._session.post(
                self._url,
                data=self._compressed(body),
                timeout=timeout_s,
                verify=self._verify,
                cert=self._certificate,
                allow_redirects=False,  # a redirected POST becomes a GET, and its 200 a lie
                stream=True,
            ) as response:
                return self._reply(response, deadline_s)
        except self._errors.Timeout as error:
            return Reply(FailureReason.TIMEOUT, type(error).__name__, is_retryable=True)
        except (self._errors.ConnectionError, self._errors.ChunkedEncodingError) as error:
            return Reply(FailureReason.UNAVAILABLE, type(error).__name__, is_retryable=True)
        except self._errors.RequestException as error:
            return Reply(FailureReason.REFUSED, type(error).__name__)

    def close(self) -> None:
        self._session.close()

    def _compressed(self, body: bytes) -> bytes:
        if self._compression is Compression.GZIP:
            return gzip.compress(body, GZIP_LEVEL)
        return zlib.compress(body, GZIP_LEVEL) if self._compression is Compression.DEFLATE else body

    def _reply(self, response: Any, deadline_s: float) -> Reply:
        status = response.status_code
        if 200 <= status < 300:
            content = bytearray()
            for byte in response.iter_content(1):  # an answer has few; one that trickles in must not outlast us
                content += byte
                if len(content) > MAX_REPLY_BYTES or time.monotonic() > deadline_s:
                    return Reply(FailureReason.TIMEOUT, f"HTTP {status} without an end", is_retryable=True)
            return _taken(bytes(content))
        return Reply(
            FailureReason.THROTTLED if status == self._THROTTLED else _http_failure(status),
            f"HTTP {status}",
            is_retryable=status in self._RETRYABLE,
            retry_after_s=retry_after_s(response.headers.get("retry-after"), datetime.now(UTC)),
        )


class GrpcTransport:
    """OTLP over one gRPC channel, bytes in and bytes out. Source: OTLP specification 1.x, section OTLP/gRPC."""

    _RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
    _THROTTLED = "RESOURCE_EXHAUSTED"  # retryable only when the collector says when

    def __init__(self, collector: Collector, user_agent: str) -> None:
        import grpc

        options = [
            ("grpc.primary_user_agent", user_agent),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[0]),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[1]),
            ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ]
        compression = grpc.Compression.Gzip if collector.compression is Compression.GZIP else None
        if collector.is_secure:
            credentials = grpc.ssl_channel_credentials(
                root_certificates=_contents(collector.certificate),
                private_key=_contents(collector.client_key),
                certificate_chain=_contents(collector.client_certificate),
            )
            self._channel = grpc.secure_channel(collector.address, credentials, options, compression)
        else:
            self._channel = grpc.insecure_channel(collector.address, options, compression)
        self._error = grpc.RpcError
        self._headers = collector.headers
        self._export = self._channel.unary_unary(TRACE_SERVICE)  # without serialisers: bytes as they are

    def send(self, body: bytes, timeout_s: float) -> Reply:
        try:
            return _taken(self._export(body, timeout=timeout_s, metadata=self._headers))
        except self._error as error:
            return self._failed(error)

    def close(self) -> None:
        self._channel.close()

    def _failed(self, error: Any) -> Reply:
        code = error.code().name
        retry_after = _retry_info_s(error.trailing_metadata() or ())
        detail = f"gRPC {code}"
        said = error.details() or ""
        if code == "UNAVAILABLE" and said.startswith("failed to connect"):  # this side's words: address and TLS errors
            detail += f": {said[:_REASON_LENGTH]}"
        if code == self._THROTTLED:
            return Reply(FailureReason.THROTTLED, detail, 0, retry_after is not None, retry_after)
        if code == "DEADLINE_EXCEEDED":
            return Reply(FailureReason.TIMEOUT, detail, 0, True, retry_after)
        is_retryable = code in self._RETRYABLE
        reason = FailureReason.UNAVAILABLE if is_retryable else FailureReason.REFUSED
        return Reply(reason, detail, 0, is_retryable, retry_after)


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Seconds to wait by a Retry-After header, in either form of RFC 9110; None without one or for what is neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - now).total_seconds())


def _http_failure(status: int) -> FailureReason:
    return FailureReason.UNAVAILABLE if status in HttpTransport._RETRYABLE else FailureReason.REFUSED


def _taken(content: bytes) -> Reply:
    """The reply to a request that was taken, whole or in part. An answer that is no protobuf takes nothing back, and
    the collector's words for what it rejected stay out of our logs."""
    if not content:
        return Reply()
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except DecodeError:
        return Reply()
    return Reply(rejected=max(0, partial.rejected_spans))


def _retry_info_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """The delay of a google.rpc.RetryInfo, in the standard status details or in a trailer of its own."""
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    for name, value in metadata:
        info = RetryInfo()
        try:
            if name == "google.rpc.retryinfo-bin":
                info.ParseFromString(value)
            elif name == "grpc-status-details-bin":
                if not any(detail.Unpack(info) for detail in Status.FromString(value).details):
                    continue
            else:
                continue
        except DecodeError:
            continue
        seconds: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
        return max(0.0, seconds)
    return None


def _contents(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
