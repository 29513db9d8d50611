"""When sequences that live must end: their clients' deadlines, and how long one may wait for its first row.

Owns two tables of times, and how what is due in them ends; ends nothing itself. Called by engine.scheduler before every step,
so looking costs nothing until something is due.
"""

from collections.abc import Callable

from engine.intake import DEADLINE_PASSED, rejection
from engine.sequence import ChildKey, Sequence
from protocol.messages import Finish
from protocol.reasons import FinishReason, RejectReason


class Expiry:
    """Times in ns of the engine's own monotonic clock: what arrives is time that is left, never a time of day."""

    def __init__(self, queue_timeout_ns: int | None) -> None:
        """`queue_timeout_ns`: the longest wait for a first row; None: any."""
        self._queue_timeout_ns = queue_timeout_ns
        self._deadlines: dict[ChildKey, int] = {}
        self._waits: dict[
            ChildKey, int
        ] = {}  # of those never scheduled; in order of time, because all may wait as long
        self._earliest_ns: int | None = None  # no deadline lies before it

    def add(self, sequence: Sequence) -> None:
        """A child that was accepted at its `queued_ns`."""
        if self._queue_timeout_ns is not None:
            self._waits[sequence.key] = sequence.queued_ns + self._queue_timeout_ns
        at_ns = sequence.deadline_ns
        if at_ns is not None:
            self._deadlines[sequence.key] = at_ns
            self._earliest_ns = at_ns if self._earliest_ns is None else min(self._earliest_ns, at_ns)

    def scheduled(self, key: ChildKey) -> None:
        """It got its row: if it waits again, after a preemption, that is this engine's doing."""
        self._waits.pop(key, None)

    def forget(self, key: ChildKey) -> None:
        """It ended."""
        self._waits.pop(key, None)
        self._deadlines.pop(key, None)
        if not self._deadlines:
            self._earliest_ns = None

    @property
    def next_ns(self) -> int | None:
        """When to look again if nothing else happens; None when nothing can become due."""
        first_ns = next(iter(self._waits.values()), None)
        if first_ns is None or self._earliest_ns is None:
            return self._earliest_ns if first_ns is None else first_ns
        return min(first_ns, self._earliest_ns)

    def due(self, now_ns: int, has_started: Callable[[ChildKey], bool]) -> list[tuple[ChildKey, Finish]]:
        """Who must end now, and how: what never ran is refused, what runs is cut short. Sees all before any is ended."""
        ends = {key: self._passed(has_started(key)) for key in self._late(now_ns)}
        for key in self._impatient(now_ns):
            if key not in ends and not has_started(key):
                ends[key] = self._refused()
        return list(ends.items())

    def _late(self, now_ns: int) -> list[ChildKey]:
        if self._earliest_ns is None or now_ns < self._earliest_ns:
            return []
        # The earliest may be of one that ended long ago: look at all once, and know the next one.
        self._earliest_ns = min((at_ns for at_ns in self._deadlines.values() if at_ns > now_ns), default=None)
        return [key for key, at_ns in self._deadlines.items() if at_ns <= now_ns]

    def _impatient(self, now_ns: int) -> list[ChildKey]:
        """Those whose wait is over; each is named once, so that children of a request that runs are asked about once."""
        due = []
        for key, at_ns in self._waits.items():
            if at_ns > now_ns:
                break
            due.append(key)
        for key in due:
            del self._waits[key]
        return due

    @staticmethod
    def _passed(has_started: bool) -> Finish:
        if has_started:
            return Finish(FinishReason.ABORT, message=DEADLINE_PASSED)
        return rejection(RejectReason.EXPIRED, DEADLINE_PASSED)

    def _refused(self) -> Finish:
        waited_s = (self._queue_timeout_ns or 0) / 1e9
        return rejection(
            RejectReason.QUEUE_TIMEOUT, f"the request waited {waited_s:g} s without getting its turn; try again later"
        )
