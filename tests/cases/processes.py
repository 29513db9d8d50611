"""The processes behind one base URL, found by the port they listen on, and commands that are expected to end by themselves.

Knows what any operator can see: ports, parents, command lines, memory. Used where a case kills, restarts or refuses.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.cases.client import Client
from tests.timing import at_most_s

DRAFTHOUSE = str(Path(sys.executable).parent / "drafthouse")


@dataclass(frozen=True)
class Processes:
    """Process ids of one running server: the supervisor, its engine and its frontends."""

    supervisor: int
    engine: int
    frontends: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (self.supervisor, self.engine, *self.frontends)


def listeners(port: int) -> list[int]:
    return sorted(
        {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        }
    )


def processes_of(client: Client) -> Processes:
    """Of a server started by `drafthouse serve`."""
    port = urlsplit(client.base_url).port
    assert port is not None
    frontends = [pid for pid in listeners(port) if "frontend" in _command(pid)]
    assert frontends, f"nobody listens on {port}"
    supervisor = psutil.Process(frontends[0]).parent()
    assert supervisor is not None
    engines = [child.pid for child in supervisor.children() if "engine" in _role(child.pid)]
    assert len(engines) == 1, [_command(child.pid) for child in supervisor.children()]
    return Processes(supervisor.pid, engines[0], tuple(frontends))


def _command(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def _role(pid: int) -> str:
    """The words of the command line that name a role: frontends have an --engine option too."""
    words = psutil.Process(pid).cmdline()
    return " ".join(word for word in words[:6] if word in ("engine", "frontend"))


@contextmanager
def unharmed(client: Client) -> Iterator[None]:
    """LIVE around a block: the same processes, /health at once, and the probe gives the same bytes."""
    before, text = processes_of(client), client.probe()
    yield
    client.assert_live(text)
    assert processes_of(client) == before, "a process was replaced"


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


@dataclass(frozen=True)
class Ended:
    """How a command ended by itself."""

    code: int
    wall_s: float
    output: str
    peak_bytes: int  # of the command's own process


def run_to_end(*command: str, within_s: float = 30.0, environment: dict[str, str] | None = None) -> Ended:
    """Run a command that should end; it is killed, and that is a failure, when it does not within the time."""
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, _peak_bytes(process.pid))
                at_most_s(time.monotonic() - started, within_s, f"still running: {command}")
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        wall_s = time.monotonic() - started
        output.seek(0)
        return Ended(process.returncode, wall_s, output.read().decode(errors="replace"), peak)


@contextmanager
def warm_starts(role: str) -> Iterator[Callable[..., Ended]]:
    """Inside the block the given function starts the role with its arguments, from one warm process, and waits for its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cases.many_starts", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )

    def start(*arguments: str) -> Ended:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        process.stdin.flush()
        return Ended(*json.loads(process.stdout.readline()))

    with process:
        yield start


def _peak_bytes(pid: int) -> int:
    """High-water mark of the resident memory of a process and its children."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return max(int(process.memory_info().rss) for process in family)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(holds: Callable[[], bool], within_s: float, what: str) -> float:
    """Poll until it holds; returns the seconds it took."""
    started = time.monotonic()
    while not holds():
        at_most_s(time.monotonic() - started, within_s, f"not yet: {what}")
        time.sleep(0.01)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
