"""The queue and its thread: exact accounts whatever the collector does, and never a wait for whoever puts."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from frontend.otlp_delivery import Delivery
from frontend.otlp_transport import Collector, Compression, FailureReason, OtlpProtocol, Reply, connect
from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.span_export import MAX_REQUEST_BYTES, ExportStats, QueueSettings, SpanQueue
from frontend.spans import DropReason, Resource, RoundParent, RoundRecord, SpanKind, SpanRecord, Trace, TraceLevel
from protocol.messages import PhaseTimes, Round
from tests.frontend.otlp_receivers import (
    Behaviour,
    Receiver,
    Tls,
    answer,
    grpc_receiver,
    http_receiver,
    refusing_port,
)

RESOURCE = Resource((("service.name", "drafthouse-engine"),))
TRACE = Trace(b"t" * 16, "")
PARENT = RoundParent(RESOURCE, TRACE, b"decodefw", 0, ("model",), TraceLevel.ROUNDS, True)
PHASES = PhaseTimes(((0, 0), (1, 2), (3, 4), (5, 6)), on_device=False)
WAIT_S = 30.0
SOON = QueueSettings(capacity=1000, batch_size=8, delay_s=0.02, timeout_s=20.0)
FULL = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=20.0)  # only full batches of 8 go
BRIEF = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=0.3)
PROTOCOLS = [OtlpProtocol.HTTP, OtlpProtocol.GRPC]


def stage(number: int = 0, **changes: object) -> SpanRecord:
    fields: dict[str, object] = {
        "resource": RESOURCE,
        "trace": TRACE,
        "span_id": b"spanspan",
        "parent_id": None,
        "name": f"stage {number}",
        "kind": SpanKind.INTERNAL,
        "start_ns": 1,
        "end_ns": 2,
    }
    return SpanRecord(**(fields | changes))  # type: ignore[arg-type]


def one_round(drafted: int = 2) -> RoundRecord:
    num_spans = PARENT.spans_per_round[drafted > 0]
    return RoundRecord(PARENT, 0, 0, PHASES, Round(drafted, drafted, 0, 1, 0, 0, False), num_spans)


class Collecting:
    """A transport of this process: keeps what it is sent, answers as told, and can be held shut."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies) or [Reply()]
        self.bodies: list[bytes] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.entered = threading.Event()
        self.is_closed = False

    def send(self, body: bytes, timeout_s: float) -> Reply:
        self.entered.set()
        self.is_open.wait()
        self.bodies.append(body)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def close(self) -> None:
        self.is_closed = True

    def names(self) -> list[str]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        groups = [group for request in requests for group in request.resource_spans]
        return [span.name for group in groups for scope in group.scope_spans for span in scope.spans]


def queue_to(transport: Collecting, settings: QueueSettings = SOON) -> SpanQueue:
    return SpanQueue(settings, SpanEncoder("1", SpanLimits()), Delivery(transport, "test"))


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "condition not met"
        time.sleep(0.002)


def settled(queue: SpanQueue) -> ExportStats:
    """The account once nothing is queued or on its way; it balances."""
    until(lambda: queue.stats.size == 0 and queue.stats.in_flight == 0)
    return balanced(queue.stats)


def balanced(stats: ExportStats) -> ExportStats:
    assert stats.put == stats.exported + sum(stats.dropped.values()) + stats.size + stats.in_flight
    return stats


def drops(stats: ExportStats) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in stats.dropped.items() if count}


def failures(stats: ExportStats) -> set[str]:
    return {reason.name.lower() for reason, count in stats.failures.items() if count}


# ---- bounding, without a thread ----


def test_the_queue_is_bounded_in_spans_and_every_drop_is_counted():
    queue = queue_to(Collecting(), QueueSettings(capacity=100, batch_size=100))
    for number in range(105):
        queue.put(stage(number))
    stats = balanced(queue.stats)
    assert (stats.size, stats.capacity, drops(stats)) == (100, 100, {"queue_full": 5})


