"""What a person who starts, kills and stops processes sees. All with the simulated engine."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.servers import Server, clean_environment, command, serve
from tests.timing import at_most_s

SIM = ("--executor", "sim", "--check-laws")


def get(server: Server, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def complete(server: Server, **fields: object) -> dict[str, object]:
    status, text = get(server, "/v1/completions", {"prompt": "hello", "max_tokens": 8, **fields})
    assert status == 200, text
    return json.loads(text)


def soon(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def socket_directory(server: Server) -> Path:
    listen = next(word for word in psutil.Process(server.pids("engine")[0]).cmdline() if word.startswith("--listen="))
    return Path(listen.removeprefix("--listen=ipc://")).parent


def test_serve_answers_and_says_what_it_does():
    with serve(*SIM) as server:
        answer = complete(server)
        assert answer["usage"]["completion_tokens"] == 8  # type: ignore[index]
        log = server.log()
        for words in (
            "speculation  ngram",
            "configuration model=embedded",
            f"{server.base_url}/metrics",
        ):
            assert words in log
        command_line = next(line for line in log.splitlines() if line.startswith("try: "))
        printed = subprocess.run(command_line.removeprefix("try: "), shell=True, capture_output=True, text=True)
        assert json.loads(printed.stdout)["choices"][0]["message"]["role"] == "assistant"
        assert socket_directory(server).stat().st_mode & 0o077 == 0


def test_the_printed_configuration_is_what_was_asked_by_flag_environment_and_file(tmp_path: Path):
    file = tmp_path / "drafthouse.toml"
    file.write_text("num_draft_tokens = 3\nmax_num_seqs = 7\n")
    with serve(*SIM, "--config", str(file), DRAFTHOUSE_MAX_NUM_SEQS="9") as server:
        assert "speculation  ngram, 3 draft tokens" in server.log() and "batch        9 sequences" in server.log()
        _, metrics = get(server, "/metrics")
        assert 'position="2"' in metrics and 'position="3"' not in metrics


@pytest.mark.parametrize("frontends", [1, 2])
def test_stopping_is_in_order_and_leaves_nothing(frontends: int):
    with serve(*SIM, "--frontends", str(frontends)) as server:
        directory = socket_directory(server)
        children = server.pids("engine") + server.pids("frontend")
        assert len(children) == 1 + frontends
        started = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        at_most_s(time.monotonic() - started, 10, "stopping")
        assert not directory.exists() and not any(psutil.pid_exists(pid) for pid in children)
        log = server.log()
        assert log.rstrip().endswith("stopped") and log.rindex("frontend stopped") < log.rindex("engine stopped")


def test_a_killed_engine_is_restarted_and_serves_again():
    with serve(*SIM) as server:
        complete(server)
        [engine] = server.pids("engine")
        os.kill(engine, signal.SIGKILL)
        soon(lambda: get(server, "/ready")[0] == 503, 2.0)
        assert get(server, "/health")[0] == 200
        assert get(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 503
        soon(lambda: get(server, "/ready")[0] == 200)
        complete(server)
        assert server.pids("engine") != [engine]
        assert "engine ended with signal SIGKILL" in server.log()


def test_no_orphan_survives_a_killed_supervisor_and_the_next_one_cleans_up():
    # A temporary directory of their own: any other server that starts meanwhile would clean up as well. In /tmp, where
    # the name is short enough for a socket.
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as own:
        _killed_and_cleaned(own)


def _killed_and_cleaned(own: str) -> None:
    with serve(*SIM, "--frontends", "2", TMPDIR=own) as server:
        directory = socket_directory(server)
        children = [psutil.Process(pid) for pid in server.pids("engine") + server.pids("frontend")]
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait()
        soon(lambda: not any(child.is_running() for child in children))
        assert directory.is_relative_to(own) and directory.exists(), "nobody was left to remove it"
    with serve(*SIM, TMPDIR=own):
        assert not directory.exists()


def test_a_second_signal_ends_everything_at_once():
    with serve(*SIM, "--sim-step-ms", "200", "--drain-timeout-s", "60") as server:
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
        request = urllib.request.Request(
            server.base_url + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            response.readline()
            server.process.send_signal(signal.SIGINT)
            soon(lambda: "stopping in order" in server.log())
            started = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(10) == 0
            at_most_s(time.monotonic() - started, 5, "stopping")


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=30, env=clean_environment(**environment)
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("serve", "--model", "/no/such.gguf"), {}, "/no/such.gguf"),
        (("serve", "--sim-step-ms", "3"), {}, "--sim-step-ms works only with --executor sim"),
        (("serve", "--listen", "ipc:///x"), {}, "no option --listen"),
        (("serve", "--frontends", "0"), {}, "--frontends"),
        (("serve",), {"DRAFTHOUSE_MAX_SEQS": "4"}, "DRAFTHOUSE_MAX_SEQS"),
        (("serve", "--served-model-name", "a b"), {}, "would read 0"),
        (("engine", "--model", "/no/such.gguf"), {}, "/no/such.gguf"),
        (("engine", "--executor", "sim", "--max-model-len", "9000"), {}, "--max-model-len 9000 exceeds"),
        (("engine", "--port", "80"), {}, "no option --port"),
        (("frontend", "--model", "/no/such.gguf"), {}, "/no/such.gguf"),
        (("frontend", "--engine", "tcp://127.0.0.1:1,tcp://127.0.0.1:1"), {}, "tcp://127.0.0.1:1 twice"),
        (("engine", "--listen", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"), {}, "several addresses"),
        (("servo",), {}, "no command 'servo'"),
    ],
)
def test_what_cannot_be_run_ends_with_code_2_and_a_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], words: str
):
    result = ended(*arguments, **environment)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert words in last and "Traceback" not in result.stderr


def test_a_port_in_use_is_named_and_not_shared_silently():
    with serve(*SIM) as server:
        result = ended("serve", *SIM, "--port", str(server.port))
        assert result.returncode == 1 and f"127.0.0.1:{server.port}: Address already in use" in result.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert ended("serve", *SIM, "--port", str(taken.getsockname()[1])).returncode == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [(("--served-model-name", "other"), "must agree"), (("--model", "{tiny}"), "vocabulary")],
    ids=["name", "vocabulary"],
)
def test_a_frontend_refuses_an_engine_that_does_not_fit(tmp_path: Path, option: tuple[str, str], words: str):
    from tests.tiny import write_tiny_model

    option = (option[0], option[1].format(tiny=write_tiny_model(tmp_path / "tiny", "llama")))
    name = () if option[0] == "--served-model-name" else ("--served-model-name", "SmolLM2-135M-Instruct")
    address = f"ipc://{tmp_path}/engine"
    engine = subprocess.Popen(
        command("engine", "--executor", "sim", "--listen", address), stderr=subprocess.PIPE, env=clean_environment()
    )
    try:
        result = ended("frontend", "--engine", address, "--port", "0", *option, *name)
        assert result.returncode == 1 and words in result.stderr
    finally:
        engine.terminate()
        _, log = engine.communicate(timeout=20)
    assert engine.returncode == 0, log.decode()


def test_an_engine_whose_address_is_taken_ends_and_its_owner_lives(tmp_path: Path):
    with serve(*SIM) as server:
        result = ended("engine", "--executor", "sim", "--listen", f"ipc://{socket_directory(server)}/engine.sock")
        assert result.returncode == 1 and "another engine listens there" in result.stderr
        complete(server)


def test_an_address_that_is_taken_is_met_before_the_model_is_looked_at():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        result = ended("engine", "--model", "/no/such.gguf", "--listen", address)
    assert result.returncode == 1 and f"cannot listen on {address}: Address already in use" in result.stderr
    assert "/no/such.gguf:" not in result.stderr


def test_version_and_help():
    assert ended("--version").stdout.startswith("drafthouse ")
    for role in ("serve", "engine", "frontend"):
        result = ended(role, "--help")
        assert result.returncode == 0 and "--model TEXT" in result.stdout and "(default embedded)" in result.stdout
    assert "serve" in ended("--help").stdout


def test_an_idle_server_does_not_spin():
    with serve(*SIM) as server:
        complete(server)
        processes = [psutil.Process(pid) for pid in (server.pid, *server.pids("engine"), *server.pids("frontend"))]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(2.0)  # what is measured is real time
        after = [sum(process.cpu_times()[:2]) for process in processes]
        shares = [(b - a) / 2.0 for a, b in zip(before, after, strict=True)]
        assert max(shares) < 0.02 + 0.005, shares  # 2 % of a core, and a clock tick of 10 ms


def test_a_simulated_engine_never_imports_torch():
    with serve(*SIM) as server:
        maps = Path(f"/proc/{server.pids('engine')[0]}/maps").read_text()
        assert "libtorch" not in maps
