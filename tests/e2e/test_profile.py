"""A profile as an admin takes it, of a real engine; and logs that a machine can read."""

import gzip
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, serve
from tests.timing import at_most_s
from tests.tiny import write_tiny_model

KEY = "correct-horse-battery"
SUPERVISOR_LINES = (
    "drafthouse serves",
    "SIGTERM received",
    "  ",
    "ready after",
    "running: ",
    "try: ",
    "stopping",
    "stopped",
)
PHASES = {"observe", "draft", "verify", "accept"}


def post(
    server: Server, path: str, body: dict[str, object] | None = None, key: str = KEY
) -> tuple[int, dict[str, Any]]:
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.base_url + path, data, headers), timeout=40
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def complete(server: Server, max_tokens: int = 24) -> int:
    body = {
        "prompt": "the cat sat on the mat the cat sat",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["completion_tokens"])


def scrape(server: Server, family: str) -> float:
    with urllib.request.urlopen(server.base_url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(family))


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def json_lines(log: str) -> list[dict[str, str]]:
    """What the processes logged. The supervisor's own lines are for people; nothing else may be text."""
    lines = [line for line in log.splitlines() if not line.startswith(SUPERVISOR_LINES)]
    return [json.loads(line) for line in lines if line]


def write_key(directory: Path) -> Path:
    path = directory / "admin-keys"
    path.write_text(f"# the bench's own\n{KEY}\n")
    path.chmod(0o600)
    return path


@dataclass
class Profiled:
    server: Server
    directory: Path

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiled]:
    """A real engine with two frontends, so that start and stop may come through different ones."""
    root = tmp_path_factory.mktemp("profile")
    model = write_tiny_model(root / "model", seed=5)
    options = (
        "--model", str(model), "--device", "cpu", "--dtype", "fp32", "--kv-cache-tokens", "4096", "--frontends", "2",
        "--profile-dir", str(root / "profiles"), "--admin-key-file", str(write_key(root)),
    )  # fmt: skip
    with serve(*options) as server:
        yield Profiled(server, root / "profiles")


def test_a_request_between_start_and_stop_is_in_the_trace_with_its_phases_and_operations(profiled: Profiled):
    server = profiled.server
    complete(server)
    idle_steps = scrape(server, "drafthouse:steps_total")
    began = time.monotonic()
    status, started = post(server, "/start_profile")
    assert status == 200 and started["status"] == "started", started
    at_most_s(time.monotonic() - began, 5.0, "starting a profile")  # an idle engine reacts at once
    rounds = scrape(server, "drafthouse:verify_rounds_total")
    assert scrape(server, "drafthouse:steps_total") == idle_steps  # without a step of its own
    assert complete(server) == 24
    rounds = scrape(server, "drafthouse:verify_rounds_total") - rounds
    status, stopped = post(server, "/stop_profile")
    assert status == 200 and stopped["status"] == "stopped", stopped
    path = Path(stopped["path"])
    assert path.parent == profiled.directory and profiled.files() == [path.name]
    trace = events(path)
    ranges = [event["name"] for event in trace if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    assert set(ranges) == PHASES
    assert ranges.count("verify") == stopped["num_steps"] == rounds + 1  # every round's step, and the prompt's
    assert {"aten::mm", "aten::index_select"} & {event["name"] for event in trace if event.get("cat") == "cpu_op"}


def test_what_is_out_of_turn_is_a_conflict_and_harms_no_profile(profiled: Profiled):
    server = profiled.server
    assert post(server, "/stop_profile")[0] == 409
    assert post(server, "/start_profile")[0] == 200
    status, refused = post(server, "/start_profile")
    assert status == 409 and "/stop_profile" in refused["error"]["message"]
    complete(server)
    status, stopped = post(server, "/stop_profile")
    assert status == 200 and stopped["num_steps"] > 0
    assert post(server, "/stop_profile")[0] == 409


def test_a_profile_needs_the_admin_key(profiled: Profiled):
    status, refused = post(profiled.server, "/start_profile", key="some-other-key-of-somebody")
    assert status == 401 and "admin key" in refused["error"]["message"]
    assert KEY not in profiled.server.log()


def test_requests_that_run_across_start_and_stop_are_whole(profiled: Profiled):
    server = profiled.server
    tokens: list[int] = []
    threads = [threading.Thread(target=lambda: tokens.append(complete(server, 200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert post(server, "/start_profile")[0] == 200
    assert post(server, "/stop_profile")[0] == 200
    for thread in threads:
        thread.join()
    assert tokens == [200] * 4


def test_an_engine_that_is_stopped_during_a_profile_leaves_the_whole_file(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", seed=5)
    directory = tmp_path / "profiles"
    with serve(
        "--model", str(model), "--device", "cpu", "--profile-dir", str(directory),
        "--admin-key-file", str(write_key(tmp_path)), "--log-format", "json",
    ) as server:  # fmt: skip
        assert post(server, "/start_profile")[0] == 200
        complete(server)
        assert server.stop(signal.SIGTERM) == 0
        log = server.log()
    (path,) = directory.iterdir()
    assert not path.name.startswith(".") and {event["name"] for event in events(path)} >= PHASES
    assert any("profile_written" in line["message"] and line["engine"] == "0" for line in json_lines(log))


def test_a_simulated_engine_and_one_without_a_directory_refuse_by_name(tmp_path: Path):
    key = str(write_key(tmp_path))
    with serve("--executor", "sim", "--admin-key-file", key, "--log-format", "json") as server:
        status, refused = post(server, "/start_profile")
        assert status == 400 and "--executor sim" in refused["error"]["message"]
        lines = json_lines(server.log())
        assert any("ready listen=" in line["message"] and line["engine"] == "0" for line in lines)
        assert any("listening url=" in line["message"] and "engine" not in line for line in lines)
    refusal = "--profile-dir says nothing with --executor sim"
    with pytest.raises(RuntimeError, match=refusal), serve("--executor", "sim", "--profile-dir", str(tmp_path)):
        pass