def test_rounds_leave_the_last_tenth_to_the_stages():
    queue = queue_to(Collecting(), QueueSettings(capacity=100, batch_size=100))
    for _ in range(100):
        queue.put(one_round())  # two spans each
    assert queue.stats.size == 90
    queue.put(one_round(drafted=0))
    assert queue.stats.size == 90, "one span more is one too many"
    for number in range(10):
        queue.put(stage(number))
    stats = balanced(queue.stats)
    assert stats.size == 100 and drops(stats) == {"queue_full": 2 * 55 + 1}


def test_a_round_without_spans_takes_no_place():
    parent = RoundParent(RESOURCE, TRACE, b"decodefw", 0, (), TraceLevel.ROUNDS, False)
    queue = queue_to(Collecting())
    queue.put(RoundRecord(parent, 0, 0, PHASES, Round(0, 0, 0, 1, 0, 0, False), parent.spans_per_round[False]))
    assert queue.stats.put == 0 and queue.stats.size == 0


# ---- batching ----


def test_a_full_batch_does_not_wait_for_the_schedule():
    transport = Collecting()
    queue = queue_to(transport, QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0))
    queue.start()
    for number in range(20):
        queue.put(stage(number))
    until(lambda: queue.stats.exported == 16)
    assert queue.stats.size == 4, "the rest is no full batch"
    queue.close(WAIT_S)
    assert transport.names() == [f"stage {number}" for number in range(20)], "in order, and once each"
    assert transport.is_closed and settled(queue).exported == 20


def test_what_is_no_full_batch_goes_with_the_schedule():
    queue = queue_to(Collecting())
    queue.start()
    queue.put(stage())
    assert settled(queue).exported == 1
    queue.close()


def test_a_batch_has_no_more_spans_than_allowed():
    transport = Collecting()
    queue = queue_to(transport, QueueSettings(capacity=1000, batch_size=5, delay_s=3600.0))
    for _ in range(10):
        queue.put(one_round())
    queue.start()
    queue.close(WAIT_S)
    counts = [len(_names_in(body)) for body in transport.bodies]
    assert counts == [4] * 5 and settled(queue).exported == 20


def _names_in(body: bytes) -> list[str]:
    groups = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span.name for group in groups for scope in group.scope_spans for span in scope.spans]


def test_a_batch_too_large_for_a_collector_is_split_by_its_bytes():
    transport = Collecting()
    queue = queue_to(transport, QueueSettings(capacity=10_000, batch_size=10_000, delay_s=3600.0))
    for number in range(300):
        queue.put(stage(number, attributes=(("url.path", "x" * 40_000),)))
    queue.start()
    queue.close(WAIT_S)
    assert all(len(body) <= MAX_REQUEST_BYTES for body in transport.bodies)
    assert 4 <= len(transport.bodies) <= 6, "12 MB in requests of almost 4"
    assert transport.names() == [f"stage {number}" for number in range(300)]
    assert settled(queue).exported == 300


def test_a_record_that_cannot_be_spelled_costs_nobody_else():
    transport = Collecting()
    queue = queue_to(transport)
    queue.start()
    for number in range(10):
        queue.put(stage(number, span_id=b"broken" if number == 7 else b"spanspan"))
    stats = settled(queue)
    queue.close()
    assert (stats.exported, drops(stats), failures(stats)) == (9, {"export_failed": 1}, {"internal"})
    assert "stage 7" not in transport.names()


# ---- what the collector answers ----


def test_what_is_rejected_of_a_batch_is_counted_and_the_rest_is_exported():
    queue = queue_to(Collecting(Reply(rejected=3)), FULL)
    for number in range(8):
        queue.put(stage(number))
    queue.start()
    stats = settled(queue)
    queue.close()
    assert (stats.exported, drops(stats)) == (5, {"rejected": 3})


