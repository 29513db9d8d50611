"""A server that traces, and the collector it sends to: what a test over HTTP needs to see the spans of its own requests.

`with traced_server(*SIM) as traced:` gives both. Spans are read from the bytes of the export, by `tests.traced`. Never knows
what a case expects.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests

from tests import traced
from tests.cases.client import COMPLETIONS, Client, total
from tests.cases.laws import Increments, engine_scope, increments
from tests.e2e.servers import Server, serve
from tests.frontend.otlp_receivers import Receiver, grpc_receiver, http_receiver
from tests.traced import FRONTEND, TABLE, Span, named

HTTP, GRPC = "http/protobuf", "grpc"
SOON_MS = 50  # a span waits so long for others: tests wait for spans
WAIT_S = 20.0
WIDTH = 5  # draft tokens per round of the servers here


@dataclass(frozen=True)
class Parent:
    """A caller's span, of a trace that nobody else has."""

    flags: str = "01"
    trace_id: str = field(default_factory=lambda: os.urandom(16).hex())
    span_id: str = field(default_factory=lambda: os.urandom(8).hex())

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": self.header}

    @property
    def lines(self) -> str:
        """For requests written by hand."""
        return f"traceparent: {self.header}\r\n"


class TracedServer:
    """A running server and what its collector has received."""

    def __init__(self, server: Server, receiver: Receiver) -> None:
        self.server = server
        self.client = Client(server.base_url)
        self.receiver = receiver
        self._spans: list[Span] = []
        self._num_read = 0

    def spans(self) -> list[Span]:
        """All that arrived so far."""
        for request in self.receiver.requests[self._num_read :]:
            self._spans += traced.read(request.SerializeToString())
            self._num_read += 1
        return list(self._spans)

    def exported(self) -> bytes:
        """All that arrived so far, as it lies in the requests."""
        return b"".join(request.SerializeToString() for request in self.receiver.requests)

    def settled(self) -> list[Span]:
        """All spans, once the server's queue is empty."""
        self._wait(lambda: total(self.client.metrics(), "drafthouse:span_queue_size") == 0, "an empty queue")
        return self.spans()

    def trace(self, trace_id: str, *also: str) -> list[Span]:
        """The spans of one request, once its SERVER span has arrived, `also` spans of these names, and nothing waits."""

        def has_arrived() -> bool:
            spans = self.arrived(trace_id)
            return bool(roots(spans)) and all(named(spans, name) for name in also)

        self._wait(has_arrived, f"a SERVER span and {also} in trace {trace_id}")
        self.settled()
        return self.arrived(trace_id)

    def arrived(self, trace_id: str) -> list[Span]:
        """Those spans of one trace that have arrived."""
        return [span for span in self.spans() if span.trace_id == trace_id]

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}\n{self.server.log()[-2000:]}"
            time.sleep(0.02)


@contextmanager
def traced_server(*arguments: str, protocol: str = HTTP, **environment: str) -> Iterator[TracedServer]:
    """A server whose spans go to a collector that takes all of them."""
    receiving = http_receiver if protocol == HTTP else grpc_receiver
    with receiving() as receiver:
        environment = exporting_to(receiver.address, protocol, **environment)
        with serve(*arguments, **environment) as server:
            yield TracedServer(server, receiver)


def exporting_to(address: str, protocol: str = HTTP, **environment: str) -> dict[str, str]:
    """The environment of a server that exports to `address` (host:port)."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": str(SOON_MS),
        **environment,
    }


def roots(spans: Sequence[Span]) -> list[Span]:
    """SERVER spans: those that are no stage."""
    return [span for span in spans if span.name not in TABLE]


def checked(spans: Sequence[Span], parent_id: str, level: int = 2) -> Span:
    """The SERVER span of one whole trace; every claim that holds for any request has been made of it."""
    [server] = roots(spans)
    assert server.parent_id == parent_id
    assert server.service == FRONTEND
    assert server.end_ns >= server.start_ns
    traced.check_trace([span for span in spans if span is not server], server.span_id, level)
    return server


# ---- requests of a simulated engine, and what became of them ----


@contextmanager
def counted(server: TracedServer) -> Iterator[list[Increments]]:
    """What the engine counts in the block comes into the list behind it."""
    found: list[Increments] = []
    before = engine_scope(server.client.metrics())
    yield found
    found.append(increments(before, engine_scope(server.client.metrics()), WIDTH))


def body_of(path: str, streamed: bool, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "stream": streamed, "max_tokens": 512, **fields}


def ask(server: TracedServer, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Parent:
    """A request that succeeds, read to its end."""
    parent = Parent()
    response = requests.post(server.server.base_url + path, json=body, headers=parent.headers | headers, timeout=30)
    assert response.status_code == 200, response.text
    assert b'"error"' not in response.content
    return parent


def errors(spans: Sequence[Span]) -> dict[str, str]:
    """Names of the spans in error, the SERVER span as "server", and what they say."""
    servers = roots(spans)
    return {"server" if span in servers else span.name: span.message for span in spans if span.is_error}
