"""How much one client may ask for: requests at a time, and requests in any minute.

Owns the counts per client of this frontend and of nobody else; several frontends each have their own. Decides before a body is
read, never queues. Called by `frontend.gate`.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from frontend.api_keys import Client
from frontend.errors import ApiError

logger = logging.getLogger(__name__)

WINDOW_S = 60
CONCURRENT, PER_MINUTE = "concurrent_requests", "requests_per_minute"
REASONS = (CONCURRENT, PER_MINUTE)
LOG_INTERVAL_S = 60.0  # per client: one that does not stop fills no log


@dataclass(slots=True)
class _Usage:
    running: int = 0
    in_window: int = 0
    seconds: deque[list[int]] = field(default_factory=deque)  # [whole second, requests begun in it], oldest first
    quiet_until_s: float = -math.inf


class RateLimits:
    """Limits per client; None is no limit. `clock_s` is monotonic."""

    def __init__(
        self, max_requests: int | None, per_minute: int | None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_requests = max_requests
        self._per_minute = per_minute
        self._clock_s = clock_s
        self._usages: dict[str, _Usage] = {}
        self.refused = dict.fromkeys(REASONS, 0)

    @contextmanager
    def enter(self, client: Client) -> Iterator[None]:
        """One request of `client`, until the block ends. Raises ApiError(429); a refused request counts for no limit."""
        usage = self._usages.setdefault(client.identity, _Usage())
        self._check_running(client, usage)
        self._check_window(client, usage)
        usage.running += 1
        try:
            yield
        finally:
            usage.running -= 1

    def keep(self, identities: Collection[str]) -> None:
        """Forget every other client: the table is never larger than the set of keys."""
        self._usages = {name: usage for name, usage in self._usages.items() if name in identities}

    def _check_running(self, client: Client, usage: _Usage) -> None:
        if self._max_requests is not None and usage.running >= self._max_requests:
            sentence = f"this API key has {usage.running} requests running; the limit is {self._max_requests}"
            raise self._refusal(client, usage, CONCURRENT, sentence, retry_after_s=1)

    def _check_window(self, client: Client, usage: _Usage) -> None:
        """Count this request, or refuse it. Sixty-one counts of whole seconds: never more than the limit in any 60 s."""
        if self._per_minute is None:
            return
        now_s = self._clock_s()
        second = math.floor(now_s)
        while usage.seconds and usage.seconds[0][0] < second - WINDOW_S:
            usage.in_window -= usage.seconds.popleft()[1]
        if usage.in_window >= self._per_minute:
            wait_s = max(1, math.ceil(usage.seconds[0][0] + WINDOW_S + 1 - now_s))
            sentence = f"this API key has made {usage.in_window} requests in a minute; the limit is {self._per_minute}"
            raise self._refusal(client, usage, PER_MINUTE, sentence, retry_after_s=wait_s)
        if not usage.seconds or usage.seconds[-1][0] != second:
            usage.seconds.append([second, 0])
        usage.seconds[-1][1] += 1
        usage.in_window += 1

    def _refusal(self, client: Client, usage: _Usage, reason: str, sentence: str, retry_after_s: int) -> ApiError:
        self.refused[reason] += 1
        now_s = self._clock_s()
        if now_s >= usage.quiet_until_s:
            usage.quiet_until_s = now_s + LOG_INTERVAL_S
            logger.info("client limited client=%r reason=%s", client.label, reason)
        return ApiError(429, sentence, code="rate_limit_exceeded", retry_after_s=retry_after_s)