def test_a_collector_cannot_reject_more_than_it_got():
    queue = queue_to(Collecting(Reply(rejected=1000)))
    queue.put(stage())
    queue.start()
    stats = settled(queue)
    queue.close()
    assert (stats.exported, drops(stats)) == (0, {"rejected": 1})


# ---- closing ----


def test_closing_gives_up_on_a_collector_that_is_not_there():
    transport = Collecting(Reply(FailureReason.UNAVAILABLE, "", is_retryable=True))
    queue = queue_to(transport, QueueSettings(capacity=1000, batch_size=10, delay_s=3600.0))
    for number in range(100):
        queue.put(stage(number))
    queue.start()
    started_s = time.monotonic()
    queue.close(WAIT_S)
    assert time.monotonic() - started_s < WAIT_S / 2
    assert len(set(transport.bodies)) == 1, "only the first batch was tried"
    assert drops(settled(queue)) == {"shutdown": 100}


def test_closing_leaves_a_stuck_thread_behind_and_counts_what_it_carries_once():
    transport = Collecting()
    transport.is_open.clear()
    queue = queue_to(transport)
    queue.start()
    for number in range(30):
        queue.put(stage(number))
    assert transport.entered.wait(WAIT_S)
    started_s = time.monotonic()
    queue.close(0.2)
    assert time.monotonic() - started_s < WAIT_S / 2
    assert drops(settled(queue)) == {"shutdown": 30}
    transport.is_open.set()  # the collector answers after all: too late to be counted twice
    queue._thread.join(WAIT_S)
    assert not queue._thread.is_alive()
    assert drops(settled(queue)) == {"shutdown": 30} and queue.stats.exported == 0


def test_closing_interrupts_a_wait_for_the_next_attempt():
    transport = Collecting(Reply(FailureReason.THROTTLED, "", is_retryable=True, retry_after_s=15.0), Reply())
    delivery, waiting = Delivery(transport, "test"), threading.Event()
    wait = delivery._wait

    def announced(seconds: float) -> object:
        waiting.set()
        return wait(seconds)

    delivery._wait = announced
    queue = SpanQueue(SOON, SpanEncoder("1", SpanLimits()), delivery)
    queue.start()
    queue.put(stage())
    assert waiting.wait(WAIT_S)
    started_s = time.monotonic()
    queue.close(WAIT_S)
    assert time.monotonic() - started_s < 14.0
    assert settled(queue).exported == 1, "the one attempt more was taken"


def test_what_comes_after_closing_is_counted_too():
    queue = queue_to(Collecting())
    queue.start()
    queue.close()
    queue.put(stage())
    queue.put(one_round())
    assert drops(settled(queue)) == {"shutdown": 3}


# ---- real sockets ----


@contextmanager
def receiving(
    protocol: OtlpProtocol, *behaviours: Behaviour, port: int = 0, tls: Tls | None = None
) -> Iterator[Receiver]:
    receiver_for = http_receiver if protocol is OtlpProtocol.HTTP else grpc_receiver
    with receiver_for(*behaviours, port=port, tls=tls) as receiver:
        yield receiver


@contextmanager
def exporting(
    protocol: OtlpProtocol, address: str, settings: QueueSettings = SOON, *, is_secure: bool = False, **others: object
) -> Iterator[SpanQueue]:
    scheme = "https" if is_secure else "http"
    target = f"{scheme}://{address}/v1/traces" if protocol is OtlpProtocol.HTTP else address
    to = Collector(protocol, target, is_secure, **others)  # type: ignore[arg-type]
    queue = SpanQueue(settings, SpanEncoder("1", SpanLimits()), Delivery(connect(to, "1"), to.shown))
    queue.start()
    try:
        yield queue
    finally:
        queue.close(0.5)
        balanced(queue.stats)


def put_all(queue: SpanQueue, count: int = 20) -> None:
    for number in range(count):
        queue.put(stage(number))


COMPRESSED = [(OtlpProtocol.HTTP, each) for each in Compression] + [
    (OtlpProtocol.GRPC, Compression.NONE),
    (OtlpProtocol.GRPC, Compression.GZIP),
]


