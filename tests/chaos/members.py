"""A fleet started by hand: an engine or several, and frontends that join, freeze, die and leave when a test says so. Nobody restarts them.

Knows processes, their logs and their memory. Never speaks HTTP; tests/chaos/crowd.py does.
"""

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.servers import ROOT, clean_environment, command
from tests.timing import TooSlow

START_TIMEOUT_S = 60.0
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
WIDTH = 5  # W of SIM
_LISTENING = re.compile(r" listening url=(http://\S+) ")


def wait_until(holds: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> float:
    """Poll until it holds; returns the seconds it took. TooSlow says `what` did not come true."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > within_s:
            raise TooSlow(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
    return time.monotonic() - started


@dataclass(eq=False)
class Member:
    """One process of the fleet. `url` is set for a frontend once it listens."""

    role: str
    process: subprocess.Popen[bytes]
    log_path: Path
    url: str = ""
    is_frozen: bool = False
    started: float = field(default_factory=time.monotonic)
    harmed: list[tuple[float, float]] = field(default_factory=list)  # when its clients may see a broken connection

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """kill -9, also of a frozen one."""
        self.harmed.append((time.monotonic(), float("inf")))
        self.process.kill()
        self.process.wait()

    def leave(self, within_s: float = 20.0) -> int:
        """SIGTERM; returns the exit code."""
        self.harmed.append((time.monotonic(), float("inf")))
        self.process.terminate()
        return self.process.wait(within_s)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


class Fleet:
    """`frontends` are those that were not ended on purpose. Made by `fleet_in`."""

    def __init__(self, directory: Path, engine_options: tuple[str, ...], num_engines: int) -> None:
        self.directory = directory
        self.addresses = [f"ipc://{directory}/engine-{index}.sock" for index in range(num_engines)]
        self.engine_options = engine_options
        self.frontends: list[Member] = []
        self.everybody: list[Member] = []
        self.engines = [self._start_engine(index) for index in range(num_engines)]

    @property
    def engine(self) -> Member:
        """The first, or the only one."""
        return self.engines[0]

    @property
    def address(self) -> str:
        """Of all engines."""
        return ",".join(self.addresses)

    def _start_engine(self, index: int) -> Member:
        listen = ("--listen", self.addresses[index], "--engine-id", str(index))
        return self._start("engine", *listen, *self.engine_options)

    def start_frontend(self, address: str | None = None) -> Member:
        """Start one and return at once; see `wait_attached`."""
        member = self._start("frontend", "--engine", address or self.address, "--port", "0")
        self.frontends.append(member)
        return member

    def join(self, count: int = 1, address: str | None = None) -> list[Member]:
        """Start frontends together and wait until the engine knows each of them."""
        joined = [self.start_frontend(address) for _ in range(count)]
        for member in joined:
            self.wait_attached(member)
        return joined

    def wait_attached(self, member: Member) -> None:
        def attached() -> bool:
            assert member.is_alive, member.log()[-2000:]
            found = _LISTENING.search(member.log())
            member.url = found[1] if found else ""
            return bool(found) and member.log().count(" attached engine=") >= len(self.engines)

        wait_until(attached, START_TIMEOUT_S, lambda: member.log()[-2000:])

    def drop(self, member: Member) -> None:
        """Kill a frontend and forget it."""
        member.kill()
        self.frontends.remove(member)

    def restart_engine(self, index: int = 0) -> None:
        self.engines[index].kill()
        self.engines[index] = self._start_engine(index)

    def able(self) -> list[Member]:
        """Frontends that can answer now."""
        return [member for member in self.frontends if member.url and member.is_alive and not member.is_frozen]

    def was_harmed(self, url: str, since: float) -> bool:
        """Whether the frontend at `url` was ended after `since` (monotonic): its clients may see a broken connection."""
        return any(end > since for member in self.everybody if member.url == url for _, end in member.harmed)

    def end(self) -> None:
        for member in self.everybody:
            if member.is_alive:
                member.thaw()
                member.process.kill()
                member.process.wait()

    def _start(self, *arguments: str) -> Member:
        log_path = self.directory / f"{arguments[0]}-{len(self.everybody)}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(),
                cwd=ROOT,
            )
        member = Member(arguments[0], process, log_path)
        self.everybody.append(member)
        return member


@contextmanager
def fleet_in(num_frontends: int, *engine_options: str, num_engines: int = 1) -> Iterator[Fleet]:
    """Engines and frontends that are attached; whatever happens, no process is left behind the block."""
    with tempfile.TemporaryDirectory(prefix="drafthouse-chaos-") as directory:
        fleet = Fleet(Path(directory), (*SIM, *engine_options), num_engines)
        try:
            fleet.join(num_frontends)
            yield fleet
        finally:
            fleet.end()
