"""Clients whose every answer is known in advance, so that a lost, short or wrong one is seen; and the laws afterwards.

Each request carries a script for the simulated engine: its tokens, rounds and statistics follow from it alone. Clients run
in a thread with an event loop of its own, while the test harms the servers.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import requests

from tests.cases.client import parse_metrics, total
from tests.cases.laws import ENGINE_GAUGES, Increments, assert_well_formed, increments, labelled
from tests.chaos.members import WIDTH, Fleet, wait_until

TOKENS = (582, 827, 1296, 1876, 2531, 2976)  # plain text in the embedded vocabulary
CLIENT_TIMEOUT_S = 45.0  # longer than anything may take: who waits for so long was forgotten


@dataclass(frozen=True)
class Script:
    """One request and what must come of it."""

    runs: tuple[tuple[int, ...], ...]
    step_ms: float
    streamed: bool
    leaves_after: int | None  # chunks; None: stays to the end

    @property
    def token_ids(self) -> list[int]:
        return [token for run in self.runs for token in run]

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": [582 + self.runs[0][0] % 64] * (1 + len(self.runs) % 40),
            "max_tokens": len(self.token_ids) + 8,
            "return_token_ids": True,
            "spec_decode_metrics": "summary",
            "sim": {"runs": self.runs, "step_ms": self.step_ms},
        }
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True)
class Result:
    """How one request ended. `kind`: complete, told (an error event), refused (an error status), left, broken, or wrong."""

    kind: str
    url: str
    started: float
    ended: float
    num_tokens: int = 0
    num_accepted: int = 0
    longest_gap_s: float = 0.0
    detail: str = ""


def scripts(rng: random.Random, leaving: float = 0.0, longest: int = 12, step_ms: float = 4.0) -> Iterator[Script]:
    """Requests without end. `leaving`: the share of clients that go away in the middle."""
    while True:
        runs = tuple(
            tuple(rng.choice(TOKENS) for _ in range(rng.randint(1, WIDTH + 1))) for _ in range(rng.randint(1, longest))
        )
        leaves = rng.random() < leaving
        yield Script(
            runs=runs,
            step_ms=step_ms,
            streamed=leaves or rng.random() < 0.7,
            leaves_after=rng.randint(0, max(1, len(runs) // 2)) if leaves else None,
        )


class Crowd:
    """Clients that ask one request after another. Start and stop by `crowd`; `results` grows meanwhile."""

    def __init__(self, urls: Callable[[], list[str]], source: Iterator[Script], width: int, count: int | None) -> None:
        """`urls`: where to ask, looked up for every request. `count`: requests in all; None: until stopped."""
        self.results: list[Result] = []
        self.failures: list[BaseException] = []
        self._urls = urls
        self._source = source
        self._width = width
        self._left = count
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, within_s: float = CLIENT_TIMEOUT_S + 15) -> list[Result]:
        """Ask nothing new, wait for the answers to what was asked."""
        self._is_over.set()
        return self.join(within_s)

    def join(self, within_s: float = CLIENT_TIMEOUT_S + 15) -> list[Result]:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "clients still wait"
        if self.failures:
            raise self.failures[0]
        return self.results

    def _run(self) -> None:
        try:
            asyncio.run(self._ask_all())
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self.failures.append(error)

    async def _ask_all(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._ask_on(session) for _ in range(self._width)))
            await asyncio.sleep(0)

    async def _ask_on(self, session: aiohttp.ClientSession) -> None:
        turn = 0
        while not self._is_over.is_set() and self._left != 0:
            urls = self._urls()
            if not urls:
                await asyncio.sleep(0.05)
                continue
            if self._left is not None:
                self._left -= 1
            turn += 1
            script = next(self._source)
            result = await ask(session, urls[(turn + id(session)) % len(urls)], script)
            self.results.append(result)
            if result.kind in ("refused", "broken"):
                await asyncio.sleep(0.05)


async def ask(session: aiohttp.ClientSession, url: str, script: Script) -> Result:
    """One request to its end, and what it came to."""
    started = time.monotonic()

    def result(kind: str, **more: Any) -> Result:
        return Result(kind, url, started, time.monotonic(), **more)

    try:
        async with session.post(url + "/v1/completions", json=script.body()) as response:
            if response.status != 200:
                return result(*_refusal(response.status, await response.read(), response.headers))
            if script.streamed:
                return await _read_stream(response, script, result)
            return _judge(script, [json.loads(await response.read())], result)
    except TimeoutError:
        return result("wrong", detail=f"no end within {CLIENT_TIMEOUT_S:g} s")
    except (aiohttp.ClientError, ConnectionError) as error:
        return result("broken", detail=repr(error))


def _refusal(status: int, body: bytes, headers: Any) -> tuple[str]:
    """An error status is fine when it is one of ours in full."""
    assert status == 503, (status, body[:500])
    assert json.loads(body)["error"]["message"], body[:500]
    return ("refused",)


async def _read_stream(response: aiohttp.ClientResponse, script: Script, result: Callable[..., Result]) -> Result:
    chunks: list[dict[str, Any]] = []
    last, longest = None, 0.0
    if script.leaves_after == 0:
        response.close()
        return result("left")
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        longest, last = max(longest, now - last if last is not None else 0.0), now
        if line.strip() == b"data: [DONE]":
            rest = await response.content.read()
            if rest.strip():
                return result("wrong", detail=f"data after [DONE]: {rest[:200]!r}")
            return _judge(script, chunks, result, longest_gap_s=longest)
        chunks.append(json.loads(line[6:]))
        if script.leaves_after is not None and len(chunks) >= script.leaves_after:
            response.close()
            return result("left")
    return result("broken", detail="the stream ended without [DONE]")


def _judge(script: Script, chunks: list[dict[str, Any]], result: Callable[..., Result], **more: Any) -> Result:
    """Complete, told, or wrong: every token, the usage and the statistics are known from the script."""
    if "error" in chunks[-1]:
        message = chunks[-1]["error"]["message"]
        return result("told" if message else "wrong", detail=message or "an error without a message", **more)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    token_ids = [token for choice in choices for token in choice.get("token_ids") or []]
    usage = chunks[-1]["usage"]["completion_tokens"]
    drafting = [run for run in script.runs if len(run) > 1]
    wanted = {
        "num_spec_steps": len(drafting),
        "num_accepted_draft_tokens": sum(len(run) - 1 for run in drafting),
        "num_draft_tokens": sum(len(run) - 1 for run in drafting),
    }
    told = chunks[-1]["metrics"]["speculative_decoding"]
    got = {name: told[name] for name in wanted}
    if token_ids != script.token_ids or usage != len(token_ids) or got != wanted:
        return result("wrong", detail=f"{token_ids} for {script.token_ids}, usage {usage}, {got} for {wanted}", **more)
    if choices[-1]["finish_reason"] != "stop":
        return result("wrong", detail=f"finish_reason {choices[-1]['finish_reason']}", **more)
    return result("complete", num_tokens=usage, num_accepted=wanted["num_accepted_draft_tokens"], **more)


@contextmanager
def crowd(
    fleet: Fleet, source: Iterator[Script], width: int, count: int | None = None, urls: list[str] | None = None
) -> Iterator[Crowd]:
    """Clients that ask during the block, at every frontend that can answer or at `urls`."""
    found = Crowd(lambda: urls or [member.url for member in fleet.able()], source, width, count)
    found.start()
    try:
        yield found
    finally:
        found._is_over.set()


def assert_everybody_was_told(fleet: Fleet, results: list[Result]) -> Counter[str]:
    """Each got a complete and right answer or a clear error; a connection broke only where its frontend was ended."""
    assert not (wrong := [one for one in results if one.kind == "wrong"]), wrong[:5]
    broken = [one for one in results if one.kind == "broken" and not fleet.was_harmed(one.url, one.started)]
    assert not broken, broken[:5]
    return Counter(one.kind for one in results)


# ---- what /metrics must say afterwards ----


def scrape(url: str, path: str = "/metrics") -> dict[str, float]:
    response = requests.get(url + path, timeout=10)
    assert response.status_code == 200
    assert_well_formed(response.text)
    return parse_metrics(response.text)


def quiet_pages(fleet: Fleet, within_s: float = 12.0) -> list[dict[str, float]]:
    """Wait until every frontend shows an idle engine with no block held, and the same totals; returns the engine pages."""
    pages: list[dict[str, float]] = []

    def holds() -> bool:
        nonlocal pages
        pages = [scrape(member.url, "/metrics/engine") for member in fleet.able()]
        is_idle = bool(pages) and all(_is_idle(page, fleet) for page in pages)
        return is_idle and all(page == pages[0] for page in pages)

    def told() -> str:
        shown = [str({name: total(page, name) for name in _SHOWN}) for page in pages]
        return f"{shown}; not the same everywhere: {set.symmetric_difference(*({*p.items()} for p in (pages[0], pages[-1])))}"

    wait_until(holds, within_s, told)
    return pages


_SHOWN = (*ENGINE_GAUGES, "drafthouse:engine_up", "drafthouse:paused_rows", "drafthouse:frontends_attached")


def _is_idle(page: dict[str, float], fleet: Fleet) -> bool:
    num_engines, num_frontends = len(fleet.engines), len(fleet.frontends)
    return (
        total(page, "drafthouse:engine_up") == num_engines
        and all(total(page, name) == 0 for name in (*ENGINE_GAUGES, "drafthouse:paused_rows"))
        and total(page, "drafthouse:frontends_attached") == num_frontends * num_engines
    )


def assert_laws(before: dict[str, float], after: dict[str, float], results: list[Result] | None) -> Increments:
    """Conservation over the block, and against the clients' sums: nothing they were given is missing from the totals.

    Exact where every request ended at its client; with aborts the engine has counted what never arrived as well. None:
    the clients' sums say nothing about this engine (it began in the middle of the block).
    """
    counted = increments(before, after, WIDTH)

    def added(family: str) -> float:
        return total(after, family) - total(before, family)

    first, own = added("drafthouse:first_tokens_total"), added("drafthouse:spec_non_draft_tokens_total")
    made = first + counted.speculation.accepted + own - counted.cut
    assert counted.generation == made, f"{counted.generation} tokens generated, {made} made"
    if results is None:
        return counted
    complete = [one for one in results if one.kind == "complete"]
    tokens, accepted = sum(one.num_tokens for one in complete), sum(one.num_accepted for one in complete)
    sums = f"engine {counted.generation}, {counted.speculation.accepted}; clients {tokens}, {accepted}"
    if len(complete) == len(results):
        assert (counted.generation, counted.speculation.accepted) == (tokens, accepted), sums
    else:
        assert counted.generation >= tokens and counted.speculation.accepted >= accepted, sums
    return counted


def gone(results: list[Result]) -> set[str]:
    """The reasons that clients were told."""
    return {one.detail for one in results if one.kind == "told"}


def running_of(page: dict[str, float]) -> float:
    return labelled(page, "vllm:num_requests_running")