@pytest.mark.parametrize(("protocol", "compression"), COMPRESSED)
def test_spans_arrive_whole_with_headers_and_compression(protocol: OtlpProtocol, compression: Compression):
    headers = (("x-api-key", "abc"),)
    with (
        receiving(protocol) as receiver,
        exporting(protocol, receiver.address, headers=headers, compression=compression) as queue,
    ):
        put_all(queue)
        assert settled(queue).exported == 20
        assert sorted(span.name for span in receiver.spans()) == sorted(f"stage {number}" for number in range(20))
        for seen in receiver.request_headers:
            assert seen["x-api-key"] == "abc"
            assert seen["user-agent"].startswith("drafthouse/1")
            if protocol is OtlpProtocol.HTTP:
                assert seen["content-type"] == "application/x-protobuf"
                assert seen.get("content-encoding", "none") == compression.value


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch):
    with http_receiver() as receiver:
        monkeypatch.setenv("http_proxy", f"http://{receiver.address}")
        monkeypatch.setenv("no_proxy", "")
        with exporting(OtlpProtocol.HTTP, "collector.invalid:4318", FULL) as queue:
            put_all(queue, 8)
            assert settled(queue).exported == 8 == len(receiver.spans())
        assert receiver.request_headers[0]["host"] == "collector.invalid:4318"


RETRIED = [
    (OtlpProtocol.HTTP, answer(429, ("retry-after", "0")), "throttled"),
    (OtlpProtocol.HTTP, answer(502), "unavailable"),
    (OtlpProtocol.HTTP, answer(503, ("retry-after", "0")), "unavailable"),
    (OtlpProtocol.HTTP, answer(504), "unavailable"),
    (OtlpProtocol.HTTP, answer(dies=True), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.UNAVAILABLE), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.ABORTED), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.CANCELLED), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.OUT_OF_RANGE), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.DATA_LOSS), "unavailable"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.DEADLINE_EXCEEDED), "timeout"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info_s=0.01), "throttled"),
]


@pytest.mark.parametrize(("protocol", "refusal", "reason"), RETRIED, ids=str)
def test_a_passing_trouble_costs_no_span(protocol: OtlpProtocol, refusal: Behaviour, reason: str):
    with receiving(protocol, refusal, answer()) as receiver, exporting(protocol, receiver.address, FULL) as queue:
        put_all(queue, 8)
        stats = settled(queue)
        assert stats.exported == 8 == len(receiver.spans()) and drops(stats) == {} and failures(stats) == {reason}


FINAL = [
    (OtlpProtocol.HTTP, answer(400), "refused"),
    (OtlpProtocol.HTTP, answer(401), "refused"),
    (OtlpProtocol.HTTP, answer(413), "refused"),
    (OtlpProtocol.HTTP, answer(500), "refused"),
    (OtlpProtocol.HTTP, answer(301, ("location", "/v1/traces")), "refused"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.INVALID_ARGUMENT), "refused"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.UNAUTHENTICATED), "refused"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.UNIMPLEMENTED), "refused"),
    (OtlpProtocol.GRPC, answer(grpc.StatusCode.RESOURCE_EXHAUSTED), "throttled"),
]


@pytest.mark.parametrize(("protocol", "refusal", "reason"), FINAL, ids=str)
def test_a_final_answer_is_not_asked_for_again(protocol: OtlpProtocol, refusal: Behaviour, reason: str):
    with receiving(protocol, refusal, answer()) as receiver, exporting(protocol, receiver.address, FULL) as queue:
        put_all(queue, 8)
        until(lambda: queue.stats.size == 0 and queue.stats.in_flight == 0)
        put_all(queue, 8)
        stats = settled(queue)
        assert (stats.exported, drops(stats), failures(stats)) == (8, {"export_failed": 8}, {reason})
        assert receiver.attempts == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_partial_success_of_a_real_answer_is_read(protocol: OtlpProtocol, caplog: pytest.LogCaptureFixture):
    with receiving(protocol, answer(rejected=3)) as receiver, exporting(protocol, receiver.address, FULL) as queue:
        put_all(queue, 8)
        stats = settled(queue)
        assert (stats.exported, drops(stats), failures(stats)) == (5, {"rejected": 3}, set())
    assert "secret" not in caplog.text


