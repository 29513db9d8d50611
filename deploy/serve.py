"""`drafthouse serve`: engines and frontends on this machine, on one port, behind one Ctrl-C.

Owns the options of the whole, the private socket directory, the shared port, and what is printed for people. Everything
is checked before anything starts. Keeping the processes alive is deploy.supervisor's.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil  # type: ignore[import-untyped]
from msgspec import Meta

import deploy
from deploy.supervisor import EXIT_FAILURE, Program, Supervisor
from engine.config import EngineConfig
from engine.speculation.names import SYNTHETIC
from frontend.api_keys import VARIABLE
from frontend.config import FrontendConfig
from protocol.model_files import ModelFilesError, resolve
from protocol.options import (
    ENVIRONMENT_PREFIX,
    HelpRequested,
    Option,
    OptionsError,
    as_flags,
    build,
    read,
    refuse,
    table,
)

PROGRAM = "drafthouse serve"
DIRECTORY_PREFIX = "drafthouse-"
ENGINE_STOP_S = 7.0
ENGINE_DRAIN_S = 5.0  # its frontends have gone by then: of one that was killed, something may still run
# Beyond its drain time: 2 s for the last words, 1 s for open connections, 5 s to flush telemetry to a collector that hangs.
FRONTEND_STOP_MARGIN_S = 10.0
READY_POLL_S = 0.1
_ATTACHED = re.compile(rb"^drafthouse:frontends_attached\{.*\} (\S+)$", re.MULTILINE)
_ENGINE_OWN = ("listen", "allow_plaintext_tcp", "drain_timeout_s", "curve_key_file", "curve_client_keys", "alive_file")
_FRONTEND_OWN = (
    "engine", "allow_plaintext_tcp", "reuse_port", "drain_timeout_s", "curve_key_file", "curve_server_key_file",
)  # fmt: skip


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What only the whole has."""

    engines: Annotated[
        int, Meta(ge=1, le=64, description="engine processes, each with the model and a cache of its own")
    ] = 1
    frontends: Annotated[int, Meta(ge=1, le=64, description="frontend processes that share the port")] = 1
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that running requests get to finish after Ctrl-C or SIGTERM")
    ] = 5.0


class Plan(msgspec.Struct, frozen=True):
    """Everything that was asked for, checked. `given`: by option name, defaults left out."""

    given: dict[str, Any]
    serve: ServeConfig
    engine: EngineConfig
    frontend: FrontendConfig
    model_name: str


def main() -> int:
    try:
        plan = read_plan(sys.argv[1:], os.environ)
    except HelpRequested as text:
        sys.stdout.write(str(text))
        return 0
    except (OptionsError, ModelFilesError) as error:
        refuse(PROGRAM, str(error))
    try:
        port = _reserve_port(plan.frontend.host, plan.frontend.port)
    except OSError as error:
        sys.stderr.write(
            f"{PROGRAM}: cannot listen on {plan.frontend.host}:{plan.frontend.port}: {error.strerror or error}\n"
        )
        return EXIT_FAILURE
    _remove_left_directories()
    directory = Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-", dir=_short_directory()))
    try:
        with port:
            return asyncio.run(_serve(plan, directory, port.getsockname()[1]))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def options() -> dict[str, Option]:
    """The options of engine and frontend together; what the supervisor decides itself is left out."""
    return table(ServeConfig) | table(FrontendConfig, without=_FRONTEND_OWN) | table(EngineConfig, without=_ENGINE_OWN)


def read_plan(arguments: list[str], environment: Mapping[str, str]) -> Plan:
    """Parse and check. Raises `OptionsError`, `ModelFilesError`, `HelpRequested`."""
    given = read(options(), arguments, environment, program=PROGRAM, secrets=(VARIABLE,))
    serve, engine = build(ServeConfig, given), build(EngineConfig, given)
    # As the frontends will get it: serve's own default differs from theirs.
    frontend = build(FrontendConfig, given | {"drain_timeout_s": serve.drain_timeout_s})
    if serve.engines > 1 and "engine_id" in given:
        raise OptionsError("--engine-id is of one engine: with --engines the ids are 0, 1 and so on")
    if serve.engines * engine.memory_share > 1 and "memory_share" in given:
        raise OptionsError(
            f"--memory-share {engine.memory_share:g} for each of --engines {serve.engines} is more than there is"
        )
    # Also fetches a model of the hub once, before two processes want it at the same time.
    files = resolve(engine.model)
    return Plan(given, serve, engine, frontend, engine.served_model_name or files.name)


