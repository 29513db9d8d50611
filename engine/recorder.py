"""torch's profiler as a recorder of windows, and the clock that names the four phases and what drafters do in them.

Owns what exists only while a window is recorded: the profiler, a clock around the executor's own and the ranges of
`engine.stages`. Outside a window the executor has its plain clock and nothing of this module runs. Never writes where users
look; driven by `engine.profiler`. Imports torch only to record.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.clock import PhaseClock
from engine.stages import StageRanges
from protocol.messages import Phase, PhaseTimes

if TYPE_CHECKING:
    import torch

NamedRange = Callable[[str], AbstractContextManager[object]]

# Kineto's own lines on standard error, two per window, are no log lines of ours. Read once, when torch loads.
KINETO_LOG_LEVEL = ("KINETO_LOG_LEVEL", "6")


class Clocked(Protocol):
    """The executor, as far as a recorder needs it."""

    clock: PhaseClock


class ProfiledClock(PhaseClock):
    """Another clock, and a named range around each phase. `num_steps` counts the verifies it saw."""

    def __init__(self, inner: PhaseClock, named_range: NamedRange) -> None:
        self.num_steps = 0
        self._inner = inner
        self._named_range = named_range
        self._phase: str | None = None

    def start(self) -> None:
        self._inner.start()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        self.num_steps += phase is Phase.VERIFY
        before, self._phase = self._phase, phase.name.lower()
        try:
            with self._named_range(self._phase), self._inner.phase(phase):
                yield
        finally:
            self._phase = before

    def stage(self, name: str) -> AbstractContextManager[object]:
        """A range for a part of the phase that runs, named "draft/markov"; none outside the phases."""
        return nullcontext() if self._phase is None else self._named_range(f"{self._phase}/{name}")

    def read(self) -> PhaseTimes:
        return self._inner.read()


class TorchRecorder:
    """Records the calling thread's operations, and the device's, window by window. Step thread only, between steps."""

    def __init__(self, executor: Clocked, *, on_cuda: bool) -> None:
        """Records nothing once: the first profile of a process imports for two seconds, better now than under requests."""
        self._executor = executor
        self._on_cuda = on_cuda
        self._profiler: torch.profiler.profile | None = None
        self._clock: ProfiledClock | None = None
        self._stages = StageRanges()
        with self._make_profiler(on_cuda=False):  # CUPTI is loaded by the first window: until then it costs nothing
            pass

    @property
    def num_steps(self) -> int:
        """Of the window that is being recorded."""
        return 0 if self._clock is None else self._clock.num_steps

    def begin(self) -> None:
        """Start a window. Raises whatever torch raises; then nothing is recorded and the clock is the plain one."""
        profiler = self._make_profiler(on_cuda=self._on_cuda)
        clock = ProfiledClock(self._executor.clock, _device_range if self._on_cuda else _host_range)
        self._stages.install(clock.stage)
        try:
            profiler.start()
        except BaseException:
            self._stages.remove()
            raise
        self._profiler, self._clock = profiler, clock
        self._executor.clock = clock

    def end(self, path: Path) -> None:
        """Stop the window and write its Chrome trace. Whatever is raised, nothing is recorded afterwards.

        Cost, all of it with the interpreter locked: 5 to 20 us per operation (torch 2.13, CPU).
        """
        profiler, clock = self._profiler, self._clock
        if profiler is None or clock is None:
            raise RuntimeError("no window is being recorded")
        self._profiler = self._clock = None
        self._executor.clock = clock._inner
        self._stages.remove()
        profiler.stop()
        profiler.export_chrome_trace(str(path))

    def _make_profiler(self, *, on_cuda: bool) -> "torch.profiler.profile":
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        return profile(activities=activities, acc_events=False)  # accumulating would parse every event in Python


def quiet_kineto() -> None:
    """Must run before torch is imported. A level that somebody set stays."""
    os.environ.setdefault(*KINETO_LOG_LEVEL)


def _host_range(name: str) -> AbstractContextManager[object]:
    from torch.profiler import record_function

    return record_function(name)


@contextmanager
def _device_range(name: str) -> Iterator[None]:
    """In the trace, and for Nsight as an NVTX range."""
    import torch

    with ExitStack() as ranges:
        ranges.enter_context(_host_range(name))
        ranges.enter_context(torch.cuda.nvtx.range(name))
        yield