@pytest.mark.parametrize("body", [b"{}", b"\xff\xff", b""])
def test_an_answer_that_is_no_protobuf_is_still_an_answer(body: bytes):
    with http_receiver(answer(body=body)) as receiver, exporting(OtlpProtocol.HTTP, receiver.address) as queue:
        put_all(queue, 8)
        assert settled(queue).exported == 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_refuses_connections_costs_spans_and_nothing_else(protocol: OtlpProtocol):
    with refusing_port() as address, exporting(protocol, address, BRIEF) as queue:
        put_all(queue, 8)
        stats = settled(queue)
        assert drops(stats) == {"export_failed": 8} and "unavailable" in failures(stats)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_hangs_costs_no_more_than_the_timeout(protocol: OtlpProtocol):
    with receiving(protocol, answer(hangs=True)) as receiver, exporting(protocol, receiver.address, BRIEF) as queue:
        put_all(queue, 8)
        stats = settled(queue)
        assert (drops(stats), failures(stats)) == ({"export_failed": 8}, {"timeout"})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_closing_is_bounded_with_a_collector_that_hangs(protocol: OtlpProtocol):
    with receiving(protocol, answer(hangs=True)) as receiver, exporting(protocol, receiver.address) as queue:
        put_all(queue)
        receiver.wait_for(lambda seen: seen.attempts > 0)
        started_s = time.monotonic()
        queue.close(0.3)
        assert time.monotonic() - started_s < 10.0, "and not the 20 s of the request"
        assert drops(settled(queue)) == {"shutdown": 20}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_starts_late_gets_what_waited_for_it(protocol: OtlpProtocol):
    with ExitStack() as stack:
        with refusing_port() as address:
            queue = stack.enter_context(exporting(protocol, address, FULL))
            put_all(queue, 8)
            until(lambda: queue.stats.failures[FailureReason.UNAVAILABLE] > 0)
        port = int(address.rpartition(":")[2])
        receiver = stack.enter_context(receiving(protocol, port=port))
        assert settled(queue).exported == 8 == len(receiver.spans())


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    directory = tmp_path_factory.mktemp("tls")
    made = Tls(str(directory / "certificate.pem"), str(directory / "key.pem"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", made.key, "-out", made.certificate]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tls_checks_the_collector_and_shows_the_clients_certificate(protocol: OtlpProtocol, tls: Tls):
    known = {"certificate": tls.certificate, "client_certificate": tls.certificate, "client_key": tls.key}
    with receiving(protocol, tls=tls) as receiver:
        with exporting(protocol, receiver.address, FULL, is_secure=True, **known) as queue:
            put_all(queue, 8)
            assert settled(queue).exported == 8 == len(receiver.spans())
        brief = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=1.0)
        with exporting(protocol, receiver.address, brief, is_secure=True) as stranger:
            put_all(stranger, 8)
            assert drops(settled(stranger)) == {"export_failed": 8}
        assert receiver.attempts == 1


def test_putting_never_waits_for_a_collector():
    """Not a benchmark: a put that waited for the hanging collector once would take its 20 s."""
    with grpc_receiver(answer(hangs=True)) as receiver, exporting(OtlpProtocol.GRPC, receiver.address, FULL) as queue:
        receiver_seen = receiver.wait_for
        put_all(queue, 8)
        receiver_seen(lambda seen: seen.attempts > 0)
        started_s = time.monotonic()
        put_all(queue, 5000)
        assert time.monotonic() - started_s < 10.0
        stats = balanced(queue.stats)
        assert stats.size == 1000 and stats.dropped[DropReason.QUEUE_FULL] == 4000