def programs(plan: Plan, addresses: list[str], port: int) -> list[Program]:
    """The command lines: exactly what was given, passed on as flags. One engine per address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    root = str(Path(deploy.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    python = [sys.executable, "-P", "-m"]  # -P: a directory called engine where the user stands is not ours
    frontend = [
        *python, "frontend", *_flags(plan, FrontendConfig, without=("port",)), f"--engine={','.join(addresses)}",
        f"--port={port}", "--reuse-port=true", f"--drain-timeout-s={plan.serve.drain_timeout_s:g}",
    ]  # fmt: skip
    secret = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}  # the engine needs none
    frontend_stop_s = plan.serve.drain_timeout_s + FRONTEND_STOP_MARGIN_S
    return [
        *(
            Program(name, [*python, "engine", *command], environment, 1, ENGINE_STOP_S)
            for name, command in _engines(plan, addresses)
        ),
        *(
            Program(f"frontend {number}", frontend, environment | secret, 0, frontend_stop_s)
            for number in range(1, plan.serve.frontends + 1)
        ),
    ]


def _engines(plan: Plan, addresses: list[str]) -> list[tuple[str, list[str]]]:
    """(name, flags) of every engine. A single one keeps the id it was given."""
    flags = [*_flags(plan, EngineConfig), *_memory_share(plan), f"--drain-timeout-s={ENGINE_DRAIN_S:g}"]
    if len(addresses) == 1:
        return [("engine", [*flags, f"--listen={addresses[0]}"])]
    return [
        (f"engine {number}", [*flags, f"--engine-id={number}", f"--listen={address}"])
        for number, address in enumerate(addresses)
    ]


def _memory_share(plan: Plan) -> list[str]:
    """Several engines size their caches by one memory, whichever of them loads first: each gets its part."""
    engine = plan.engine
    is_sized = engine.executor == "sim" or engine.kv_cache_tokens is not None or "memory_share" in plan.given
    return [] if is_sized or plan.serve.engines == 1 else [f"--memory-share={1 / plan.serve.engines:.6g}"]


async def _serve(plan: Plan, directory: Path, port: int) -> int:
    engines = "the engine" if plan.serve.engines == 1 else f"{plan.serve.engines} engines"
    _say(f"drafthouse serves {plan.model_name}: starting {engines} and {plan.serve.frontends} frontend(s)")
    for line in _summary(plan):
        _say(f"  {line}")
    names = ["engine"] if plan.serve.engines == 1 else [f"engine-{number}" for number in range(plan.serve.engines)]
    supervisor = Supervisor(programs(plan, [f"ipc://{directory}/{name}.sock" for name in names], port), _say)
    announcing = asyncio.create_task(_announce(plan, port, supervisor), name="announce")
    try:
        code = await supervisor.run()
    finally:
        announcing.cancel()
    _say("stopped" if code == 0 else f"stopped with exit code {code}")
    return code


def _summary(plan: Plan) -> list[str]:
    engine, num_engines = plan.engine, plan.serve.engines
    size = (
        "sized by memory" if num_engines == 1 else f"sized by memory, an equal part for each of {num_engines} engines"
    )
    drafts = "" if engine.num_draft_tokens is None else f", {engine.num_draft_tokens} draft tokens"
    return [
        f"model        {engine.model} as {plan.model_name}",
        f"executor     {engine.executor}, dtype {engine.dtype}, device {engine.device}",
        f"speculation  {engine.speculator}{drafts}{_unlike_the_model(engine)}",
        f"batch        {engine.max_num_seqs} sequences, {engine.max_num_batched_tokens} tokens per step",
        f"cache        {engine.kv_cache_tokens or size}, prefix caching {'on' if engine.prefix_caching else 'off'}",
    ]


def _unlike_the_model(engine: EngineConfig) -> str:
    return ": the text is NOT the model's, for measuring speed only" if engine.speculator == SYNTHETIC else ""


async def _announce(plan: Plan, port: int, supervisor: Supervisor) -> None:
    """Wait until everything is ready, then say where; and again whenever something had to be restarted."""
    host = _reachable(plan.frontend.host)
    started_s = time.monotonic()
    await _until_ready(plan, port, supervisor)
    supervisor.is_up()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": plan.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
    _say(f"ready after {time.monotonic() - started_s:.1f} s on {url} (metrics: {url}/metrics)")
    has_keys = plan.frontend.api_key_file is not None or VARIABLE in os.environ
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    _say(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
    _say(f"running: {supervisor.status()}")
    while True:
        await supervisor.restarted()
        restarted_s = time.monotonic()
        await _until_ready(plan, port, supervisor)
        _say(f"ready again after {time.monotonic() - restarted_s:.1f} s: {supervisor.status()}")


async def _until_ready(plan: Plan, port: int, supervisor: Supervisor) -> None:
    """Until every frontend listens, every engine has them all, and whoever answers says that all engines are ready.

    The kernel spreads connections over the frontends: asking cannot reach each of them, so the engines are asked as well.
    """
    host = _reachable(plan.frontend.host)
    in_a_row = 0
    while not _all_listen(supervisor, port):
        await asyncio.sleep(READY_POLL_S)
    while in_a_row < 3 * plan.serve.frontends:
        is_ready = await _are_attached(host, port, plan) and await _is_ready(host, port, plan.serve.engines)
        in_a_row = in_a_row + 1 if is_ready else 0
        if in_a_row == 0:
            await asyncio.sleep(READY_POLL_S)


def _all_listen(supervisor: Supervisor, port: int) -> bool:
    pids = [pid for name, pid in supervisor.pids().items() if name.startswith("frontend")]
    return bool(pids) and all(_listens(pid, port) for pid in pids)


def _listens(pid: int, port: int) -> bool:
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets)


async def _is_ready(host: str, port: int, num_engines: int) -> bool:
    answer = await _get(host, port, "/ready")
    return b" 200 " in answer.partition(b"\r\n")[0] and answer.count(b'"ready":true') == num_engines


async def _are_attached(host: str, port: int, plan: Plan) -> bool:
    """Whether every engine counts as many frontends as were started."""
    counts = _ATTACHED.findall(await _get(host, port, "/metrics"))
    return len(counts) == plan.serve.engines and all(float(count) >= plan.serve.frontends for count in counts)


async def _get(host: str, port: int, path: str) -> bytes:
    """The answer of some frontend, head and body; empty where there was none."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def _flags(plan: Plan, kind: type[msgspec.Struct], without: tuple[str, ...] = ()) -> list[str]:
    own = table(kind, without=(*without, *_ENGINE_OWN, *_FRONTEND_OWN))
    return as_flags({name: value for name, value in plan.given.items() if name in own})


def _reserve_port(host: str, port: int) -> socket.socket:
    """A bound socket that keeps the port for the frontends, which share it. Raises OSError when somebody else has it.

    The first bind, without SO_REUSEPORT, is what finds another server: two that both share would share silently.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        chosen = probe.getsockname()
    held = socket.socket(family, kind, protocol)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(chosen)
    return held


def _short_directory() -> str | None:
    """Where the socket goes: socket paths are limited to about 100 bytes, and some TMPDIRs are longer."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"


def _remove_left_directories() -> None:
    """Remove what supervisors that were killed left behind."""
    for left in Path(_short_directory() or tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*-*"):
        pid = left.name.removeprefix(DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)) and left.is_dir() and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _say(line: str) -> None:
    """To whoever reads it. A reader that left or a full disk must not cost a restart, or the end that a signal asked for."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # unbuffered: what was not written would fail again at exit


if __name__ == "__main__":
    sys.exit(main())
