"""When the phases of a step ran, by the host's clock or by the device's own events.

Owns the measuring; never synchronises by itself (`DeviceClock.read` is called behind the step's one copy, when the
device has finished anyway). Chosen once at construction of an executor. Imports torch only to make device events, so a
simulated engine may use `HostClock`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from protocol.messages import Phase, PhaseTimes

if TYPE_CHECKING:
    pass

_NOT_RUN = (0, 0)


class PhaseClock(ABC):
    """Use: `start()` once per step, `with phase(...)` around each phase, `read()` when the step's tokens are here."""

    @abstractmethod
    def start(self) -> None:
        """The step begins: forget the last one."""

    @abstractmethod
    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Measure the block; a phase entered twice spans from its first start to its last end."""

    @abstractmethod
    def read(self) -> PhaseTimes:
        """(start, end) per phase in ns since `start`; (0, 0) for a phase that did not run."""


class HostClock(PhaseClock):
    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._started_ns = 0
        self._spans: dict[Phase, tuple[int, int]] = {}

    def start(self) -> None:
        self._spans = {}
        self._started_ns = self._now_ns()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        begun = self._now_ns() - self._started_ns
        try:
            yield
        finally:
            # At least 1 ns long, so that a phase that ran is never mistaken for one that did not.
            ended = max(self._now_ns() - self._started_ns, begun + 1)
            self._spans[phase] = (self._spans.get(phase, (begun, ended))[0], ended)

    def read(self) -> PhaseTimes:
        return PhaseTimes(tuple(self._spans.get(phase, _NOT_RUN) for phase in Phase), on_device=False)


class DeviceClock(PhaseClock):
    """CUDA events on the current stream: what the device spent, not what the host spent launching."""

    def __init__(self) -> None:
        import torch  # a simulated engine must not load it

        self._make_event: Callable[[], torch.cuda.Event] = lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        self._started: torch.cuda.Event = self._make_event()
        self._events: dict[Phase, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def start(self) -> None:
        self._events = {}
        self._started = self._make_event()
        self._started.record()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        begun, ended = self._make_event(), self._make_event()
        begun.record()
        try:
            yield
        finally:
            ended.record()
            self._events[phase] = (self._events.get(phase, (begun, ended))[0], ended)

    def read(self) -> PhaseTimes:
        spans = []
        for phase in Phase:
            if phase not in self._events:
                spans.append(_NOT_RUN)
                continue
            begun, ended = self._events[phase]
            ended.synchronize()  # done already but for the microseconds behind the copy
            start_ns, end_ns = (round(self._started.elapsed_time(event) * 1e6) for event in (begun, ended))
            spans.append((start_ns, max(end_ns, start_ns + 1)))
        return PhaseTimes(tuple(spans), on_device=True)
