"""Collectors that misbehave on purpose, over HTTP and gRPC: each attempt meets the next behaviour, the last one stays.

`with http_receiver(answer(503), answer()) as receiver:` refuses once and then takes everything. What was taken is decoded
by opentelemetry-proto, so a request that arrives broken fails the test and not the receiver.
"""

import gzip
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from frontend.otlp_transport import TRACE_SERVICE

WAIT_S = 30.0


@dataclass(frozen=True)
class Behaviour:
    """One attempt's fate. Taken when the status is 200 or OK and nothing else happens to it."""

    status: int | grpc.StatusCode | None = None
    headers: tuple[tuple[str, str], ...] = ()
    retry_info_s: float | None = None  # gRPC: in the standard status details
    rejected: int = 0  # partial success
    body: bytes | None = None  # instead of a proper reply, HTTP
    hangs: bool = False  # until the receiver ends
    trickles: bool = False  # takes the request and answers a byte now and then, HTTP
    dies: bool = False  # reads a part of the request and resets the connection, HTTP


def answer(status: int | grpc.StatusCode | None = None, *headers: tuple[str, str], **changes: object) -> Behaviour:
    return Behaviour(status, headers, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files. The certificate is its own CA, and serves both ends: a receiver with TLS asks clients for it."""

    certificate: str
    key: str


@dataclass
class Receiver:
    address: str  # host:port
    behaviours: list[Behaviour]
    attempts: int = 0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)  # those taken
    request_headers: list[dict[str, str]] = field(default_factory=list)  # of every attempt
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: threading.Event = field(default_factory=threading.Event)

    def next_behaviour(self, headers: dict[str, str]) -> Behaviour:
        with self.changed:
            behaviour = self.behaviours[min(self.attempts, len(self.behaviours) - 1)]
            self.attempts += 1
            self.request_headers.append({name.lower(): value for name, value in headers.items()})
            self.changed.notify_all()
        return behaviour

    def take(self, body: bytes) -> None:
        with self.changed:
            self.requests.append(ExportTraceServiceRequest.FromString(body))
            self.changed.notify_all()

    def spans(self) -> list[Span]:
        with self.changed:
            groups = [group for request in self.requests for group in request.resource_spans]
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]

    def wait_for(self, condition: Callable[["Receiver"], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), WAIT_S), f"after {self.attempts} attempts"


@contextmanager
def http_receiver(*behaviours: Behaviour, port: int = 0, tls: Tls | None = None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            behaviour = receiver.next_behaviour(dict(self.headers.items()))
            length = int(self.headers["content-length"])
            if behaviour.dies:
                self.rfile.read(min(10, length))
                self._reset()
                return
            body = self.rfile.read(length)
            if behaviour.hangs:
                receiver.over.wait()
                self.close_connection = True
                return
            status = behaviour.status or 200
            if not self.path.endswith("/v1/traces"):  # a client that takes us for a proxy sends the whole URL
                status = 404
            if status == 200:
                receiver.take(_expanded(body, self.headers.get("content-encoding")))
            self._reply(int(status), behaviour)

        def _reply(self, status: int, behaviour: Behaviour) -> None:
            if behaviour.trickles:
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
                while not receiver.over.wait(0.02):
                    self.wfile.write(b"x")
                return
            content = _response(behaviour.rejected) if behaviour.body is None else behaviour.body
            self.send_response(status)
            for name, value in behaviour.headers:
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True

        def finish(self) -> None:
            if self.connection.fileno() != -1:
                super().finish()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that gives up on a hanging receiver is part of the plan

    server = Server(("127.0.0.1", port), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(f"127.0.0.1:{server.server_port}", list(behaviours) or [answer()])
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver(*behaviours: Behaviour, port: int = 0, tls: Tls | None = None) -> Iterator[Receiver]:
    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        behaviour = receiver.next_behaviour({name: str(value) for name, value in context.invocation_metadata()})
        if behaviour.hangs:
            receiver.over.wait()
        if isinstance(behaviour.status, grpc.StatusCode):
            if behaviour.retry_info_s is not None:
                details = ("grpc-status-details-bin", _retry_details(behaviour.status, behaviour.retry_info_s))
                context.set_trailing_metadata((details,))
            context.abort(behaviour.status, "as planned")
        receiver.take(body)
        return _response(behaviour.rejected)

    service, method = TRACE_SERVICE.strip("/").split("/")
    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    if tls is None:
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
        credentials = grpc.ssl_server_credentials((pair,), pair[1], require_client_auth=True)
        bound = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    receiver = Receiver(f"127.0.0.1:{bound}", list(behaviours) or [answer()])
    server.start()
    try:
        yield receiver
    finally:
        receiver.over.set()
        server.stop(0).wait()


@contextmanager
def refusing_port() -> Iterator[str]:
    """host:port where connections are refused: bound, so that nobody else takes it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def _response(rejected: int) -> bytes:
    if not rejected:
        return b""
    partial = ExportTracePartialSuccess(rejected_spans=rejected, error_message="too old: key=secret")
    return ExportTraceServiceResponse(partial_success=partial).SerializeToString()


def _expanded(body: bytes, encoding: str | None) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


def _retry_details(code: grpc.StatusCode, delay_s: float) -> bytes:
    detail = AnyMessage()
    whole = int(delay_s)
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=whole, nanos=int((delay_s - whole) * 1e9))))
    return Status(code=code.value[0], details=[detail]).SerializeToString()
