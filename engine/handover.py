"""What the I/O thread hands to the step thread, and how one wakes the other.

Owns the queue of arrivals, the view of closes not yet drained, the paused set, and questions about profiles. Never touches a zmq socket and never
decides anything. engine.wire fills it, engine.core drains it (it is core's `Inbox`).
"""

import contextlib
import math
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from engine.sequence import Arrival, Gone
from protocol.messages import Close, Detach, Profile, ProfileReply, Submit

_T = TypeVar("_T")

MAX_WAIT_S = 3600.0  # poll takes at most 2**31 ms, and a deadline may lie centuries ahead; whoever waits looks again


class WireFailure(RuntimeError):
    """The I/O thread died: nobody can be told anything any more, so the engine must end."""


class Waker:
    """A bell between threads that a poll can wait on. `ring` is safe from signal handlers and any thread.

    Rings before a `clear` merge into one. Whoever rings changes its data first; whoever clears looks at it afterwards.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_ringing = False
        self._poll = select.poll()  # not select.select, which fails for descriptors above 1023
        self._poll.register(self._reader, select.POLLIN)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self) -> None:
        if not self._is_ringing:
            self._is_ringing = True
            try:
                self._writer.send(b"\0")
            except (BlockingIOError, OSError):
                self._is_ringing = False  # full (it rings already) or closed (nobody waits)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        self._is_ringing = False

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until rung, until the time is up, or for MAX_WAIT_S; then clear."""
        self._poll.poll(None if timeout_s is None else math.ceil(min(timeout_s, MAX_WAIT_S) * 1000))
        self.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class ProfileLine:
    """Questions about profiles to the step thread, which takes them between steps, and its answers to the I/O thread."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """`ring` wakes the I/O thread."""
        self._ring = ring
        self._questions: deque[tuple[str, Profile]] = deque()
        self._answers: deque[tuple[str, ProfileReply]] = deque()

    def ask(self, frontend_id: str, question: Profile) -> int:
        """For the I/O thread; returns how many wait, of all frontends."""
        self._questions.append((frontend_id, question))
        return len(self._questions)

    def take_questions(self) -> list[tuple[str, Profile]]:
        """For the step thread: what was asked, with the frontend that waits for the answer."""
        return _taken(self._questions)

    def answer(self, frontend_id: str, reply: ProfileReply) -> None:
        """For the step thread."""
        self._answers.append((frontend_id, reply))
        self._ring()

    def take_answers(self) -> list[tuple[str, ProfileReply]]:
        """For the I/O thread."""
        return _taken(self._answers)


def _taken(queue: deque[_T]) -> list[_T]:
    """All of a queue that another thread may be filling."""
    return [queue.popleft() for _ in range(len(queue))] if queue else []


class Mailbox:
    """core's `Inbox`. `put`, `set_paused`, `touch` and `fail` are the I/O thread's; the rest is the step thread's."""

    def __init__(self, profiles: ProfileLine) -> None:
        self._lock = threading.Lock()
        self._waker = Waker()
        self._profiles = profiles
        self._arrivals: deque[Arrival] = deque()
        self._closes: set[tuple[str, int, int]] = set()
        self._num_pending: Counter[str] = Counter()
        self._paused: frozenset[str] = frozenset()
        self._is_touched = False
        self._failure: BaseException | None = None

    # ---- I/O thread ----

    def put(self, frontend_id: str, message: Submit | Close | Detach | Gone | Profile) -> int:
        """Queue one arrival; returns how many of this frontend now wait."""
        if isinstance(message, Profile):
            num_questions = self._profiles.ask(frontend_id, message)
            self._waker.ring()  # no arrival: nothing to step for
            return num_questions
        with self._lock:
            self._arrivals.append((frontend_id, message))
            self._num_pending[frontend_id] += 1
            num_pending = self._num_pending[frontend_id]
            if isinstance(message, Close):
                self._closes.add((frontend_id, message.request_id, message.index))
        self._waker.ring()
        return num_pending

    def set_paused(self, paused: frozenset[str]) -> None:
        if paused != self._paused:
            self._paused = paused
            self.touch()

    def touch(self) -> None:
        """Something besides arrivals deserves a step: the paused set, or the wire's own counters."""
        with self._lock:
            self._is_touched = True
        self._waker.ring()

    def fail(self, error: BaseException) -> None:
        self._failure = error
        self._waker.ring()

    # ---- step thread ----

    def drain(self) -> list[Arrival]:
        """Every message that arrived, in order. Raises `WireFailure`."""
        self._raise_failure()
        if not self._arrivals:
            return []
        with self._lock:
            arrivals = list(self._arrivals)
            self._arrivals.clear()
            self._closes.clear()
            self._num_pending.clear()
        return arrivals

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is something to do (True), `wake` was called, or time is up. Raises `WireFailure`."""
        if not (self._arrivals or self._is_touched):
            self._waker.wait(timeout_s)
        self._raise_failure()
        with self._lock:
            has_work = bool(self._arrivals) or self._is_touched
            self._is_touched = False
        return has_work

    def wake(self) -> None:
        self._waker.ring()

    def peek_closes(self) -> set[tuple[str, int, int]]:
        """(frontend_id, request_id, index) of every Close that waits; a copy."""
        if not self._closes:
            return set()
        with self._lock:
            return set(self._closes)

    def paused(self) -> frozenset[str]:
        return self._paused

    def close(self) -> None:
        self._waker.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise WireFailure(f"the wire failed: {self._failure!r}") from self._failure
