"""One encoded request, tried until the collector takes it, refuses it, or its time is over.

Owns retrying, back-off, the collector's wish to be left alone, the count of failed attempts, and two log lines: one when
export begins to fail, one when it works again. Never encodes, queues or opens a connection, and never raises. Used by
`frontend.span_export` on its thread; only `hurry` and reading `failures` belong to others.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from frontend.otlp_transport import FailureReason, Reply, Transport

FIRST_BACKOFF_S = 0.5  # doubles with each attempt: five attempts in the default 10 s
LONGEST_BACKOFF_S = 5.0
JITTER = 0.2  # of a back-off, so that frontends do not return together
LONGEST_HOLD_S = 60.0  # how long a collector can have us wait between requests, whatever it asks for
LOG_EVERY_S = 60.0  # a collector that comes and goes is reported once a minute

logger = logging.getLogger(__name__)

_NO_TIME = Reply(FailureReason.TIMEOUT, "no time left", is_retryable=True)


class Delivery:
    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`endpoint` is for the log, without credentials. `wait(seconds)` returns early when `hurry` was called."""
        self.failures = dict.fromkeys(FailureReason, 0)
        self._transport = transport
        self._clock_s = clock_s
        self._hurried = threading.Event()
        self._wait = wait or self._hurried.wait
        self._jitter = jitter
        self._held_until_s = 0.0
        self._log = _FailureLog(endpoint, clock_s)

    def hurry(self) -> None:
        """From now on nothing is waited for: what waits gets one more attempt, what comes gets one. From any thread."""
        self._hurried.set()

    def hold(self) -> None:
        """Wait out what the collector asked for with its last answer, before more is taken from the queue."""
        wait_s = self._held_until_s - self._clock_s()
        if wait_s > 0:
            self._wait(wait_s)
        self._held_until_s = 0.0

    def send(self, body: bytes, until_s: float) -> Reply:
        """The last reply: taken, or the failure that ended it at the latest when the clock shows `until_s`."""
        attempts = 0
        while True:
            reply = self._attempt(body, until_s)
            attempts += 1
            if reply.failure is None:
                self._log.worked()
                return reply
            self.failures[reply.failure] += 1
            wait_s = self._backoff_s(attempts) if reply.retry_after_s is None else reply.retry_after_s
            is_last = not reply.is_retryable or self._hurried.is_set() or self._clock_s() + wait_s >= until_s
            if is_last or attempts > 1:  # one failed attempt alone is a kept connection that had gone stale
                self._log.failed(reply)
            if is_last:
                if reply.retry_after_s is not None:
                    self._held_until_s = self._clock_s() + min(reply.retry_after_s, LONGEST_HOLD_S)
                return reply
            self._wait(wait_s)

    def fail_internally(self, error: Exception) -> None:
        """Count and report an error of ours that kept a request from being sent."""
        self.failures[FailureReason.INTERNAL] += 1
        self._log.failed(_internal(error))

    def close(self) -> None:
        self._transport.close()

    def _attempt(self, body: bytes, until_s: float) -> Reply:
        timeout_s = until_s - self._clock_s()
        if timeout_s <= 0:
            return _NO_TIME
        try:
            return self._transport.send(body, timeout_s)
        except Exception as error:
            logger.debug("export attempt raised", exc_info=error)
            return _internal(error)

    def _backoff_s(self, attempts: int) -> float:
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (attempts - 1), LONGEST_BACKOFF_S)
        return backoff_s * (1 - JITTER + 2 * JITTER * self._jitter())


class _FailureLog:
    """Two lines per outage, and one outage a minute: a log line per batch would be an outage of its own."""

    def __init__(self, endpoint: str, clock_s: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._clock_s = clock_s
        self._failing_since_s: float | None = None
        self._reported_s: float | None = None

    def failed(self, reply: Reply) -> None:
        now_s = self._clock_s()
        if self._failing_since_s is not None or (
            self._reported_s is not None and now_s - self._reported_s < LOG_EVERY_S
        ):
            return
        self._failing_since_s = self._reported_s = now_s
        reason = reply.failure.name.lower() if reply.failure is not None else ""
        logger.warning("span export fails endpoint=%s reason=%s detail=%r", self._endpoint, reason, reply.detail)

    def worked(self) -> None:
        if self._failing_since_s is None:
            return
        seconds = self._clock_s() - self._failing_since_s
        self._failing_since_s = None
        logger.info("span export works again endpoint=%s failed_for_s=%.1f", self._endpoint, seconds)


def _internal(error: Exception) -> Reply:
    return Reply(FailureReason.INTERNAL, type(error).__name__)
