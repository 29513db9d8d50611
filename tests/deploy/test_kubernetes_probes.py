"""Probes and scrape paths of the manifests, asked of real processes that run with the manifests' own options."""

import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.deploy.kustomized import Rendering, render, seconds_of_find
from tests.e2e.servers import READY_TIMEOUT_S, running

LISTENING = re.compile(r"listening url=(http://[\d.:]+) ")  # in a line of JSON, as the manifests ask for
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Pods:
    """An engine and a frontend as the base would run them, on this machine and without a model."""

    rendering: Rendering
    alive_file: Path
    engine: psutil.Process
    url: str

    def probe_engine(self, name: str) -> bool:
        """Run the probe as the kubelet would, on the file where it is here."""
        probe = self.rendering.container("engine")[name]
        command = [
            part.replace(self.rendering.environment("engine")["DRAFTHOUSE_ALIVE_FILE"], str(self.alive_file))
            for part in probe["exec"]["command"]
        ]
        done = subprocess.run(command, timeout=probe["timeoutSeconds"], capture_output=True, check=False)
        return done.returncode == 0

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def engine_sample(self, name: str) -> int:
        """The sum of a family's samples on /metrics/engine."""
        lines = [line for line in self.get("/metrics/engine")[1].splitlines() if line.startswith(name + "{")]
        assert lines, name
        return sum(int(line.rpartition(" ")[2]) for line in lines)


def flags(environment: dict[str, str], **instead: str) -> list[str]:
    """The options of an environment as arguments, some replaced by what fits this machine."""
    prefix = "DRAFTHOUSE_"
    options = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if prefix in name}
    assert instead.keys() - {"executor"} <= options.keys()
    return [f"--{name.replace('_', '-')}={value}" for name, value in (options | instead).items()]


@contextmanager
def pods() -> Iterator[Pods]:
    with tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory, pods_in(Path(directory)) as found:
        yield found


@contextmanager
def pods_in(directory: Path) -> Iterator[Pods]:
    rendering = render("base")
    alive_file = directory / "alive"
    alive_file.touch()  # as a container that crashed leaves it in its pod
    os.utime(alive_file)
    address = f"ipc://{directory}/engine.sock"
    engine = flags(rendering.environment("engine"), listen=address, alive_file=str(alive_file), executor="sim")
    # No balancer here has to learn that the frontend goes, so nobody waits for it when a test ends.
    here = {"engine": address, "host": "127.0.0.1", "port": "0", "drain_grace_s": "0"}
    frontend = flags(rendering.environment("frontend"), **here)
    with running("engine", *engine), running("frontend", *frontend) as log:
        (process,) = (child for child in psutil.Process().children() if f"--alive-file={alive_file}" in child.cmdline())
        until(lambda: LISTENING.search(log.read_text()) is not None, log)
        found = Pods(rendering, alive_file, process, LISTENING.findall(log.read_text())[0])
        until(lambda: answers(found, "/ready"), log)
        yield found


def answers(found: Pods, path: str) -> bool:
    try:
        return found.get(path)[0] == 200
    except OSError:
        return False


def until(condition: Callable[[], bool], log: Path | None = None) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, log and log.read_text()[-4000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Pods]:
    with pods() as found:
        yield found


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_idle_engine_passes_its_probes_for_as_long_as_it_idles(fleet: Pods):
    until(lambda: fleet.probe_engine("startupProbe"))
    age(fleet.alive_file, 3600)  # as if nothing had touched it for an hour
    until(lambda: all(fleet.probe_engine(name) for name in PROBES))


def test_a_hung_engine_fails_each_probe_after_the_time_that_it_allows(fleet: Pods):
    until(lambda: fleet.probe_engine("livenessProbe"))
    fleet.engine.send_signal(signal.SIGSTOP)
    try:
        until(lambda: fleet.engine.status() == psutil.STATUS_STOPPED)
        for name in PROBES:
            allowed_s = seconds_of_find(fleet.rendering.container("engine")[name]["exec"]["command"])
            age(fleet.alive_file, allowed_s - 10)
            assert fleet.probe_engine(name)
            age(fleet.alive_file, allowed_s + 1)
            assert not fleet.probe_engine(name)
    finally:
        fleet.engine.send_signal(signal.SIGCONT)
    until(lambda: all(fleet.probe_engine(name) for name in PROBES))


def test_probing_an_engine_refuses_no_message_and_steps_no_step(fleet: Pods):
    until(lambda: answers(fleet, "/ready"))
    families = ("drafthouse:refused_messages_total", "drafthouse:steps_total")
    before = [fleet.engine_sample(name) for name in families]
    for name in PROBES:
        fleet.probe_engine(name)
    assert [fleet.engine_sample(name) for name in families] == before


def test_every_http_probe_is_answered(fleet: Pods):
    until(lambda: answers(fleet, "/ready"))
    container = fleet.rendering.container("frontend")
    assert [fleet.get(container[name]["httpGet"]["path"])[0] for name in PROBES] == [200, 200, 200]


def test_the_scraped_paths_give_their_own_half_each(fleet: Pods):
    monitoring = render("components/monitoring")
    (endpoint,) = monitoring.all("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    own = fleet.get(endpoint["path"])[1]
    totals = fleet.get(monitoring.all("ScrapeConfig")[0]["spec"]["metricsPath"])[1]
    assert "http_requests_total{" in own or "# TYPE http_requests_total" in own
    assert "vllm:num_requests_waiting{" in totals and "vllm:num_requests_waiting{" not in own
    assert "http_requests_total" not in totals


def test_every_path_of_the_ingress_leads_to_a_route(fleet: Pods):
    (rule,) = render("components/ingress").all("Ingress")[0]["spec"]["rules"]
    paths = {entry["path"]: entry["pathType"] for entry in rule["http"]["paths"]}
    assert paths.pop("/v1") == "Prefix" and fleet.get("/v1/models")[0] == 200
    assert {fleet.get(path)[0] for path in paths} == {405}  # there, and not for GET
    assert not {"/metrics", "/start_profile", "/"} & paths.keys()


def test_an_engine_that_stops_in_order_takes_its_word_back():
    with pods() as found:
        until(lambda: found.probe_engine("readinessProbe"))
        found.engine.terminate()
        found.engine.wait(READY_TIMEOUT_S)
        assert not found.alive_file.exists()
        assert not any(found.probe_engine(name) for name in PROBES)
