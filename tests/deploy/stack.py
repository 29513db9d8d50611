"""The compose stack under test: the shipped docker-compose.yml with the test's override, in a project of its own.

Owns images (built from this tree), base images where no registry is reachable, ports, and ending it all. It says what
containers there are and runs commands in them; what is asked of the stack is the test's.

`python3 -m tests.deploy.stack` only builds the images, which the test then finds: .ci/run does it beside other work, before
there is an environment, so this file needs the standard library alone.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker-compose.yml", "tests/deploy/docker-compose.test.yml")
BASE_IMAGES = ("debian:bookworm-slim", "python:3.11-slim-bookworm")
COMMAND_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 1800.0
# Ends what a container runs as a crash would; `docker kill` counts as the operator's wish, which is not restarted.
CRASH = """
import os, pathlib, signal
for directory in pathlib.Path("/proc").iterdir():
    if directory.name.isdigit() and directory.name != "1" and int(directory.name) != os.getpid():
        os.kill(int(directory.name), signal.SIGKILL)
"""


def why_not() -> str | None:
    """The reason why the stack cannot run here, or None."""
    if os.environ.get("COMPOSE_TEST") != "1":
        return "builds images and runs the stack in Docker, some minutes: make compose-test"
    return no_docker()


def no_docker() -> str | None:
    """What is missing here of a Docker engine and its Compose, or None."""
    if shutil.which("docker") is None or not _compose_command():
        return "docker or docker-compose is not installed (tests/deploy/docker_engine.sh installs them on Debian)"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers (tests/deploy/docker_engine.sh starts one on Debian)"
    return None


def _compose_command() -> list[str]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def get(url: str, timeout_s: float = 10.0) -> str:
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return str(answer.read().decode())


@dataclass
class Stack:
    project: str
    api_port: int
    prometheus_port: int

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """`docker-compose ARGUMENTS` for this stack. Raises with its output when it fails."""
        files = [part for name in FILES for part in ("-f", name)]
        ports = {"API_PORT": str(self.api_port), "PROMETHEUS_PORT": str(self.prometheus_port)}
        command = [*_compose_command(), "-p", self.project, *files, *arguments]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **ports},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {result.stdout[-4000:]}{result.stderr[-4000:]}")
        return result.stdout

    def up(self, **replicas: int) -> None:
        scales = [part for name, number in replicas.items() for part in ("--scale", f"{name}={number}")]
        self.compose("up", "-d", "--no-recreate", "--no-build", *scales)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        return docker("ps", "--quiet", *filters).split()

    def python(self, container: str, code: str) -> str:
        """What a Python program prints inside a container of ours."""
        return docker("exec", container, "python", "-c", code)

    def page(self, frontend: str, path: str) -> str:
        """A page of one frontend, whichever the balancer would choose."""
        url = f"http://127.0.0.1:8000{path}"
        return self.python(
            frontend, f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        )

    def span_counts(self) -> dict[str, Any]:
        (sink,) = self.containers("sink")
        code = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:4318/counts', timeout=10).read().decode())"
        )
        counts: dict[str, Any] = json.loads(self.python(sink, code))
        return counts

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query to the stack's Prometheus. Raises when Prometheus refuses the expression."""
        return list(self.prometheus(f"query?query={urllib.request.quote(expression)}")["result"])  # type: ignore[attr-defined]

    def prometheus(self, path: str) -> Any:
        answer = json.loads(get(f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def crash(self, container: str) -> None:
        """Kill what runs in it; its restart policy is then at work. The exec itself ends with its container."""
        subprocess.run(["docker", "exec", container, "python", "-c", CRASH], capture_output=True, check=False)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--tail", "40", service)


def docker(*arguments: str) -> str:
    result = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"docker {arguments[0]}: {result.stderr[-4000:]}")
    return result.stdout


def inspect(container: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return described


@contextmanager
def running(**replicas: int) -> Iterator[Stack]:
    """The stack, built from this tree and started; gone, with its volumes, behind the block."""
    stack = Stack(f"drafthouse-test-{os.getpid()}", *_free_ports(2))
    build_images(stack)
    try:
        stack.up(**replicas)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")


def wait_until(claim: str, holds: Any, timeout_s: float = 90.0) -> None:
    """Wait for a condition; an error of the question counts as not yet. Raises with the claim and the last answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            last = holds()
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            last = error
        if last is True:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {claim}; last answer: {last!r}")
        time.sleep(0.25)


def build_images(stack: Stack) -> None:
    """All images of the stack; what was built before from the same files is there already."""
    _have_base_images()
    stack.compose("build", timeout_s=BUILD_TIMEOUT_S)


def _have_base_images() -> None:
    for image in BASE_IMAGES:
        present = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False)
        if present.returncode == 0:
            continue
        pulled = subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, check=False, timeout=600)
        if pulled.returncode != 0:
            subprocess.run(["bash", "tests/deploy/base_images.sh"], cwd=ROOT, check=True, timeout=BUILD_TIMEOUT_S)
            return


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> int:
    if reason := no_docker():
        print(f"no images were built: {reason}")
        return 0
    started_s = time.monotonic()
    build_images(Stack("drafthouse-test-images", 0, 0))
    print(f"the images are built, {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
