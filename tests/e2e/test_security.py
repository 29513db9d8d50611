"""What SECURITY.md promises, against the processes a user starts: keys, the encrypted wire, and secrets that stay secret."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.servers import ROOT, clean_environment, command, running, serve

KEY, SECOND, ADMIN = "sk-first-key-of-this-test", "sk-second-key-of-this-test", "an-admin-key-of-this-test"
PROMPT = "a-prompt-that-is-in-no-log"
SIM = ("--executor", "sim", "--sim-step-ms", "1")
TIMEOUT_S = 60.0
_LISTENING = re.compile(r" listening url=(http://\S+) ")


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def ask(url: str, key: str | None = None, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def complete(base_url: str, key: str | None) -> int:
    return ask(f"{base_url}/v1/completions", key, {"prompt": PROMPT, "max_tokens": 4})[0]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(*arguments), env=clean_environment(**environment), cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def key_file(path: Path, *keys: str) -> str:
    path.write_text("\n".join(keys) + "\n")
    path.chmod(0o600)
    return str(path)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def frontend(*arguments: str) -> Iterator[tuple[str, Path]]:
    """(base URL, log) of a frontend that listens, attached or not."""
    with running("frontend", "--port", "0", *arguments) as log:
        until(lambda: _LISTENING.search(log.read_text()), log.read_text)
        found = _LISTENING.search(log.read_text())
        assert found is not None
        yield found[1], log


def test_a_wire_with_keys_serves_who_has_them_and_tells_a_stranger_why_not(tmp_path: Path):
    for name in ("fleet", "stranger"):
        made = run("keys", str(tmp_path / name))
        assert made.returncode == 0 and "--curve-key-file" in made.stdout, made.stderr
    fleet, stranger, address = tmp_path / "fleet", tmp_path / "stranger", free_address()
    curve = ("--curve-key-file", f"{fleet}/engine.key", "--curve-client-keys", f"{fleet}/frontend.pub")
    with running("engine", "--listen", address, "--log-level", "debug", *SIM, *curve) as engine_log:
        to_engine = ("--engine", address, "--curve-server-key-file", f"{fleet}/engine.pub")
        with (
            frontend(*to_engine, "--curve-key-file", f"{fleet}/frontend.key") as (good, good_log),
            frontend(*to_engine, "--curve-key-file", f"{stranger}/frontend.key") as (other, other_log),
            frontend("--engine", address) as (plain, _),
        ):
            until(lambda: ask(f"{good}/ready")[0] == 200, lambda: good_log.read_text() + engine_log.read_text())
            assert complete(good, None) == 200
            until(lambda: "does not accept this frontend's CURVE key" in ask(f"{other}/ready")[1], other_log.read_text)
            until(lambda: "only one side uses CURVE" in ask(f"{plain}/ready")[1], lambda: ask(f"{plain}/ready")[1])
            for refused in (other, plain):
                assert ask(f"{refused}/ready")[0] == 503 and complete(refused, None) == 503
            until(lambda: refused_messages(good) > 1, lambda: ask(f"{good}/metrics")[1])
            logs = engine_log.read_text() + good_log.read_text() + other_log.read_text()
    assert "its key is not one of --curve-client-keys" in logs
    for path in (*fleet.iterdir(), *stranger.iterdir()):
        assert path.read_text().split()[-1] not in logs


def refused_messages(base_url: str) -> float:
    found = re.search(r"^drafthouse:\w*refused_messages\w*\{.*\} (\d+)$", ask(f"{base_url}/metrics")[1], re.MULTILINE)
    return 0 if found is None else int(found[1])


def test_the_keys_command_makes_private_files_and_overwrites_none(tmp_path: Path):
    directory = tmp_path / "new" / "keys"
    made = run("keys", str(directory))
    files = {path.name: path for path in directory.iterdir()}
    assert made.returncode == 0 and set(files) == {"engine.key", "engine.pub", "frontend.key", "frontend.pub"}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    before = {name: path.read_text() for name, path in files.items()}
    assert len({text.split()[-1] for text in before.values()}) == 4
    assert not any(text.split()[-1] in made.stdout + made.stderr for text in before.values())
    files["engine.pub"].unlink()
    again = run("keys", str(directory))
    assert again.returncode == 2 and "exists already" in again.stderr and not files["engine.pub"].exists()
    assert all(path.read_text() == before[name] for name, path in files.items() if name != "engine.pub")


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("--force",)])
def test_the_keys_command_refuses_what_it_does_not_know(arguments: tuple[str, ...]):
    refused = run("keys", *arguments)
    assert refused.returncode == 2 and "expected one DIRECTORY" in refused.stderr
    assert run("keys", "--help").stdout.startswith("usage: drafthouse keys DIRECTORY")


def test_a_keyed_server_lets_in_who_has_a_key_and_keeps_it_to_itself(tmp_path: Path):
    path = key_file(tmp_path / "keys", f"alice: {SECOND}")
    admin = key_file(tmp_path / "admin", ADMIN)
    options = (
        "--frontends",
        "2",
        "--api-key-file",
        path,
        "--admin-key-file",
        admin,
        "--log-level",
        "debug",
        "--access-log",
    )
    with serve(*SIM, *options, DRAFTHOUSE_API_KEY=KEY) as server:
        for _ in range(6):  # connections are spread over the frontends
            assert complete(server.base_url, None) == 401 and complete(server.base_url, KEY + "x") == 401
            assert complete(server.base_url, KEY) == complete(server.base_url, SECOND) == 200
            assert complete(server.base_url, ADMIN) == 200
        for page in ("/health", "/ready", "/ping", "/metrics", "/metrics/engine", "/metrics/frontend"):
            assert ask(server.base_url + page)[0] == 200
        for page in ("/v1/models", "/version", "/nope"):
            assert ask(server.base_url + page)[0] == 401
        assert "-H 'Authorization: Bearer KEY' -d" in server.log(), "the command that serve proposes would be refused"
        assert ask(f"{server.base_url}/start_profile", KEY, {})[0] == 401
        assert (
            ask(f"{server.base_url}/start_profile", ADMIN, {})[0] == 400
        )  # let in; a simulated engine has no profiles
        exposed = server.log() + "".join(ask(server.base_url + "/metrics")[1] for _ in range(6))
        for role in ("engine", "frontend"):
            for pid in server.pids(role):
                exposed += Path(f"/proc/{pid}/cmdline").read_text()
        [engine] = server.pids("engine")
        exposed += Path(f"/proc/{engine}/environ").read_text()
        for secret in (KEY, SECOND, ADMIN, PROMPT):
            assert secret not in exposed


def test_a_new_key_file_is_taken_in_at_sighup_and_a_bad_one_is_not(tmp_path: Path):
    path = tmp_path / "keys"
    with serve(*SIM, "--api-key-file", key_file(path, KEY)) as server:
        [pid] = server.pids("frontend")
        key_file(path, SECOND)
        os.kill(pid, signal.SIGHUP)
        until(lambda: complete(server.base_url, SECOND) == 200, server.log)
        assert complete(server.base_url, KEY) == 401
        path.write_text("too short\n")
        os.kill(pid, signal.SIGHUP)
        until(lambda: "keys not reloaded" in server.log(), server.log)
        assert complete(server.base_url, SECOND) == 200 and server.pids("frontend") == [pid]
        key_file(path, KEY)  # no signal: the file itself is watched
        until(lambda: complete(server.base_url, KEY) == 200, server.log)


def test_limits_per_key_answer_429_and_leave_the_other_key_alone(tmp_path: Path):
    path = key_file(tmp_path / "keys", f"alice: {KEY}", f"bob: {SECOND}")
    with serve(*SIM, "--api-key-file", path, "--requests-per-minute-per-key", "3") as server:
        assert [complete(server.base_url, KEY) for _ in range(5)] == [200, 200, 200, 429, 429]
        assert complete(server.base_url, SECOND) == 200
        assert 'rate_limited_total{reason="requests_per_minute"} 2' in ask(f"{server.base_url}/metrics")[1]
        assert "client limited client='alice'" in server.log()


CURVE = ("--curve-key-file", "/nowhere/key", "--curve-client-keys", "/nowhere/clients")


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("frontend", "--api-key", KEY), {}, "there is no option --api-key"),
        (("serve", "--api-key", KEY), {}, "there is no option --api-key"),
        (("engine",), {"DRAFTHOUSE_API_KEY": KEY}, "DRAFTHOUSE_API_KEY is no option of drafthouse engine"),
        (("frontend",), {"DRAFTHOUSE_API_KEY": "short"}, "DRAFTHOUSE_API_KEY has 5 characters"),
        (("frontend", "--api-key-file", "/nowhere/keys"), {}, "--api-key-file /nowhere/keys cannot be read"),
        (("frontend", "--max-requests-per-key", "2"), {}, "--max-requests-per-key works only with API keys"),
        (("frontend", "--curve-key-file", "/nowhere/key"), {}, "works only together with --curve-server-key-file"),
        (("frontend", "--engine", "ipc:///tmp/x", "--curve-key-file", "k", "--curve-server-key-file", "s"), {}, "ipc:///tmp/x"),
        (("engine", "--listen", "tcp://0.0.0.0:1", *CURVE, *SIM), {}, "/nowhere/clients cannot be read"),
        (("engine", "--listen", "tcp://0.0.0.0:1", *SIM), {}, "give --curve-key-file and --curve-client-keys"),
        (("serve", *CURVE), {}, "there is no option --curve-key-file"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_at_the_start_by_name(arguments, environment, sentence):
    refused = run(*arguments, **environment)
    assert refused.returncode == 2 and sentence in refused.stderr
    assert KEY not in refused.stderr


def test_listening_to_the_network_without_keys_is_warned_of_once(tmp_path: Path):
    engine = ("--engine", f"ipc://{tmp_path}/none.sock")
    with frontend(*engine, "--host", "0.0.0.0") as (_, log):
        assert log.read_text().count("open to the network") == 1
    for quiet in (("--host", "127.0.0.1"), ("--host", "0.0.0.0", "--api-key-file", key_file(tmp_path / "keys", KEY))):
        with frontend(*engine, *quiet) as (_, log):
            assert "open to the network" not in log.read_text()
