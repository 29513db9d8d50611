"""Keeps processes running, and ends them in order.

Owns starting, restarting with back-off, giving up, and the order of stopping: the first group is told and awaited before
the next. Never reads what its processes say and knows nothing of engines and frontends. Used by deploy.serve.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST_BACK_OFF_S = 0.2  # doubles with every death within STABLE_S
MAX_BACK_OFF_S = 10.0
STABLE_S = 60.0
MAX_DEATHS = 6  # of one process within STABLE_S; then everything ends
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


@dataclass
class _Child:
    program: Program
    process: asyncio.subprocess.Process | None = None
    deaths: deque[float] = field(default_factory=deque)  # times of the recent ones, monotonic seconds


class Supervisor:
    """Runs programs until told to stop or until one cannot be kept alive. Use once."""

    def __init__(self, programs: Sequence[Program], say: Say) -> None:
        self._children = [_Child(program) for program in programs]
        self._say = say
        self._end: asyncio.Future[int]
        self._forced: asyncio.Event
        self._is_stopping = False
        self._was_up = False

    def is_up(self) -> None:
        """The whole answers: from now on what dies is restarted. Before, a death ends everything."""
        self._was_up = True

    def pids(self) -> dict[str, int]:
        return {child.program.name: child.process.pid for child in self._children if child.process is not None}

    async def run(self) -> int:
        """Returns the exit code: 0 when stopped by a signal, else that of the process that could not be kept."""
        loop = asyncio.get_running_loop()
        self._end, self._forced = loop.create_future(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        keepers: list[asyncio.Task[None]] = []
        try:
            for child in self._children:
                await self._start(child)
                keepers.append(asyncio.create_task(self._keep(child), name=f"keep {child.program.name}"))
            return await self._end
        finally:
            self._is_stopping = True
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop_all()

    def _on_signal(self, number: int) -> None:
        if self._is_stopping:
            self._say("stopping at once")
            self._forced.set()
            return
        self._is_stopping = True
        self._say(f"{signal.Signals(number).name} received, stopping in order (once more to stop at once)")
        if not self._end.done():
            self._end.set_result(0)

    async def _start(self, child: _Child) -> None:
        parent = os.getpid()
        child.process = await asyncio.create_subprocess_exec(
            *child.program.command,
            env=child.program.environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the supervisor, which stops the others in order
            preexec_fn=_die_with(parent),
        )

    async def _keep(self, child: _Child) -> None:
        """Wait for the death of one process and decide what follows from it."""
        while child.process is not None:
            code = await child.process.wait()
            if self._is_stopping:
                return
            name, now = child.program.name, time.monotonic()
            self._say(f"{name} ended with {_how(code)}")
            child.deaths.append(now)
            while now - child.deaths[0] > STABLE_S:
                child.deaths.popleft()
            if not self._was_up or code == EXIT_BAD_OPTIONS or len(child.deaths) >= MAX_DEATHS:
                self._give_up(name, code)
                return
            back_off_s = min(FIRST_BACK_OFF_S * 2 ** (len(child.deaths) - 1), MAX_BACK_OFF_S)
            self._say(f"restarting {name} in {back_off_s:g} s")
            await asyncio.sleep(back_off_s)
            await self._start(child)

    def _give_up(self, name: str, code: int) -> None:
        self._say(f"{name} cannot be kept running; stopping everything")
        self._is_stopping = True
        if not self._end.done():
            self._end.set_result(code if code > 0 else EXIT_FAILURE)

    async def _stop_all(self) -> None:
        """Group by group; a second signal kills what is left."""
        for group in sorted({child.program.group for child in self._children}):
            members = [child for child in self._children if child.program.group == group]
            await asyncio.gather(*(self._stop(child) for child in members))

    async def _stop(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended = asyncio.create_task(process.wait())
        forced = asyncio.create_task(self._forced.wait())
        done, _ = await asyncio.wait(
            {ended, forced}, timeout=child.program.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()
        if ended not in done:
            self._say(f"{child.program.name} did not end in time; killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await ended


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


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
