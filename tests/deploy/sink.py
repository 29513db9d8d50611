"""The end of the collector's road in the compose test: takes OTLP over HTTP and counts spans by name.

Runs inside a container of the stack, so it imports only what the frontend image has. GET /counts answers
{"spans": {name: count}, "correct_drafts": sum over spec_verify spans}; spans are told apart by their ids, so that an export
that is sent twice counts once.
"""

import gzip
import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # type: ignore[import-untyped]
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PORT = 4318


class Sink:
    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: set[bytes] = set()
        self._spans: Counter[str] = Counter()
        self._correct_drafts = 0

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._count(span)

    def _count(self, span) -> None:
        if span.span_id in self._seen:
            return
        self._seen.add(span.span_id)
        self._spans[span.name] += 1
        if span.name == "spec_verify":
            attributes = {each.key: each.value.int_value for each in span.attributes}
            self._correct_drafts += attributes["num_correct_drafts"]

    def counts(self) -> bytes:
        with self._lock:
            return json.dumps({"spans": self._spans, "correct_drafts": self._correct_drafts}).encode()


def handler(sink: Sink) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            sink.take(body)
            self._answer(ExportTraceServiceResponse().SerializeToString(), "application/x-protobuf")

        def do_GET(self) -> None:
            self._answer(sink.counts(), "application/json")

        def _answer(self, body: bytes, content_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", PORT), handler(Sink())).serve_forever()
