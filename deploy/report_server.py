"""The server's side of a report: asks a live server for one traced answer, and starts one where there is none.

Owns the HTTP client of the report and the child process `drafthouse serve`. Never reads spans and never draws. Used by
deploy.report.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

import deploy
from frontend.api_keys import VARIABLE
from protocol.options import ENVIRONMENT_PREFIX

START_TIMEOUT_S = 900.0  # a first start may fetch a model
STOP_TIMEOUT_S = 20.0  # more than the supervisor needs to stop in order
METRICS_TIMEOUT_S = 10.0
_READY = re.compile(r"^ready after .* on (http://\S+) ")
_LAST_WORDS = 15  # lines of a server that ended


class ServerTrouble(RuntimeError):
    """The server cannot be started, reached or asked. The message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """What is kept of an answer. `trace_id` is what the server said it traced under; None when it traced nothing."""

    trace_id: str | None


async def ask(url: str, prompt: str, max_tokens: int, headers: Mapping[str, str], timeout_s: float) -> Answer:
    """Send one chat request and read the answer to its end. Raises `ServerTrouble`."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            content = await response.read()
            if response.status != 200:
                hint = f"; the report takes a key from {VARIABLE}" if response.status == 401 else ""
                raise ServerTrouble(f"{url} answered {response.status}: {_message(content)}{hint}")
            return Answer(response.headers.get("X-Trace-Id"))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerTrouble(f"{url} cannot be asked: {_reason(error, timeout_s)}") from error


async def read_metrics(url: str) -> str:
    """The /metrics page in the classic text format. Raises `ServerTrouble`."""
    timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/metrics", headers={"Accept": "text/plain"}) as response,
        ):
            if response.status != 200:
                raise ServerTrouble(f"{url}/metrics answered {response.status}")
            return (await response.read()).decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerTrouble(f"{url}/metrics cannot be read: {_reason(error, METRICS_TIMEOUT_S)}") from error


@asynccontextmanager
async def served(arguments: list[str], receiver_url: str) -> AsyncIterator[str]:
    """`drafthouse serve ARGUMENTS` on a free port, sending every span to `receiver_url`; gives its base URL when it is
    ready, and ends it behind the block. Raises `ServerTrouble` when it does not come up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "deploy.launcher", "serve", "--port=0", *arguments,
        env=server_environment(os.environ, receiver_url), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the report, which ends its server itself
    )  # fmt: skip
    reading: asyncio.Task[None] | None = None
    try:
        url = await _ready(process)
        reading = asyncio.create_task(_drain(process), name="read the server's output")
        yield url
    finally:
        if reading is not None:
            reading.cancel()
        await _end(process)


def server_environment(environment: Mapping[str, str], receiver_url: str) -> dict[str, str]:
    """This process's environment for a server whose every span comes here: without options of ours or OpenTelemetry's."""
    kept = {name: value for name, value in environment.items() if not name.startswith((ENVIRONMENT_PREFIX, "OTEL_"))}
    root = str(Path(deploy.__file__).parents[1])
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH")))),
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver_url}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms; one request is waited for
    }


async def _ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=_LAST_WORDS)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := await process.stdout.readline():
                last.append(line.decode("utf-8", "replace").rstrip())
                found = _READY.match(last[-1])
                if found is not None:
                    return found[1]
    except TimeoutError:
        raise ServerTrouble(f"the server was not ready after {START_TIMEOUT_S:g} s") from None
    code = await process.wait()
    raise ServerTrouble(f"the server ended with {code} before it was ready:\n" + "\n".join(last))


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read on, so that a full pipe never stops the server."""
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        # communicate() and not wait(): the pipe is read to its end, as the child may still be writing to it.
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _message(content: bytes) -> str:
    """The sentence of an error answer."""
    try:
        error: Any = msgspec.json.decode(content)["error"]
        return str(error["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")


def _reason(error: Exception, timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
