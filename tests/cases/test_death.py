"""DEATH: killed processes, exit codes, equal request ids, bursts."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from tests.cases.client import COMPLETIONS, IS_LONG, Client, strict_json, together, total
from tests.cases.crowd import OpenRequest, leave_all, seeded
from tests.cases.laws import assert_well_formed, engine_scope, increments, labelled
from tests.cases.processes import (
    DRAFTHOUSE,
    free_port,
    is_running,
    listeners,
    processes_of,
    run_to_end,
    unharmed,
    wait_until,
)
from tests.e2e.servers import serve
from tests.timing import at_most_s

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
LONG_SCRIPT = {"runs": [RUN] * 500, "step_ms": 20}
LONG_STREAM = {"prompt": "x", "max_tokens": 4000, "stream": True, "sim": LONG_SCRIPT}


def ready(client: Client) -> int:
    return requests.get(client.base_url + "/ready", timeout=5).status_code


@contextmanager
def two_processes(directory: Path) -> Iterator[tuple[Client, subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Engine and frontend as an operator starts them by hand: nobody restarts what dies."""
    address, port = f"ipc://{directory}/engine.sock", free_port()
    with ExitStack() as stack:
        commands = (
            ("engine", "--listen", address, *SIM),
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


def open_and_waiting(client: Client) -> list[OpenRequest]:
    """10 streams that have begun, 5 plain requests that have not answered."""
    streams = [OpenRequest(client, LONG_STREAM) for _ in range(10)]
    together([lambda one=one: one.wait_for(1) for one in streams], width=10)
    plain = [OpenRequest(client, {**LONG_STREAM, "stream": False}) for _ in range(5)]
    wait_until(lambda: total(client.metrics(), "vllm:num_requests_running") == 15, 5, "the engine runs all of them")
    return [*streams, *plain]


def assert_all_told(opened: list[OpenRequest]) -> None:
    """Streams end with an error event and [DONE], plain requests with a 503; nobody hangs."""
    together([lambda one=one: one.read_to_end(within_s=5) for one in opened], width=15)
    for one in opened[:10]:
        events = one.data()
        assert events[-1] == "[DONE]"
        assert "error" in events[-2]
    for one in opened[10:]:
        assert one.status == 503, one.received[:300]
        assert strict_json(one.received.split(b"\r\n\r\n", 1)[1].strip())["error"]["message"]
    leave_all(opened)


def test_death_1_a_killed_engine_is_noticed_and_told_to_everyone(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (client, engine, _):
        before = client.metrics()
        opened = open_and_waiting(client)
        engine.kill()
        engine.wait()
        killed = time.monotonic()
        wait_until(lambda: ready(client) == 503, 2, "/ready says 503")
        assert_all_told(opened)
        at_most_s(time.monotonic() - killed, 2.0, "telling everyone")
        assert client.get("/health").status_code == 200, "the frontend lives"
        started = time.monotonic()
        response = client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        at_most_s(time.monotonic() - started, 1.0, "telling everyone")
        client.assert_error(response, status=503)
        assert int(response.headers["Retry-After"]) >= 1
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
    with serve(*SIM, "--frontends", str(frontends)) as server:
        client = Client(server.base_url)
        text, before = client.probe(), processes_of(client)
        opened = open_and_waiting(client)
        os.kill(before.engine, signal.SIGKILL)
        assert_all_told(opened)
        wait_until(lambda: client.get("/ready").status_code == 200, 15, "the frontend of this connection is ready")
        wait_until(lambda: all(ready(client) == 200 for _ in range(6 * frontends)), 15, "so is every other one")
        assert client.probe() == text
        now = processes_of(client)
        assert now.engine != before.engine
        assert (now.supervisor, now.frontends) == (before.supervisor, before.frontends)
        client.assert_quiet()


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


@pytest.mark.parametrize("role", ["serve", "engine"])
def test_death_2_a_bad_model_path_ends_with_a_failure(role: str) -> None:
    port = free_port()
    options = ("--port", str(port)) if role == "serve" else ("--listen", f"tcp://127.0.0.1:{port}")
    ended = run_to_end(DRAFTHOUSE, role, "--model", "/nowhere/model.gguf", *options, within_s=10)
    assert ended.code != 0
    assert "/nowhere/model.gguf" in ended.output
    assert "Traceback" not in ended.output
    assert listeners(port) == []


ENDINGS = ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL))


