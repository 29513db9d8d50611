"""DEATH: killed processes and exit codes. Equal request ids and bursts: test_death_crowds.py."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from deploy.supervisor import MAX_QUICK_DEATHS
from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, Client, parse_metrics, strict_json, together, total
from tests.cases.crowd import OpenRequest, leave_all
from tests.cases.laws import assert_well_formed, labelled
from tests.cases.processes import (
    DRAFTHOUSE,
    free_port,
    is_running,
    listeners,
    processes_of,
    run_to_end,
    wait_until,
)
from tests.e2e.servers import Server, serve
from tests.timing import within_s

RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
LONG_SCRIPT = {"runs": [RUN] * 500, "step_ms": 20}
LONG_STREAM = {"prompt": "x", "max_tokens": 4000, "stream": True, "sim": LONG_SCRIPT}
LONG_CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True, "sim": LONG_SCRIPT}


def ready(client: Client) -> int:
    return requests.get(client.base_url + "/ready", timeout=5).status_code


@contextmanager
def two_processes(
    directory: Path, *options: str
) -> Iterator[tuple[Client, subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Engine and frontend as an operator starts them by hand: nobody restarts what dies."""
    address, port = f"ipc://{directory}/engine.sock", free_port()
    with ExitStack() as stack:
        commands = (
            ("engine", "--listen", address, *SIM, *options),
            ("frontend", "--engine", address, "--port", str(port)),
        )
        started = []
        for command in commands:
            process = subprocess.Popen([DRAFTHOUSE, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(_end, process)
            started.append(process)
        client = Client(f"http://127.0.0.1:{port}")
        wait_until(lambda: _answers(client), 20, "both processes are up")
        yield client, started[0], started[1]


def _answers(client: Client) -> bool:
    try:
        return ready(client) == 200
    except requests.RequestException:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# ---- DEATH-1: vllm-project/vllm#21728 ----


TEN_ROWS = ("--max-num-seqs", "10")


def open_and_waiting(client: Client) -> list[OpenRequest]:
    """10 streams that have begun, and 5 requests in the queue: three of them streams, two not."""
    streams = [open_one(client, index) for index in range(10)]
    together([lambda one=one: one.wait_for(2) for one in streams], width=10)
    queued = [open_one(client, index, stream=index < 3) for index in range(5)]
    wait_until(lambda: gauge(client, "waiting") == 5, 5, "five wait")
    assert gauge(client, "running") == 10
    return [*streams, *queued]


def open_one(client: Client, index: int, stream: bool = True) -> OpenRequest:
    """Ten seconds of work; every second request is a chat."""
    if index % 2:
        return OpenRequest(client, {**LONG_CHAT, "stream": stream}, CHAT)
    return OpenRequest(client, {**LONG_STREAM, "stream": stream})


def gauge(client: Client, name: str) -> float:
    return total(client.metrics(), f"vllm:num_requests_{name}")


def assert_all_told(opened: list[OpenRequest]) -> None:
    """Streams that had begun end with one error event and [DONE], everything else with a 503; nobody hangs."""
    together([lambda one=one: one.read_to_end(within_s=20) for one in opened], width=15)
    for one in opened[:10]:
        events = one.data()
        assert events[-1] == "[DONE]"
        assert [event for event in events[:-1] if "error" in event] == events[-2:-1]
    for one in opened[10:]:
        assert one.status == 503, one.received[:300]
        assert strict_json(one.received.split(b"\r\n\r\n", 1)[1].strip())["error"]["message"]
        assert b"retry-after:" in one.received.lower()
    leave_all(opened)


def assert_new_ones_refused(client: Client) -> None:
    for path in (COMPLETIONS, CHAT):
        for stream in (False, True):
            what = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
            with within_s(1.0, "refusing a new request"):
                response = client.post(path, {**what, "max_tokens": 1, "stream": stream})
            client.assert_error(response, status=503)
            assert int(response.headers["Retry-After"]) >= 1


def test_death_1_a_killed_engine_is_noticed_and_told_to_everyone(tmp_path: Path) -> None:
    with two_processes(tmp_path, *TEN_ROWS) as (client, engine, _):
        before = client.metrics()
        opened = open_and_waiting(client)
        with within_s(2.0, "telling everyone"):
            engine.kill()
            engine.wait()
            wait_until(lambda: ready(client) == 503, 2, "/ready says 503")
            assert_all_told(opened)
        assert client.get("/health").status_code == 200, "the frontend lives"
        assert_new_ones_refused(client)
        assert_metrics_of_a_lost_engine(client, before)


def assert_metrics_of_a_lost_engine(client: Client, before: dict[str, float]) -> None:
    """`engine_up` 0, gauges withdrawn, counters kept."""
    samples = client.metrics()
    assert total(samples, "drafthouse:engine_up") == 0
    assert not [series for series in samples if series.startswith("vllm:num_requests_running")]
    assert not [series for series in samples if series.startswith("vllm:kv_cache_usage_perc")]
    generation = "vllm:generation_tokens_total"
    assert total(samples, generation) > total(before, generation)
    errors = labelled(samples, "vllm:request_success_total", finished_reason="error")
    assert errors == 15, "every open request is counted once"


def test_death_1_an_engine_that_returns_is_used_again_with_counters_from_zero(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (client, engine, _):
        client.complete(prompt="x", max_tokens=100, sim={"runs": [RUN] * 4})
        engine.kill()
        engine.wait()
        wait_until(lambda: ready(client) == 503, 2, "/ready says 503")
        command = [DRAFTHOUSE, "engine", "--listen", f"ipc://{tmp_path}/engine.sock", *SIM]
        again = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: ready(client) == 200, 15, "the new engine is in use")
            client.complete(prompt="x", max_tokens=100, sim={"runs": [RUN]})
            samples = client.metrics()
            assert total(samples, "vllm:spec_decode_num_accepted_tokens_total") == 5
            assert total(samples, "vllm:generation_tokens_total") == 6
            assert total(samples, "drafthouse:engine_up") == 1
            assert_well_formed(client.get("/metrics").text)
        finally:
            _end(again)


@pytest.mark.parametrize("frontends", [1, 2] if IS_LONG else [2])
def test_death_1_the_supervisor_restarts_a_killed_engine(frontends: int) -> None:
    with serve(*SIM, *TEN_ROWS, "--frontends", str(frontends)) as server:
        client = Client(server.base_url)
        text, before = client.probe(), processes_of(client)
        opened = open_and_waiting(client)
        os.kill(before.engine, signal.SIGKILL)
        assert_all_told(opened)
        wait_until(lambda: client.get("/ready").status_code == 200, 15, "the frontend of this connection is ready")
        wait_until(lambda: all(ready(client) == 200 for _ in range(6 * frontends)), 15, "so is every other one")
        # Of the new engine every frontend says: nothing was generated yet, by whatever name the old one had counted.
        pages = [parse_metrics(requests.get(client.base_url + "/metrics/engine", timeout=5).text) for _ in range(8)]
        assert {total(page, "vllm:generation_tokens_total") for page in pages} == {0}
        assert client.probe() == text
        now = processes_of(client)
        assert now.engine != before.engine
        assert (now.supervisor, now.frontends) == (before.supervisor, before.frontends)
        client.assert_quiet()
        paths = socket_files(now.all)
        assert server.stop() == 0
        assert not [pid for pid in (*before.all, now.engine) if is_running(pid)]
        assert [path for path in paths if Path(path).exists()] == []


def test_death_1_the_supervisor_restarts_a_killed_frontend_and_its_requests_are_aborted() -> None:
    with serve(*SIM, "--frontends", "2") as server:
        client = Client(server.base_url)
        before = processes_of(client)
        opened = [OpenRequest(client, LONG_STREAM).wait_for(1) for _ in range(8)]
        for pid in before.frontends:
            os.kill(pid, signal.SIGKILL)
        leave_all(opened)
        wait_until(lambda: _answers(client) and len(processes_of(client).frontends) == 2, 15, "two new frontends")
        assert processes_of(client).engine == before.engine
        client.assert_quiet(within_s=8.0)  # the engine gives a silent frontend up after five seconds
        assert client.complete(prompt="x", max_tokens=9, sim={"runs": [RUN]})["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_death_1_no_process_and_no_socket_file_is_left(how: signal.Signals) -> None:
    with serve(*SIM, "--frontends", "2") as server:
        pids = processes_of(Client(server.base_url))
        paths = socket_files(pids.all)
        assert paths, "engine and frontends meet at a socket file"
        os.kill(pids.supervisor, how)
        wait_until(lambda: not any(is_running(pid) for pid in pids.all), 10, "every process is gone")
        if how is not signal.SIGKILL:
            assert [path for path in paths if Path(path).exists()] == []


def socket_files(pids: tuple[int, ...]) -> set[str]:
    found = set()
    for pid in pids:
        found |= {c.laddr for c in psutil.Process(pid).net_connections("unix") if str(c.laddr).startswith("/")}
    return found


# ---- DEATH-2: vllm-project/vllm#48966 ----


@pytest.mark.parametrize("role", ["serve", "engine", "frontend"])
def test_death_2_a_bad_model_path_ends_with_a_failure(role: str) -> None:
    port = free_port()
    options = ("--listen", f"tcp://127.0.0.1:{port}") if role == "engine" else ("--port", str(port))
    ended = run_to_end(DRAFTHOUSE, role, "--model", "/nowhere/model.gguf", *options, within_s=10)
    assert ended.code != 0
    assert "/nowhere/model.gguf" in ended.output
    assert "Traceback" not in ended.output
    assert listeners(port) == []


ENDINGS = ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL))


def test_death_2_an_engine_alone_ends_with_zero_when_told_and_not_when_killed(tmp_path: Path) -> None:
    for how, code in ENDINGS:
        with two_processes(tmp_path, "--drain-timeout-s", "0.2") as (client, engine, _frontend):
            opened = OpenRequest(client, LONG_STREAM).wait_for(1)
            engine.send_signal(how)
            assert engine.wait(timeout=10) == code
            opened.leave()


def test_death_2_a_service_whose_engine_dies_again_and_again_ends_with_a_failure() -> None:
    with serve(*SIM) as server:
        killed = set[int]()
        while server.process.poll() is None:
            for pid in set(_pids_or_none(server, "engine")) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.02)
        assert server.process.returncode != 0
        assert len(killed) == MAX_QUICK_DEATHS
        assert f"engine died {MAX_QUICK_DEATHS} times in a row" in server.log()
        assert listeners(server.port) == []


