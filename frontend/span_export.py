"""The queue between the token path and the collector, and the one thread that empties it.

Owns bounding, batching, splitting by bytes, and the account: every span put is exported, dropped for one named reason, or
still here. `put` belongs to the event loop's thread and costs it under a microsecond; all else happens on a daemon thread
that no request waits for. Never spells a span (`frontend.span_encoding`) and never retries (`frontend.otlp_delivery`).
Built by `frontend.tracing`.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from frontend.otlp_delivery import Delivery
from frontend.otlp_transport import FailureReason
from frontend.spans import DropReason, Record, RoundRecord

# Sized from 12 800 spans/s (128 sequences, 50 steps/s, 2 spans each): a collector may be away for 5 s, and a request
# leaves six times a second.
DEFAULT_CAPACITY = 65_536
DEFAULT_BATCH_SIZE = 2_048
DEFAULT_DELAY_S = 1.0
DEFAULT_CLOSE_S = 5.0
ROUNDS_SHARE = 0.9  # of the queue; the rest is kept for stages, so that a flood of rounds leaves every trace its root
MAX_REQUEST_BYTES = 3_800_000  # collectors refuse gRPC messages above 4 MiB unless told otherwise
SLICE_RECORDS = 128  # encoded at a time: 0.3 ms of the interpreter lock
SLICE_PAUSE_S = 0.0001  # really sleeping hands the lock over; sleep(0) takes it back before a waiter has woken


@dataclass(frozen=True)
class QueueSettings:
    """Sizes in spans, times in seconds."""

    capacity: int = DEFAULT_CAPACITY
    batch_size: int = DEFAULT_BATCH_SIZE
    delay_s: float = DEFAULT_DELAY_S  # longest that a span waits for its batch to fill
    timeout_s: float = 10.0  # for one request with all its retries


@dataclass(frozen=True)
class ExportStats:
    """The account so far, in spans; `failures` in attempts. put == exported + sum(dropped) + size + in_flight, but for a
    batch that changes hands while it is read."""

    put: int
    exported: int
    dropped: dict[DropReason, int]
    failures: dict[FailureReason, int]
    size: int  # queued
    in_flight: int  # taken from the queue, fate not known yet
    capacity: int


class Encoder(Protocol):
    def encode(self, records: Sequence[Record]) -> bytes:
        """A request; requests joined end to end are one."""


class SpanQueue:
    """A SpanSink with a thread behind it. `start`, then `put` from one thread, then `close` once, from any."""

    def __init__(
        self,
        settings: QueueSettings,
        encoder: Encoder,
        delivery: Delivery,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._encoder = encoder
        self._delivery = delivery
        self._clock_s = clock_s
        self._records: deque[Record] = deque()
        self._rounds_limit = int(settings.capacity * ROUNDS_SHARE)
        # written by the putting thread alone; with `taken` they are monotone, so that the size needs no lock
        self._accepted = 0
        self._refused = 0
        self._late = 0
        self._account = _Account()
        self._bell = _Bell()
        self._is_closing = False
        self._close_by_s = float("inf")
        self._is_collector_gone = False  # found when closing: nothing more is tried
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue it, or drop and count it. Rounds are dropped first: they leave the last tenth to the stages."""
        if type(record) is RoundRecord:
            num_spans, limit = record.num_spans, self._rounds_limit
        else:
            num_spans, limit = 1, self._settings.capacity
        size = self._accepted - self._account.taken + num_spans
        if self._is_closing:
            self._late += num_spans
        elif size > limit:
            self._refused += num_spans
        elif num_spans:
            self._records.append(record)
            self._accepted += num_spans
            if size >= self._settings.batch_size:
                self._bell.ring()

    @property
    def stats(self) -> ExportStats:
        account = self._account
        return ExportStats(
            put=self._accepted + self._refused + self._late,
            exported=account.exported,
            dropped={
                DropReason.QUEUE_FULL: self._refused,
                DropReason.EXPORT_FAILED: account.failed,
                DropReason.REJECTED: account.rejected,
                DropReason.SHUTDOWN: account.unsent + self._late,
            },
            failures=dict(self._delivery.failures),
            size=self._accepted - account.taken,
            in_flight=account.in_flight,
            capacity=self._settings.capacity,
        )

    def close(self, timeout_s: float = DEFAULT_CLOSE_S) -> None:
        """Send what is queued, for `timeout_s` in all and without waiting for a collector that is not there; count the
        rest as dropped. A thread that is stuck in a request is left behind, and what it carries counts as dropped."""
        self._close_by_s = self._clock_s() + timeout_s
        self._is_closing = True
        self._delivery.hurry()
        self._bell.ring()
        self._thread.join(timeout_s)
        self._account.close()
        while self._records:
            self._account.drop_queued(_num_spans(self._records.popleft()))
        self._delivery.close()

    # ---- the export thread ----

    def _run(self) -> None:
        flush_at_s = self._clock_s() + self._settings.delay_s
        while not self._is_closing:
            self._bell.wait(flush_at_s - self._clock_s())
            if self._clock_s() >= flush_at_s:
                self._export(least=1)
                flush_at_s = self._clock_s() + self._settings.delay_s
            else:
                self._export(least=self._settings.batch_size)
        self._export(least=1)

    def _export(self, least: int) -> None:
        """Send what is queued now, batch by batch, while there are `least` spans."""
        until = self._accepted
        while self._account.taken < until and self._accepted - self._account.taken >= least:
            self._delivery.hold()
            records, num_spans = self._account.take(self._records, self._settings.batch_size)
            if not records:
                return  # closed: the queue is no longer this thread's
            if self._is_over():
                self._account.settle(unsent=num_spans)
                continue
            for body, num_in_body in _requests(self._pieces(records)):
                self._send(body, num_in_body)

    def _is_over(self) -> bool:
        return self._is_closing and (self._is_collector_gone or self._clock_s() >= self._close_by_s)

    def _send(self, body: bytes, num_spans: int) -> None:
        if self._is_over():
            self._account.settle(unsent=num_spans)
            return
        reply = self._delivery.send(body, min(self._clock_s() + self._settings.timeout_s, self._close_by_s))
        if reply.failure is None:
            rejected = min(reply.rejected, num_spans)
            self._account.settle(exported=num_spans - rejected, rejected=rejected)
        elif self._is_closing and reply.is_retryable:
            self._is_collector_gone = True
            self._account.settle(unsent=num_spans)
        else:
            self._account.settle(failed=num_spans)

    def _pieces(self, records: list[Record]) -> Iterator[tuple[bytes, int]]:
        for start in range(0, len(records), SLICE_RECORDS):
            yield from self._encoded(records[start : start + SLICE_RECORDS])
            time.sleep(SLICE_PAUSE_S)

    def _encoded(self, records: list[Record]) -> Iterator[tuple[bytes, int]]:
        """Requests below the size limit and their spans. Too much for one, or a record that cannot be spelled: halve."""
        try:
            body = self._encoder.encode(records)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one record must not cost the others
            if len(records) == 1:
                self._delivery.fail_internally(error)
                self._account.settle(failed=_num_spans(records[0]))
                return
        else:
            if len(body) <= MAX_REQUEST_BYTES or len(records) == 1:
                yield body, sum(map(_num_spans, records))
                return
        middle = len(records) // 2
        yield from self._encoded(records[:middle])
        yield from self._encoded(records[middle:])