def test_death_2_an_engine_alone_ends_with_zero_when_told_and_not_when_killed(tmp_path: Path) -> None:
    for how, code in ENDINGS if IS_LONG else ENDINGS[:1]:
        with two_processes(tmp_path) as (_, engine, _frontend):
            engine.send_signal(how)
            assert engine.wait(timeout=10) == code


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


# ---- DEATH-3: vllm-project/vllm#10583 ----


def ask_with_id(client: Client, token: int, body_id: bool) -> list[int]:
    """A request whose answer is its own token, under the same id as every other one."""
    script = {"runs": [[token] * 6] * 5, "step_ms": 20}
    body = {"prompt": [token], "max_tokens": 100, "return_token_ids": True, "sim": script}
    if body_id:
        body["request_id"] = "id"
    response = requests.post(client.base_url + COMPLETIONS, json=body, headers={"X-Request-Id": "id"}, timeout=20)
    if response.status_code != 200:
        client.assert_error(response, status=409 if response.status_code == 409 else 400)
        return []
    assert response.headers["X-Request-Id"] == "id"
    ids: list[int] = strict_json(response.content)["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("name", ["sim", "sim_4f"])
@pytest.mark.parametrize("count", [2, 20])
def test_death_3_requests_under_one_id_get_their_own_answers(
    setup: Callable[[str], Client], name: str, count: int
) -> None:
    client = setup(name)
    before = engine_scope(client.metrics())
    with unharmed(client):
        tokens = [1000 + index for index in range(count)]
        got = together([lambda t=t: ask_with_id(client, t, body_id=t % 2 == 0) for t in tokens], width=count)
        assert all(ids in ([], [token] * 30) for token, ids in zip(tokens, got, strict=True))
        assert any(got)
        client.assert_quiet()
    increments(before, engine_scope(client.metrics()), WIDTH)


def test_death_3_leaving_one_of_two_requests_under_one_id_leaves_the_other(sim: Client) -> None:
    body = {**LONG_STREAM, "request_id": "id", "sim": {"runs": [RUN] * 40, "step_ms": 10}, "return_token_ids": True}
    with unharmed(sim):
        first = OpenRequest(sim, body, headers="X-Request-Id: id\r\n").wait_for(1)
        with OpenRequest(sim, body, headers="X-Request-Id: id\r\n") as second:
            second.wait_for_headers()
        first.read_to_end()
        events = first.data()
        first.leave()
        ids = [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"] or []]
        assert ids == RUN * 40
        sim.assert_quiet()


@pytest.mark.parametrize("header", ["", "a" * 10_000, "a b", "\u00e4", "a\x00b", "<script>", '"'])
def test_death_3_a_request_id_of_any_form_harms_nobody(sim: Client, header: str) -> None:
    with (
        unharmed(sim),
        OpenRequest(sim, {"prompt": "x", "max_tokens": 1}, headers=f"X-Request-Id: {header}\r\n") as one,
    ):
        one.read_to_end(within_s=5)
        assert one.status in (200, 400, 431)


# ---- DEATH-4: vllm-project/vllm#32193 ----


def test_death_4_a_burst_is_queued_or_refused_with_a_reason_and_loses_nobody() -> None:
    rng = seeded("DEATH-4")
    count = 500 if IS_LONG else 200
    with serve(
        *SIM, "--kv-cache-tokens", "4096", "--max-model-len", "2100", "--max-num-queued-requests", "100"
    ) as server:
        client = Client(server.base_url, timeout_s=60)
        for pid in processes_of(client).all:
            psutil.Process(pid).rlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        with unharmed(client):
            lengths = [rng.randint(50, 2000) for _ in range(count)]
            bodies = [{"prompt": [1000 + i] * size, "max_tokens": 20} for i, size in enumerate(lengths)]
            opened = [OpenRequest(client, body) for body in bodies]
            together([lambda one=one: one.read_to_end(within_s=60) for one in opened], width=50)
            leave_all(opened)
            statuses = [one.status for one in opened]
            client.assert_quiet()
        assert set(statuses) <= {200, 429, 503}, statuses
        assert statuses.count(200) >= 50
        for one in opened:
            body = one.received.split(b"\r\n\r\n", 1)[1]
            if one.status == 200:
                assert strict_json(body)["usage"]["completion_tokens"] == 20
            else:
                assert strict_json(body)["error"]["message"]
                assert b"retry-after:" in one.received.lower()
