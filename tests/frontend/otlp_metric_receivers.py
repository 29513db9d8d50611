"""Collectors of metrics for tests: HTTP and gRPC on a free port, answering as told, remembering what they took."""

import gzip
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics

WAIT_S = 15.0


def plain(attributes: "list[KeyValue]") -> dict[str, object]:
    """OTLP attributes as a dictionary."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@dataclass
class MetricReceiver:
    """What a collector was sent. `answers` are used up one per request: an HTTP status or a gRPC code; then it takes all."""

    url: str = ""
    answers: deque[Any] = field(default_factory=deque)
    requests: list[metrics_service_pb2.ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    refused: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    hanging: threading.Event | None = None  # while set up and not set, requests wait for it

    def resources(self, service_name: str) -> list[ResourceMetrics]:
        """Of every request, in order, what was sent of one service."""
        return [
            resource
            for request in list(self.requests)
            for resource in request.resource_metrics
            if plain(resource.resource.attributes).get("service.name") == service_name
        ]

    def metrics(self, service_name: str) -> list[dict[str, Metric]]:
        """The same by name."""
        return [
            {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
            for resource in self.resources(service_name)
        ]

    def wait(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Until something that depends on what was sent is true."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"it did not come true; {len(self.requests)} requests"

    def take(self, body: bytes, headers: dict[str, str]) -> Any:
        """The answer to one request: None when it is taken."""
        if self.hanging is not None:
            self.hanging.wait(WAIT_S)
        with self.changed:
            answer = self.answers.popleft() if self.answers else None
            self.headers.append(headers)
            if answer is None:
                self.requests.append(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            else:
                self.refused += 1
            self.changed.notify_all()
        return answer


@contextmanager
def http_receiver() -> Iterator[MetricReceiver]:
    receiver = MetricReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer = receiver.take(body, {":path": self.path} | {k.lower(): v for k, v in self.headers.items()})
            self.send_response(answer or 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/v1/metrics"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver() -> Iterator[MetricReceiver]:
    receiver = MetricReceiver()

    class Service(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            answer = receiver.take(request.SerializeToString(), dict(context.invocation_metadata()))
            if answer is not None:
                context.abort(answer, "as told")
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Service(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
