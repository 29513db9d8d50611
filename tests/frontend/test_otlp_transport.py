"""Export over real sockets: what leaves, what each answer means, and the account when collectors misbehave."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

import grpc
import pytest

from frontend.otlp_delivery import Delivery
from frontend.otlp_transport import Collector, Compression, FailureReason, OtlpProtocol, connect, retry_after_s
from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.span_export import QueueSettings, SpanQueue
from frontend.spans import DropReason
from tests.frontend.export_account import balanced, drops, failures, settled, stage, until
from tests.frontend.otlp_receivers import (
    Behaviour,
    Receiver,
    Tls,
    answer,
    grpc_receiver,
    http_receiver,
    refusing_port,
)
from tests.timing import at_most_s

SOON = QueueSettings(capacity=1000, batch_size=8, delay_s=0.02, timeout_s=20.0)
FULL = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=20.0)  # only full batches of 8 go
BRIEF = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=0.3)
PROTOCOLS = [OtlpProtocol.HTTP, OtlpProtocol.GRPC]


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


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("Mon, 30 Nov 2026 12:00:30 GMT", 30.0),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
    ],
)
def test_retry_after_is_read_in_both_its_forms(header: str | None, seconds: float | None):
    assert retry_after_s(header, datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)) == seconds


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


def test_an_answer_that_trickles_in_costs_no_more_than_the_timeout():
    trickling = http_receiver(answer(trickles=True))
    with trickling as receiver, exporting(OtlpProtocol.HTTP, receiver.address, BRIEF) as queue:
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
        at_most_s(time.monotonic() - started_s, 10.0, "not waiting for the collector")
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
        at_most_s(time.monotonic() - started_s, 10.0, "not waiting for the collector")
        stats = balanced(queue.stats)
        assert stats.size == 1000 and stats.dropped[DropReason.QUEUE_FULL] == 4000