def _pids_or_none(server: Server, role: str) -> list[int]:
    try:
        return server.pids(role)
    except psutil.NoSuchProcess:
        return []


def test_death_2_a_frontend_that_is_told_to_end_drains_and_ends_with_zero(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (client, _, frontend):
        short = {"prompt": "x", "max_tokens": 400, "stream": True, "sim": {"runs": [RUN] * 50, "step_ms": 20}}
        opened = [OpenRequest(client, short).wait_for(1) for _ in range(5)]
        frontend.send_signal(signal.SIGTERM)
        together([lambda one=one: one.read_to_end(within_s=10) for one in opened], width=5)
        assert frontend.wait(timeout=10) == 0
        for one in opened:
            events = one.data()
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "stop", "what was running was finished"
            one.leave()


@pytest.mark.parametrize("drain_timeout", ["0", "15"])
def test_death_2_a_server_told_to_end_during_streams_ends_with_zero_in_time(tmp_path: Path, drain_timeout: str) -> None:
    port = free_port()
    command = [DRAFTHOUSE, "serve", *SIM, "--port", str(port), "--drain-timeout-s", drain_timeout]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = Client(f"http://127.0.0.1:{port}")
        wait_until(lambda: _answers(client), 20, "the server is up")
        length = 500 if drain_timeout == "0" else 60
        body = {**LONG_STREAM, "sim": {"runs": [RUN] * length, "step_ms": 20}}
        opened = [OpenRequest(client, body).wait_for(1) for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        together([lambda one=one: one.read_to_end(within_s=12) for one in opened], width=5)
        assert process.wait(timeout=10) == 0
        for one in opened:
            events = one.data()
            assert events[-1] == "[DONE]"
            told, drained = "error" in events[-2], "choices" in events[-2]
            assert told if drain_timeout == "0" else drained, events[-2]
            one.leave()
    finally:
        _end(process)
