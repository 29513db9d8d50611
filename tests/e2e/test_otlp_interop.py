"""Spans as receivers that nobody here wrote understand them: rotel, a real collector, and oteltap."""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import rotel
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import (
    OtelTapHttpProtobufReceiver,
    OtelTapHttpProtobufReceiverSettings,
    OtelTapInitializationError,
)

from frontend.config import FrontendConfig
from frontend.spans import (
    RoundParent,
    RoundRecord,
    SpanEvent,
    SpanKind,
    SpanRecord,
    Trace,
    TraceLevel,
)
from frontend.telemetry_resources import resources_from
from frontend.tracing import Tracing, settings_from
from protocol.messages import PhaseTimes, Round
from tests.frontend.otlp_receivers import Receiver, http_receiver

WAIT_S = 60.0
START_ATTEMPTS = 5
NUM_ROUNDS = 200
TRACE = Trace(bytes(range(1, 17)), "vendor=value")
START_NS = 1_700_000_000_000_000_000
SERVER_ID, DECODE_ID, CALLER_ID = b"server01", b"decode01", b"caller01"


@dataclass
class Collector:
    """A running rotel that forwards to `behind`."""

    grpc_address: str
    http_address: str
    behind: Receiver


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with http_receiver() as receiver:
        for _ in range(START_ATTEMPTS):  # somebody may take a port between our look and rotel's
            with _rotel(receiver) as running:
                if running is not None:
                    yield running
                    return
        pytest.fail("rotel did not start")


