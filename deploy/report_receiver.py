"""A small OTLP/HTTP receiver: takes the spans of one trace off a server that sends them here.

Owns the socket, the decoding of protobuf, and the spans of the one trace it was asked for; those of other requests are
answered, counted and forgotten, so a busy server cannot fill it. Never speaks gRPC. Used by deploy.report.
"""

import asyncio
import base64
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from deploy.report_numbers import is_complete
from deploy.report_spans import MalformedTrace, Span, find_requests, read_lines

MAX_BODY_BYTES = 64 * 1024 * 1024  # after decompression; a batch of 512 spans has about 150 kB
MAX_SPANS = 200_000  # of the one trace; 8192 tokens in plain rounds at level 3 give some 16 000
QUIET_S = 2.0  # without a new span for so long, a request whose rounds cannot be counted is taken for whole
_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


class Receiver:
    """Listens while the `async with` block runs. Keeps only spans of `trace_id` (lower-case hex)."""

    def __init__(self, host: str, port: int, trace_id: str) -> None:
        self._host, self._port = host, port
        self.trace_id = trace_id
        self._arrived = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._spans: dict[str, Span] = {}  # by span id: an exporter that retries sends some twice
        self.lines: list[bytes] = []  # OTLP JSON, one export each
        self.num_foreign_spans = 0

    async def __aenter__(self) -> "Receiver":
        """Raises OSError when the address cannot be listened on."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/v1/traces", self._export)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"cannot listen on {self._host}:{self._port}: {reason}") from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        """The base URL, with the port that was taken."""
        assert self._runner is not None, "not listening"
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def wait(self, timeout_s: float, quiet_s: float = QUIET_S) -> list[Span]:
        """The trace's spans: at once when a request and all its rounds are here, else after `quiet_s` without a new
        one behind the request's own span, at the latest after `timeout_s`. Empty when none came."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while True:
            requests = find_requests(list(self._spans.values()))
            left_s = end_s - loop.time()
            has_ended = any(request.has_own_span for request in requests)
            if left_s <= 0 or (has_ended and all(is_complete(request) for request in requests)):
                return list(self._spans.values())
            self._arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, quiet_s) if has_ended else left_s):
                    await self._arrived.wait()
            except TimeoutError:
                return list(self._spans.values())

    async def _export(self, request: web.Request) -> web.Response:
        kind = request.content_type
        if kind not in (_PROTOBUF, _JSON):
            raise web.HTTPUnsupportedMediaType(text=f"send {_PROTOBUF} or {_JSON}, not {kind}")
        body = await request.read()  # decompressed; aiohttp answers 413 beyond client_max_size
        try:
            content = from_protobuf(body) if kind == _PROTOBUF else _from_json(body)
            self._keep(content)
        except MalformedTrace as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return web.Response(body=b"" if kind == _PROTOBUF else b"{}", content_type=kind)

    def _keep(self, content: dict[str, Any]) -> None:
        own, num_foreign = only_trace(content, self.trace_id)
        self.num_foreign_spans += num_foreign
        if own is None:
            return
        line = msgspec.json.encode(own)
        spans = read_lines([line], "the export")
        if len(self._spans) + len(spans) > MAX_SPANS:
            raise MalformedTrace(f"a report takes {MAX_SPANS} spans of one trace, no more")
        self._spans |= {span.span_id: span for span in spans}
        self.lines.append(line)
        self._arrived.set()


def from_protobuf(body: bytes) -> dict[str, Any]:
    """A binary ExportTraceServiceRequest as OTLP JSON. Raises `MalformedTrace`."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        message = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise MalformedTrace("the export is not a protobuf ExportTraceServiceRequest") from error
    content: dict[str, Any] = MessageToDict(message, use_integers_for_enums=True)
    for span in _spans(content):
        for name in _ID_FIELDS:
            if name in span:  # proto3 JSON writes bytes in base64; OTLP JSON wants these in hex
                span[name] = base64.b64decode(span[name]).hex()
    return content


def read_dump(content: bytes, source: str) -> list[bytes]:
    """OTLP JSON lines of a binary file: one request as it was sent, or a collector's proto format, where a 4-byte
    big-endian length stands before each. Raises `MalformedTrace`."""
    requests = [content] if content.startswith(b"\n") else list(_framed(content, source))
    lines = []
    for number, request in enumerate(requests, 1):
        try:
            lines.append(msgspec.json.encode(from_protobuf(request)))
        except MalformedTrace as error:
            raise MalformedTrace(
                f"{source} is neither OTLP JSON lines nor protobuf exports (export {number} cannot be decoded)"
            ) from error
    return lines


def only_trace(content: Mapping[str, Any], trace_id: str) -> tuple[dict[str, Any] | None, int]:
    """The part of an export that belongs to one trace (None for nothing), and how many spans did not."""
    kept_resources = []
    num_foreign = 0
    for entry in _dicts(content, "resourceSpans"):
        kept_scopes = []
        for scope in _dicts(entry, "scopeSpans"):
            spans = list(_dicts(scope, "spans"))
            own = [span for span in spans if str(span.get("traceId", "")).lower() == trace_id]
            num_foreign += len(spans) - len(own)
            if own:
                kept_scopes.append({**scope, "spans": own})
        if kept_scopes:
            kept_resources.append({**entry, "scopeSpans": kept_scopes})
    return ({**content, "resourceSpans": kept_resources} if kept_resources else None), num_foreign


def _framed(content: bytes, source: str) -> Iterable[bytes]:
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        at += 4
        if length > len(content) - at:
            raise MalformedTrace(f"{source} is neither OTLP JSON lines nor protobuf exports, or it was cut short")
        yield content[at : at + length]
        at += length


def _from_json(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedTrace("the export is not a JSON object") from error


def _spans(content: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for entry in _dicts(content, "resourceSpans"):
        for scope in _dicts(entry, "scopeSpans"):
            yield from _dicts(scope, "spans")


def _dicts(parent: Mapping[str, Any], name: str) -> Iterable[dict[str, Any]]:
    """The objects of a list that a sender may have got wrong."""
    values = parent.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise MalformedTrace(f"{name} must be a list of objects")
    return values
