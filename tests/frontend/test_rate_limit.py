"""Limits per key: exact in any window, fair between keys, bounded in memory, and answered as OpenAI's clients expect."""

import asyncio
import json
import logging
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.api_keys import VARIABLE, Client
from frontend.config import FrontendConfig
from frontend.errors import ApiError
from frontend.key_ring import KeyRing
from frontend.rate_limit import LOG_INTERVAL_S, WINDOW_S, RateLimits
from tests.frontend.test_api_keys import KEY, PROMPT, Site, listening

ALICE, BOB = Client("name alice", "alice"), Client("name bob", "bob")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def begun(limits: RateLimits, client: Client = ALICE) -> ApiError | None:
    """One short request: None, or why it was refused."""
    try:
        with limits.enter(client):
            return None
    except ApiError as error:
        return error


def test_more_than_the_limit_at_a_time_is_refused_until_one_ends():
    limits = RateLimits(2, None, Clock())
    with ExitStack() as running:
        running.enter_context(limits.enter(ALICE))
        with limits.enter(ALICE):
            refused = begun(limits)
            assert refused is not None and (refused.status, refused.retry_after_s) == (429, 1)
            assert "2 requests running; the limit is 2" in refused.message
            assert begun(limits, BOB) is None, "one client's load is another's business"
        assert begun(limits) is None
    assert limits.refused == {"concurrent_requests": 1, "requests_per_minute": 0}


def test_a_request_that_fails_gives_its_place_back():
    limits = RateLimits(1, None, Clock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limits.enter(ALICE):
            raise ZeroDivisionError
    assert begun(limits) is None


def test_retry_after_is_when_the_next_request_is_taken():
    clock = Clock()
    limits = RateLimits(None, 3, clock)
    for _ in range(3):
        assert begun(limits) is None
        clock.now_s += 7
    refused = begun(limits)
    assert refused is not None and refused.retry_after_s is not None
    clock.now_s += refused.retry_after_s - 1.01
    assert begun(limits) is not None
    clock.now_s += 1.01
    assert begun(limits) is None


def test_refused_requests_do_not_count_against_the_next_minute():
    clock = Clock()
    limits = RateLimits(None, 2, clock)
    for _ in range(50):
        begun(limits)
    clock.now_s += WINDOW_S + 1
    assert [begun(limits) is None for _ in range(3)] == [True, True, False]


@given(st.lists(st.floats(0, 20), max_size=200), st.integers(1, 7))
def test_no_minute_has_more_than_the_limit_and_waiting_always_helps(gaps: list[float], limit: int):
    clock = Clock()
    limits = RateLimits(None, limit, clock)
    taken: list[float] = []
    for gap in gaps:
        clock.now_s += gap
        refused = begun(limits)
        if refused is None:
            taken.append(clock.now_s)
        else:
            assert refused.retry_after_s is not None and 1 <= refused.retry_after_s <= WINDOW_S + 1
    for index, moment in enumerate(taken):
        assert sum(moment - WINDOW_S < other <= moment for other in taken[: index + 1]) <= limit


def test_memory_is_bounded_by_the_window_and_by_the_keys():
    clock = Clock()
    limits = RateLimits(None, 1_000_000, clock)
    for _ in range(10_000):
        clock.now_s += 0.1
        assert begun(limits) is None
    assert len(limits._usages[ALICE.identity].seconds) <= WINDOW_S + 1
    begun(limits, BOB)
    limits.keep({BOB.identity})
    assert set(limits._usages) == {BOB.identity}


def test_forgetting_a_client_that_runs_hurts_nobody():
    limits = RateLimits(1, None, Clock())
    with limits.enter(ALICE):
        limits.keep(())
    assert begun(limits) is None


def test_a_client_that_does_not_stop_is_named_in_the_log_once_a_minute(caplog):
    clock = Clock()
    limits = RateLimits(None, 1, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            begun(limits)
        assert [record.getMessage() for record in caplog.records] == [
            "client limited client='alice' reason=requests_per_minute"
        ]
        clock.now_s += LOG_INTERVAL_S - 1
        begun(limits)
        assert len(caplog.records) == 1


# ---- over HTTP ----


async def test_a_limited_client_gets_openais_429_before_its_body_is_read():
    ring = KeyRing(FrontendConfig(requests_per_minute_per_key=2), {VARIABLE: KEY})
    async with listening(ring) as site:
        for _ in range(2):
            assert (await site.ask("/v1/completions", KEY, "POST", PROMPT))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9999\r\n\r\n".encode()
        )
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
        body = await reader.readexactly(int(head.lower().split("content-length: ")[1].split("\r\n")[0]))
        writer.close()
        error = json.loads(body)["error"]
        assert head.startswith("HTTP/1.1 429") and 55 <= int(head.split("Retry-After: ")[1].split("\r\n")[0]) <= 61
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await site.ask("/health", KEY))[0] == 200, "open routes count for nobody"
        assert len(site.server.engine.submitted) == 2
        page = site.server.metrics.render((), "", "frontend")[0].decode()
        assert 'drafthouse:rate_limited_total{reason="requests_per_minute"} 1\n' in page


async def test_a_stream_holds_its_place_until_it_ends_or_its_client_leaves():
    ring = KeyRing(FrontendConfig(max_requests_per_key=1), {VARIABLE: KEY})
    async with listening(ring) as site:
        site.server.engine.autoplay = False
        writer = await streaming(site)
        assert (await site.ask("/v1/models", KEY))[0] == 429
        writer.close()
        async with asyncio.timeout(5):
            while (await site.ask("/v1/models", KEY))[0] != 200:
                await asyncio.sleep(0.01)


async def streaming(site: Site) -> asyncio.StreamWriter:
    """A stream that has begun and says nothing more."""
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(5):
        while not site.server.engine.submitted:
            await asyncio.sleep(0.001)
    return writer
