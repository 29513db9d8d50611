"""Until when a request may take: the client's `X-Request-Timeout`, else the server's `--request-timeout-s`.

Owns the header's grammar and the moment at which a request is late. Only time that is left ever goes to an engine, never a
time of day, so that no two machines' clocks must agree. Never aborts anything itself. Used by `frontend.completions`, and by
`frontend.generation` for what an engine is told.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from frontend.errors import ApiError, clipped, invalid

HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400.0
# The engine ends a late request between two steps and says so. An engine that is busy for longer, and a client that does
# not read, must not make the request longer: after this the frontend ends it by itself.
GRACE_S = 0.25
# Two clocks that should run alike may differ by some 100 parts per million: the engine's may say first that time is up.
CLOCK_DRIFT = 0.001
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Deadline:
    """One request's time. `began_s` on the monotonic `clock` of this process."""

    began_s: float
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def remaining_ns(self) -> int:
        """What is left for whoever takes the request over now; 0 when nothing is."""
        return max(0, int((self.began_s + self.timeout_s - self.clock()) * 1e9))

    @property
    def has_passed(self) -> bool:
        return self.clock() - self.began_s >= self.timeout_s * (1 - CLOCK_DRIFT)

    def check(self) -> None:
        """Raise what the client gets when it is too late to begin."""
        if self.has_passed:
            raise self.error()

    def error(self) -> ApiError:
        """504: unlike a 503, trying again at once with the same patience will not help."""
        return ApiError(504, f"the request was not finished within its {self.timeout_s:g} s", code="deadline_exceeded")

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Bound a wait for the engine or for the client. Raises `error` when it is over and the engine has not spoken."""
        try:
            async with asyncio.timeout(max(0.0, self.began_s + self.timeout_s + GRACE_S - self.clock())):
                yield
        except TimeoutError:
            raise self.error() from None


def deadline_of(headers: Sequence[str], default_s: float | None, began_s: float) -> Deadline | None:
    """`headers`: every value of `X-Request-Timeout`. Raises ApiError(400) for one that is no number of seconds."""
    if not headers:
        return None if default_s is None else Deadline(began_s, default_s)
    if len(headers) > 1:
        raise invalid(f"{HEADER} is given {len(headers)} times; one is meant", HEADER)
    text = headers[0].strip()
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(
            f"{HEADER} is a decimal number of seconds above 0 and up to {MAX_TIMEOUT_S:g}, got {clipped(text)}", HEADER
        )
    return Deadline(began_s, seconds)
