"""Keeps processes running, and ends them in order.

Owns starting, restarting with back-off, giving up, and the order of stopping: the first group is told and awaited before
the next. Says every death and what follows from it. Never reads what its processes say and knows nothing of engines and
frontends. Used by deploy.serve.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

FIRST_BACK_OFF_S = 0.2  # doubles with every quick death in a row
MAX_BACK_OFF_S = 10.0
STABLE_S = 60.0  # who dies sooner after its start dies quickly; one longer life forgives what was before
MAX_QUICK_DEATHS = 6  # in a row; then everything ends
HURRY_S = 3.0  # that a process told twice gets for its last words
EXIT_BAD_OPTIONS = 2
EXIT_FAILURE = 1
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """One process to keep. Groups stop in ascending order; `stop_timeout_s` after SIGTERM comes SIGKILL."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    group: int
    stop_timeout_s: float


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that is used."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Spawn = Callable[[Program], Awaitable[Process]]


@dataclass
class QuickDeaths:
    """How often a program died in a row without having lived for STABLE_S."""

    count: int = 0

    def after(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start, after a life of `lived_s`; None: it is hopeless."""
        if lived_s >= STABLE_S:
            self.count = 0
            return FIRST_BACK_OFF_S
        self.count += 1
        if self.count >= MAX_QUICK_DEATHS:
            return None
        return min(FIRST_BACK_OFF_S * 2.0 ** (self.count - 1), MAX_BACK_OFF_S)


@dataclass
class _Child:
    program: Program
    process: Process | None = None
    started_s: float = 0.0
    num_restarts: int = 0
    deaths: QuickDeaths = field(default_factory=QuickDeaths)


class Supervisor:
    """Runs programs until told to stop or until one cannot be kept alive. Use once."""

    def __init__(
        self,
        programs: Sequence[Program],
        say: Say,
        *,
        spawn: Spawn | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._children = [_Child(program) for program in programs]
        self._say = say
        self._spawn = spawn or _spawn
        self._clock = clock
        self._sleep = sleep
        self._end: asyncio.Future[int]
        self._hurried: asyncio.Event
        self._forced: asyncio.Event
        self._restarted: asyncio.Event
        self._is_stopping = False
        self._was_up = False

    def is_up(self) -> None:
        """The whole answers: from now on what dies is restarted. Before, a death ends everything."""
        self._was_up = True

    def pids(self) -> dict[str, int]:
        return {child.program.name: child.process.pid for child in self._children if child.process is not None}

    def status(self) -> str:
        """One line about every process: its id, or that it is down, and how often it was restarted."""
        return ", ".join(map(_status, self._children))

    async def restarted(self) -> None:
        """Wait until something that died was started again since the last call."""
        await self._restarted.wait()
        self._restarted.clear()

    async def run(self) -> int:
        """Returns the exit code: 0 when told to stop and everything stopped in order, 2 when a process found its options
        unusable, 1 when one could not be kept running or did not stop in order."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._hurried, self._forced, self._restarted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.signalled, number)
        keepers: list[asyncio.Task[None]] = []
        try:
            for child in self._children:
                if not await self._start(child):
                    self._finish(EXIT_FAILURE)
                    break
                keepers.append(asyncio.create_task(self._keep(child), name=f"keep {child.program.name}"))
            code = await self._end
        finally:
            self._is_stopping = True
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            all_in_order = await self._stop_all()
        return code if code or all_in_order else EXIT_FAILURE

    def signalled(self, number: int) -> None:
        """The first stops in order, the second hurries, the third kills. Called by the event loop on a signal."""
        if self._hurried.is_set():
            self._say("killing what is left")
            self._forced.set()
        elif self._is_stopping:
            self._say("stopping at once")
            self._hurried.set()
        else:
            name = signal.Signals(number).name
            self._say(f"{name} received, stopping in order (once more to hurry, again to kill): {self.status()}")
            self._finish(0)

    def _finish(self, code: int) -> None:
        self._is_stopping = True
        if not self._end.done():
            self._end.set_result(code)

    # ---- keeping ----

    async def _start(self, child: _Child) -> bool:
        """Whether it runs now: there may be no memory or no process ids left, which passes."""
        child.started_s = self._clock()
        try:
            child.process = await self._spawn(child.program)
        except OSError as error:
            self._say(f"{child.program.name} could not be started: {error}")
            return False
        return True

    async def _keep(self, child: _Child) -> None:
        """Wait for the death of one process and decide what follows from it."""
        while True:
            code, how = await self._death(child)
            if self._is_stopping:
                return  # whoever stops it looks at how it ended
            child.process = None
            back_off_s = child.deaths.after(self._clock() - child.started_s)
            if not self._was_up or code == EXIT_BAD_OPTIONS or back_off_s is None:
                self._give_up(child, code, how)
                return
            quick = f" (quick death {child.deaths.count} of {MAX_QUICK_DEATHS})" if child.deaths.count else ""
            self._say(f"{child.program.name} ended with {how}; starting it again in {back_off_s:g} s{quick}")
            await self._sleep(back_off_s)
            child.num_restarts += 1
            if await self._start(child):
                self._restarted.set()

    async def _death(self, child: _Child) -> tuple[int, str]:
        """The exit code, and the same in words."""
        if child.process is None:
            return EXIT_FAILURE, "no process at all"
        code = await child.process.wait()
        return code, _how(code)

    def _give_up(self, child: _Child, code: int, how: str) -> None:
        name, count = child.program.name, child.deaths.count
        if not self._was_up:
            why = f"{name} ended with {how} before everything was up"
        elif code == EXIT_BAD_OPTIONS:
            why = f"{name} ended with {how}: its options cannot be used"
        else:
            why = f"{name} died {count} times in a row within {STABLE_S:g} s of its start, at last with {how}"
        self._say(f"{why}; stopping everything")
        self._finish(EXIT_BAD_OPTIONS if code == EXIT_BAD_OPTIONS else EXIT_FAILURE)

    # ---- stopping ----

    async def _stop_all(self) -> bool:
        """Group by group; whether each ended by itself, as it was told."""
        is_in_order = True
        for group in sorted({child.program.group for child in self._children}):
            members = [child for child in self._children if child.program.group == group]
            is_in_order &= all(await asyncio.gather(*(self._stop(child) for child in members)))
        return is_in_order

    async def _stop(self, child: _Child) -> bool:
        process = child.process
        if process is None:
            return True  # its death was told
        self._tell(process)
        has_ended = await self._ends(process, child.program.stop_timeout_s, unless=self._hurried)
        if not has_ended and self._hurried.is_set():
            self._tell(process)
            has_ended = await self._ends(process, HURRY_S, unless=self._forced)
        if not has_ended:
            self._say(f"{child.program.name} did not end in time; killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return self._hurried.is_set()
        code = await process.wait()
        if code in (0, -signal.SIGTERM):  # the latter: told before it could listen
            return True
        self._say(f"{child.program.name} ended with {_how(code)}")
        return False

    @staticmethod
    def _tell(process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    @staticmethod
    async def _ends(process: Process, timeout_s: float, *, unless: asyncio.Event) -> bool:
        ended, interrupted = asyncio.create_task(process.wait()), asyncio.create_task(unless.wait())
        done, _ = await asyncio.wait({ended, interrupted}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, interrupted):
            task.cancel()
        return ended in done


async def _spawn(program: Program) -> Process:
    return await asyncio.create_subprocess_exec(
        *program.command,
        env=program.environment,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the supervisor, which stops the others in order
        preexec_fn=_die_with(os.getpid()),
    )


def _die_with(parent: int) -> Callable[[], None]:
    """For the child between fork and exec: get SIGTERM when the supervisor dies, whatever kills it (Linux only)."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    library = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: after it, only the call is safe

    def bind() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_FAILURE)  # it died before the call

    return bind


def _status(child: _Child) -> str:
    where = "down" if child.process is None else f"pid {child.process.pid}"
    times = f", restarted {child.num_restarts}x" if child.num_restarts else ""
    return f"{child.program.name} ({where}{times})"


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # the real-time ones have no names
        return f"signal {-code}"
