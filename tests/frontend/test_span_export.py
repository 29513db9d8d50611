"""The queue and its thread: exact accounts whatever the collector does, and never a wait for whoever puts."""

import threading
import time

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from frontend.otlp_delivery import Delivery
from frontend.otlp_transport import FailureReason, Reply
from frontend.span_encoding import SpanEncoder, SpanLimits
from frontend.span_export import MAX_REQUEST_BYTES, QueueSettings, SpanQueue
from frontend.spans import RoundParent, RoundRecord, TraceLevel
from protocol.messages import PhaseTimes, Round
from tests.frontend.export_account import RESOURCE, TRACE, WAIT_S, balanced, drops, failures, settled, stage, until
from tests.timing import at_most_s

PARENT = RoundParent(RESOURCE, TRACE, b"decodefw", 0, ("model",), TraceLevel.ROUNDS, True)
PHASES = PhaseTimes(((0, 0), (1, 2), (3, 4), (5, 6)), on_device=False)
SOON = QueueSettings(capacity=1000, batch_size=8, delay_s=0.02, timeout_s=20.0)
FULL = QueueSettings(capacity=1000, batch_size=8, delay_s=3600.0, timeout_s=20.0)  # only full batches of 8 go


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
    at_most_s(time.monotonic() - started_s, WAIT_S / 2, "closing")
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
    at_most_s(time.monotonic() - started_s, WAIT_S / 2, "closing")
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
    at_most_s(time.monotonic() - started_s, 14.0, "closing")
    assert settled(queue).exported == 1, "the one attempt more was taken"


def test_what_comes_after_closing_is_counted_too():
    queue = queue_to(Collecting())
    queue.start()
    queue.close()
    queue.put(stage())
    queue.put(one_round())
    assert drops(settled(queue)) == {"shutdown": 3}