@contextmanager
def _rotel(receiver: Receiver) -> Iterator[Collector | None]:
    grpc_port, http_port = _free_ports(2)
    agent = Path(rotel.__file__).parent / "rotel-agent"
    with (
        tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory,
        Path(directory, "log").open("wb") as log,
    ):
        process = subprocess.Popen(
            [
                *(agent, "start", "--exporter", "otlp", "--traces-batch-timeout", "50ms"),
                *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}"),
                *("--otlp-exporter-endpoint", f"http://{receiver.address}", "--otlp-exporter-protocol", "http"),
                *("--pid-file", f"{directory}/pid", "--log-file", f"{directory}/agent.log"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            is_up = all(_listens(process, port) for port in (grpc_port, http_port))
            yield Collector(f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}", receiver) if is_up else None
        finally:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _listens(process: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def exporting(endpoint: str, **environment: str) -> Tracing:
    settings = settings_from(FrontendConfig(otlp_traces_endpoint=endpoint), environment)
    assert settings is not None
    tracing = Tracing(settings, resources_from(environment))
    tracing.start()
    return tracing


def put_one_request(tracing: Tracing) -> int:
    """A served request as the frontend records it: two resources, an event, an error, and its rounds. Gives its spans."""
    engine = tracing.engine_resource("0", 99)
    end_ns = START_NS + 10**9
    attributes = (
        ("http.request.method", "POST"),
        ("http.response.status_code", 200),
        ("gen_ai.request.temperature", 0.5),
        ("gen_ai.request.stream", True),
        ("gen_ai.response.finish_reasons", ("stop", "länge")),
        ("negative", -1),
    )
    server = SpanRecord(
        *(tracing.frontend_resource, TRACE, SERVER_ID, CALLER_ID, "POST /v1/completions", SpanKind.SERVER),
        *(START_NS, end_ns, attributes),
        error="aborted",
        has_remote_parent=True,
    )
    decode = SpanRecord(
        *(engine, TRACE, DECODE_ID, SERVER_ID, "decode_forward", SpanKind.INTERNAL, START_NS, end_ns),
        events=(SpanEvent("retract", START_NS + 5, (("tokens", 3),)),),
    )
    parent = RoundParent(engine, TRACE, DECODE_ID, START_NS, ("model", "ngram"), TraceLevel.STEPS, True)
    phases = PhaseTimes(((0, 0), (10, 20), (30, 70), (70, 90)), on_device=True)
    for ordinal in range(NUM_ROUNDS):
        verdict = Round(3, 3, ordinal % 4, 1, 0, ordinal % 2, False)
        tracing.sink.put(RoundRecord(parent, ordinal, ordinal * 1000, phases, verdict, parent.spans_per_round[True]))
    tracing.sink.put(server)
    tracing.sink.put(decode)
    return 3 * NUM_ROUNDS + 2


def attributes_of(holder: Span | Span.Event) -> dict[str, object]:
    def plain(value: object) -> object:
        kind = value.WhichOneof("value")  # type: ignore[attr-defined]
        return tuple(map(plain, value.array_value.values)) if kind == "array_value" else getattr(value, kind)  # type: ignore[attr-defined]

    return {each.key: plain(each.value) for each in holder.attributes}


def check_whole(spans: list[Span]) -> None:
    """Every span of `put_one_request` once, with all it had."""
    assert len({span.span_id for span in spans}) == len(spans) == 3 * NUM_ROUNDS + 2
    assert all(span.trace_id == TRACE.trace_id and span.trace_state == "vendor=value" for span in spans)
    by_name: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: each.start_time_unix_nano):
        by_name.setdefault(span.name, []).append(span)
    ((server,), (decode,)) = by_name.pop("POST /v1/completions"), by_name.pop("decode_forward")
    assert (server.kind, server.parent_span_id) == (Span.SPAN_KIND_SERVER, CALLER_ID)
    assert (server.span_id, decode.parent_span_id) == (SERVER_ID, SERVER_ID)
    assert (server.status.code, server.status.message) == (2, "aborted")
    assert attributes_of(server) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ("stop", "länge"),
        "negative": -1,
    }
    (event,) = decode.events
    assert (event.name, event.time_unix_nano, attributes_of(event)) == ("retract", START_NS + 5, {"tokens": 3})
    assert sorted(by_name) == ["decode_loop", "spec_draft", "spec_verify"]
    for ordinal in range(NUM_ROUNDS):
        loop, draft, verify = (by_name[name][ordinal] for name in sorted(by_name))
        base = START_NS + ordinal * 1000
        assert {loop.parent_span_id, draft.parent_span_id, verify.parent_span_id} == {DECODE_ID}
        assert attributes_of(loop) == {"decode_ct": ordinal}
        assert attributes_of(draft) == {"num_draft_tokens": 3, "source": ("model", "ngram")[ordinal % 2]}
        assert attributes_of(verify) == {"num_correct_drafts": ordinal % 4}
        assert (verify.start_time_unix_nano, verify.end_time_unix_nano) == (base + 30, base + 90)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_real_collector_passes_a_trace_on_whole(collector: Collector, protocol: str, compression: str):
    behind = collector.behind
    with behind.changed:
        behind.requests.clear()
    address = collector.grpc_address if protocol == "grpc" else f"{collector.http_address}/v1/traces"
    tracing = exporting(
        f"http://{address}",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_COMPRESSION=compression,
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    count = put_one_request(tracing)
    tracing.close(WAIT_S)
    stats = tracing.stats
    assert (stats.put, stats.exported, sum(stats.dropped.values())) == (count, count, 0)
    behind.wait_for(lambda _: len(behind.spans()) >= count)
    check_whole(behind.spans())
    services = {}
    for request in behind.requests:
        for group in request.resource_spans:
            who = {each.key: each.value.string_value for each in group.resource.attributes}
            for scope in group.scope_spans:
                assert scope.scope.name == "drafthouse" and scope.scope.version
                services.setdefault(who["service.name"], set()).update(span.name for span in scope.spans)
                assert who["deployment.environment.name"] == "test"
            if who["service.name"] == "drafthouse-engine":
                assert who["service.instance.id"] == "0/99"
    assert services == {
        "drafthouse-frontend": {"POST /v1/completions"},
        "drafthouse-engine": {"decode_forward", "decode_loop", "spec_draft", "spec_verify"},
    }


async def test_oteltap_sees_every_span_with_its_parent():
    for _ in range(START_ATTEMPTS):
        (port,) = _free_ports(1)
        settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
        try:
            receiver = await OtelTapHttpProtobufReceiver(settings).start()
            break
        except OtelTapInitializationError:  # the port was taken in between
            continue
    else:
        pytest.fail("oteltap did not start")
    seen: list[Span] = []

    async def listen() -> None:
        async for span in receiver.stream_traces():
            seen.append(span)  # noqa: PERF401 - watched while it grows

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)  # a stream begins with its first step; what came before is not in it
    try:
        tracing = exporting(f"http://127.0.0.1:{port}/v1/traces")
        count = put_one_request(tracing)
        await asyncio.to_thread(tracing.close, WAIT_S)
        assert tracing.stats.exported == count
        async with asyncio.timeout(WAIT_S):
            while len(seen) < count:
                await asyncio.sleep(0.01)
    finally:
        await receiver.stop()
        await listening
    check_whole(seen)
