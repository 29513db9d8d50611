"""Real servers for tests: started as users start them, found by what they print, ended whatever happens.

`with serve("--executor", "sim") as server:` gives a server that is ready. Its log is in `server.log()`, and part of the
error when it does not come up.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parents[2]
_LISTENING = re.compile(r" listening url=(http://\S+) ")
_READY = re.compile(r"^ready after .* on (http://\S+:(\d+)) ", re.MULTILINE)


@dataclass
class Server:
    """A running `drafthouse serve`."""

    base_url: str
    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def pids(self, role: str) -> list[int]:
        """Process ids of the children in a role: engine or frontend."""
        return [child.pid for child in psutil.Process(self.pid).children() if role in _command_line(child)[1:4]]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def command(*arguments: str) -> list[str]:
    """`drafthouse ARGUMENTS` with this interpreter and this tree."""
    return [sys.executable, "-m", "deploy.launcher", *arguments]


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without options of ours, plus `extra`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DRAFTHOUSE_")} | extra


@contextmanager
def serve(*arguments: str, root: Path = ROOT, **environment: str) -> Iterator[Server]:
    """A server with these options on a free port, ready when the block begins; gone, with all its children, behind it.

    `root`: the tree whose code runs.
    """
    port = () if "--port" in arguments else ("--port", "0")
    with tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory:
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command("serve", *port, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment(**environment),
                cwd=root,
                start_new_session=True,
            )
        family = [psutil.Process(process.pid)]
        try:
            yield _wait_ready(process, log_path)
        finally:
            family += _descendants(process.pid)
            _end(process, family)


@contextmanager
def fleet(num_frontends: int, *engine_options: str) -> Iterator[list[str]]:
    """One engine and frontends with a port each, started by hand: base URLs, in order. Nobody restarts what dies."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="drafthouse-test-"))
        address = f"ipc://{directory}/engine.sock"
        stack.enter_context(running("engine", "--listen", address, *engine_options))
        logs = [
            stack.enter_context(running("frontend", "--engine", address, "--port", "0")) for _ in range(num_frontends)
        ]
        yield [_attached_url(log) for log in logs]


@contextmanager
def running(*arguments: str) -> Iterator[Path]:
    """`drafthouse ARGUMENTS` while the block runs; gives the path of its log."""
    with tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory:
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command(*arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment(), cwd=ROOT
            )
        try:
            yield log_path
        finally:
            _end(process, [])


def _attached_url(log_path: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        text = log_path.read_text(errors="replace")
        found = _LISTENING.search(text)
        if found and " attached engine=" in text:
            return found[1]
        if time.monotonic() > deadline:
            raise TimeoutError(f"the frontend did not attach within {READY_TIMEOUT_S:g} s:\n{text[-4000:]}")
        time.sleep(0.02)


def _wait_ready(process: subprocess.Popen[bytes], log_path: Path) -> Server:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        text = log_path.read_text(errors="replace")
        found = _READY.search(text)
        if found:
            return Server(found[1], int(found[2]), process, log_path)
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready:\n{text[-4000:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server was not ready after {READY_TIMEOUT_S:g} s:\n{text[-4000:]}")
        time.sleep(0.02)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen[bytes], family: list[psutil.Process]) -> None:
    """SIGTERM, then SIGKILL for whoever is left; only processes this server started."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in family:
        if left.pid != process.pid and left.is_running():
            left.kill()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []  # it has just died