class _Account:
    """What became of the spans that were queued. The export thread writes, until `close` ends its right to."""

    def __init__(self) -> None:
        self.taken = 0
        self.in_flight = 0
        self.exported = 0
        self.failed = 0
        self.rejected = 0
        self.unsent = 0
        self._is_closed = False
        self._lock = threading.Lock()  # per batch, and contended in `close` only

    def take(self, queued: deque[Record], batch_size: int) -> tuple[list[Record], int]:
        """The next batch and how many spans it has: at most `batch_size`, unless one record alone has more."""
        records: list[Record] = []
        num_spans = 0
        with self._lock:
            while queued and not self._is_closed:
                more = _num_spans(queued[0])
                if records and num_spans + more > batch_size:
                    break
                records.append(queued.popleft())
                num_spans += more
            self.in_flight += num_spans  # first: whoever reads no queue left must read where it went
            self.taken += num_spans
        return records, num_spans

    def settle(self, *, exported: int = 0, failed: int = 0, rejected: int = 0, unsent: int = 0) -> None:
        with self._lock:
            if self._is_closed:
                return  # these spans were in flight, and `close` has counted them
            self.in_flight -= exported + failed + rejected + unsent
            self.exported += exported
            self.failed += failed
            self.rejected += rejected
            self.unsent += unsent

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self.unsent += self.in_flight
            self.in_flight = 0

    def drop_queued(self, num_spans: int) -> None:
        self.taken += num_spans
        self.unsent += num_spans


class _Bell:
    """Wakes one thread. Ringing never waits, which threading.Event does for its condition's lock."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        if self._silence.locked():
            with contextlib.suppress(RuntimeError):  # another thread rang in between
                self._silence.release()

    def wait(self, timeout_s: float) -> None:
        self._silence.acquire(timeout=max(0.0, timeout_s))


def _requests(pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Pieces joined into requests as large as a collector takes, with their number of spans."""
    bodies: list[bytes] = []
    num_bytes = num_spans = 0
    for body, spans in pieces:
        if bodies and num_bytes + len(body) > MAX_REQUEST_BYTES:
            yield b"".join(bodies), num_spans
            bodies, num_bytes, num_spans = [], 0, 0
        bodies.append(body)
        num_bytes += len(body)
        num_spans += spans
    if bodies:
        yield b"".join(bodies), num_spans


def _num_spans(record: Record) -> int:
    return record.num_spans if type(record) is RoundRecord else 1
