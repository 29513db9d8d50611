"""What SIGTERM does to an engine, a frontend, and both: who is told, who may finish, and what the exit codes say."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.cases.client import Client
from tests.cases.crowd import OpenRequest
from tests.e2e.servers import STOP_TIMEOUT_S, clean_environment, command, serve
from tests.timing import at_most_s

SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
RUN = [582, 827, 1296]
ALL = " one two three"
LISTENING = re.compile(r" listening url=(http://\S+) ")


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def tell(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)


@dataclass
class Pair:
    """An engine and one frontend, started by hand."""

    engine: Started
    frontend: Started
    client: Client


def soon(holds: Callable[[], object], what: str, within_s: float = 15.0) -> None:
    started_s = time.monotonic()
    while not holds():
        at_most_s(time.monotonic() - started_s, within_s, f"not yet: {what}")
        time.sleep(0.01)


@contextmanager
def started(*arguments: str) -> Iterator[Started]:
    with tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory:
        log_path = Path(directory) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command(*arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment()
            )
        try:
            yield Started(process, log_path)
        finally:
            process.kill()
            process.wait()


@contextmanager
def pair(engine_options: tuple[str, ...] = (), frontend_options: tuple[str, ...] = ()) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        address = f"ipc://{directory}/engine"
        with (
            started("engine", "--listen", address, *SIM, *engine_options) as engine,
            started("frontend", "--engine", address, "--port", "0", *frontend_options) as frontend,
        ):
            soon(lambda: LISTENING.search(frontend.log()), "the frontend listens", 60)
            found = LISTENING.search(frontend.log())
            assert found is not None
            client = Client(found[1])
            soon(lambda: ready(client) == 200, "the engine is attached", 60)
            yield Pair(engine, frontend, client)


def ready(client: Client) -> int:
    return status_of(client, "/ready")


def status_of(client: Client, path: str) -> int:
    return requests.get(client.base_url + path, timeout=5).status_code


def refuses(client: Client) -> bool:
    """Whether a new request is refused as one that may come back later."""
    response = requests.post(client.base_url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=10)
    if response.status_code == 200:
        return False
    client.assert_error(response, status=503)
    assert int(response.headers["Retry-After"]) >= 1
    return True


def stream(client: Client, num_steps: int, step_ms: float = 20) -> OpenRequest:
    """A stream that has begun and takes so many steps."""
    sim = {"runs": [RUN] * num_steps, "step_ms": step_ms}
    return OpenRequest(client, {"prompt": "x", "max_tokens": 8000, "stream": True, "sim": sim}).wait_for(1)


def endless(client: Client) -> OpenRequest:
    return stream(client, num_steps=2000, step_ms=20)


def assert_whole(one: OpenRequest, num_steps: int) -> None:
    one.read_to_end()
    events = one.data()
    assert events[-1] == "[DONE]"
    assert "".join(c["text"] for event in events[:-1] for c in event["choices"]) == ALL * num_steps


def assert_told(one: OpenRequest, words: str) -> None:
    """One error event with these words, then the end."""
    one.read_to_end(within_s=15)
    events = one.data()
    assert events[-1] == "[DONE]"
    assert [event for event in events[:-1] if "error" in event] == events[-2:-1]
    assert words in events[-2]["error"]["message"]
    assert events[-2]["error"]["type"] == "overloaded_error"


# ---- a frontend ----


def test_a_frontend_told_to_end_is_not_ready_at_once_and_finishes_what_runs() -> None:
    with pair(frontend_options=("--drain-timeout-s", "60")) as it, stream(it.client, 100) as running:
        it.frontend.tell()
        soon(lambda: ready(it.client) == 503, "it is not ready", 1.0)
        assert status_of(it.client, "/health") == 200
        assert refuses(it.client)
        assert_whole(running, 100)
        assert it.frontend.code() == 0
        assert "stopped aborted_sequences=0" in it.frontend.log()
        assert it.engine.process.poll() is None


def test_a_frontend_tells_those_who_do_not_finish_in_time() -> None:
    with pair(frontend_options=("--drain-timeout-s", "0.3")) as it, endless(it.client) as running:
        it.frontend.tell()
        assert_told(running, "this server is shutting down")
        assert it.frontend.code() == 0
        assert "stopped aborted_sequences=1" in it.frontend.log()


def test_a_second_signal_hurries_a_frontend() -> None:
    with pair(frontend_options=("--drain-timeout-s", "600")) as it, endless(it.client) as running:
        it.frontend.tell()
        soon(lambda: ready(it.client) == 503, "it drains")
        it.frontend.tell(signal.SIGINT)
        assert_told(running, "this server is shutting down")
        assert it.frontend.code() == 0


# ---- an engine ----


def test_a_draining_engine_finishes_what_runs_and_its_frontend_refuses_the_rest() -> None:
    with pair(engine_options=("--drain-timeout-s", "60")) as it, stream(it.client, 100) as running:
        it.engine.tell()
        soon(lambda: refuses(it.client), "new requests are refused")
        assert it.engine.process.poll() is None, "it finishes what runs"
        assert ready(it.client) == 503
        assert_whole(running, 100)
        assert it.engine.code() == 0
        soon(lambda: ready(it.client) == 503, "nobody is left to serve")
        assert refuses(it.client)
        assert status_of(it.client, "/health") == 200
        assert it.frontend.process.poll() is None


def test_an_engine_tells_those_who_do_not_finish_in_time() -> None:
    with pair(engine_options=("--drain-timeout-s", "0.3")) as it, endless(it.client) as running:
        it.engine.tell()
        assert_told(running, "the engine is shutting down")
        assert it.engine.code() == 0
        soon(lambda: it.client.metrics(), "the frontend lives")
        finished = [s for s, v in it.client.metrics().items() if s.startswith("vllm:request_success_total") and v]
        assert len(finished) == 1
        assert 'finished_reason="abort"' in finished[0]


def test_a_second_signal_hurries_an_engine() -> None:
    with pair(engine_options=("--drain-timeout-s", "600")) as it, endless(it.client) as running:
        it.engine.tell()
        soon(lambda: refuses(it.client), "it drains")
        it.engine.tell()
        assert_told(running, "the engine is shutting down")
        assert it.engine.code() == 0


# ---- both, under a supervisor ----


def test_a_server_told_to_end_finishes_what_runs() -> None:
    with serve(*SIM, "--drain-timeout-s", "60") as server:
        with stream(Client(server.base_url), 60) as running:
            server.process.send_signal(signal.SIGTERM)
            soon(lambda: ready(Client(server.base_url)) == 503, "it is not ready", 2.0)
            assert_whole(running, 60)
        assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_server_told_twice_still_tells_its_clients() -> None:
    with serve(*SIM, "--drain-timeout-s", "600") as server:
        with endless(Client(server.base_url)) as running:
            server.process.send_signal(signal.SIGINT)
            soon(lambda: "stopping in order" in server.log(), "it was told")
            server.process.send_signal(signal.SIGINT)
            assert_told(running, "this server is shutting down")
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert "killing" not in server.log()


def test_a_server_says_what_died_what_it_does_about_it_and_when_it_is_ready_again() -> None:
    with serve(*SIM) as server:
        soon(lambda: "running: engine" in server.log(), "the status is said")
        os.kill(server.pids("frontend")[0], signal.SIGKILL)
        soon(lambda: "ready again after" in server.log(), "it is ready again", 30)
        log = server.log()
        assert "frontend 1 ended with signal SIGKILL; starting it again in 0.2 s (quick death 1 of 6)" in log
        last = [line for line in log.splitlines() if line.startswith("ready again after")][-1]
        assert re.search(r"frontend 1 \(pid \d+, restarted 1x\)$", last)
        assert ready(Client(server.base_url)) == 200
