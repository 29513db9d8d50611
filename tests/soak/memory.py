"""Resident memory of processes over time: samples in a thread, and the line through them.

Owns sampling and least squares. Never decides what is too much.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from tests.chaos.members import Member

INTERVAL_S = 1.0
WARM_UP_S = 20.0  # of a process: imports, first pages of every arena
MIN_SECONDS = 30.0  # shorter lives say nothing about slopes


@dataclass(frozen=True)
class Series:
    """One process. Sizes in MB of 10^6 bytes; `growth_mb` between the means of the first and the last tenth."""

    name: str
    seconds: float
    last_mb: float
    slope_mb_per_h: float
    growth_mb: float


class Memory:
    """Samples whoever `members` names until stopped."""

    def __init__(self) -> None:
        self._samples: dict[Member, list[tuple[float, float]]] = {}
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, members: Callable[[], Sequence[Member]]) -> None:
        self._thread = threading.Thread(target=self._run, args=(members,), name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(5)

    def series(self) -> list[Series]:
        """Of every process that lived long enough, longest first."""
        found = [_series(member, samples) for member, samples in self._samples.items()]
        return sorted((one for one in found if one is not None), key=lambda one: -one.seconds)

    def _run(self, members: Callable[[], Sequence[Member]]) -> None:
        while not self._is_over.wait(INTERVAL_S):
            for member in members():
                try:
                    sample = (time.monotonic() - member.started, member.rss_bytes() / 1e6)
                except psutil.NoSuchProcess:
                    continue  # it was ended this moment
                self._samples.setdefault(member, []).append(sample)


def _series(member: Member, samples: list[tuple[float, float]]) -> Series | None:
    warm = [sample for sample in samples if sample[0] >= WARM_UP_S]
    if len(warm) < 3 or warm[-1][0] - warm[0][0] < MIN_SECONDS:
        return None
    tenth = max(1, len(warm) // 10)
    first, last = (sum(size for _, size in part) / len(part) for part in (warm[:tenth], warm[-tenth:]))
    name = f"{member.role} {member.process.pid}"
    return Series(name, warm[-1][0] - warm[0][0], warm[-1][1], slope(warm) * 3600, last - first)


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
