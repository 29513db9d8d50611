"""Nobody reads what `serve` says, or there is no room for it: it goes on restarting what dies, and ends when told to."""

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.servers import ROOT, clean_environment, command


def soon(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


@contextmanager
def serving(stdout: int, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command("serve", "--executor", "sim", "--port", "0"),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=log,
            env=clean_environment(),
            cwd=ROOT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children()
            process.kill()
            process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def _is_ready(errors: Path) -> bool:
    listening = re.findall(r" listening url=(http://\S+) ", errors.read_text(errors="replace"))
    if not listening:
        return False
    try:
        with urllib.request.urlopen(f"{listening[-1]}/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.HTTPError, OSError):
        return False


def _engine(process: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children() if "engine" in _words(child)[1:4]]


def _words(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_reader_that_left_costs_no_restart_and_no_signal(tmp_path: Path):
    errors = tmp_path / "errors"
    reading, writing = os.pipe()
    with serving(writing, errors) as process:
        os.close(writing)
        with os.fdopen(reading, "rb") as lines:
            assert any(line.startswith(b"running: ") for line in lines), errors.read_text(errors="replace")
        [engine] = _engine(process)
        os.kill(engine, signal.SIGKILL)
        soon(lambda: _engine(process) not in ([], [engine]) and _is_ready(errors), "the engine's restart")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, errors.read_text(errors="replace")
    assert "Traceback" not in errors.read_text(errors="replace")


def test_a_full_disk_keeps_no_server_from_starting_and_ending_in_order(tmp_path: Path):
    errors = tmp_path / "errors"
    with Path("/dev/full").open("wb") as full, serving(full.fileno(), errors) as process:
        soon(lambda: process.poll() is not None or _is_ready(errors), "the start")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, errors.read_text(errors="replace")
    assert "Traceback" not in errors.read_text(errors="replace")
