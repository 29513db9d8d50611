"""Bounds on time in tests. A machine that is busy elsewhere can break one without any defect, a defect breaks it every time:
so a missed bound raises TooSlow, and the runner (pyproject.toml, `--only-rerun`) tries such a test, and only such a test, twice more.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlow(AssertionError):
    """A bound on time was missed; every other assertion of a test has to hold the first time."""


def at_most_s(took_s: float, limit_s: float, what: str) -> None:
    """Raise TooSlow, naming what it was, when it took longer than the limit (both in seconds)."""
    if not took_s <= limit_s:
        raise TooSlow(f"{what}: {took_s:.3f} s, and {limit_s:g} s is the limit")


@contextmanager
def within_s(limit_s: float, what: str) -> Iterator[None]:
    """The block may take this many seconds. An error raised in it is passed on, whatever time it took."""
    started_s = time.monotonic()
    yield
    at_most_s(time.monotonic() - started_s, limit_s, what)
