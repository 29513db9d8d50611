"""More than a server can take: memory stays flat, everybody is told, deadlines and priorities hold, and it is quiet afterwards."""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil
import pytest
import requests

from frontend.deadlines import HEADER
from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, Client, strict_json, total
from tests.cases.crowd import OpenRequest
from tests.cases.laws import labelled
from tests.e2e.servers import Server, serve

FLOOD_S = 60.0 if IS_LONG else 20.0
WARM_S = 8.0  # caches, pools and buffers have grown to what this load needs
MAX_GROWTH_BYTES = 4 << 20  # of any process from there to the end; measured: 0.1 MiB
SEED = 20261130
NUM_CLIENTS = 48
SIM = ("--executor", "sim", "--num-draft-tokens", "5")
LIMITS = (
    "--max-num-seqs", "8", "--max-num-queued-requests", "12", "--kv-cache-tokens", "4096", "--max-model-len", "1024",
    "--sim-step-ms", "10", "--queue-timeout-s", "1", "--request-timeout-s", "3",
)  # fmt: skip


@dataclass
class Flood:
    """What a crowd of clients saw."""

    num_sent: int = 0
    num_unread: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[bytes] = field(default_factory=list)


def mixed_body(rng: random.Random) -> dict[str, object]:
    """Small and large, streamed and not; log-probs make some answers far larger than a socket's buffers."""
    body: dict[str, object] = {
        "prompt": [rng.randrange(1000, 40_000)] * rng.choice((1, 20, 300, 800)),
        "max_tokens": rng.choice((1, 16, 60, 200)),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
    }
    if rng.random() < 0.3:
        body["logprobs"] = 20
    return body


async def one_client(flood: Flood, base_url: str, rng: random.Random, until: float, reads: bool) -> None:
    where = urlsplit(base_url)
    while time.monotonic() < until:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (where.hostname, where.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        payload = json.dumps(mixed_body(rng)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        await writer.drain()
        flood.num_sent += 1
        if reads:
            _judge(flood, await asyncio.wait_for(reader.read(-1), 30))
        else:
            flood.num_unread += 1
            writer.transport.pause_reading()
            await asyncio.sleep(rng.uniform(0.5, 4.0))
        writer.transport.abort()


def _judge(flood: Flood, answer: bytes) -> None:
    """Sort an answer: whole, refused with a reason, cut short with a reason. Everything else is wrong."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode() if head.startswith(b"HTTP/1.1 ") else "none"
    if status in ("503", "504"):
        is_good = bool(strict_json(body)["error"]["message"])
        is_good &= status == "504" or b"\r\nretry-after:" in head.lower()
        outcome = status
    elif b"text/event-stream" in head.lower():
        is_good = body.count(b"data: [DONE]") == 1
        outcome = "cut short" if b'{"error":' in body else "streamed"
    else:
        is_good = status == "200" and b'"finish_reason"' in body
        outcome = "whole"
    flood.outcomes[outcome] += 1
    if not is_good:
        flood.wrong.append(answer[:300])


async def flood_of(base_url: str, seconds: float) -> Flood:
    """NUM_CLIENTS at a time, half of which never read a byte."""
    flood, until = Flood(), time.monotonic() + seconds
    clients = [
        one_client(flood, base_url, random.Random(SEED + number), until, reads=number % 2 == 0)
        for number in range(NUM_CLIENTS)
    ]
    await asyncio.gather(*clients)
    return flood


def memory_of(server: Server) -> dict[str, int]:
    """Resident bytes of the engine and of the frontend."""
    return {role: psutil.Process(server.pids(role)[0]).memory_info().rss for role in ("engine", "frontend")}


async def watch_memory(server: Server, most: dict[str, int]) -> None:
    """Keep the highest level seen of every process, until cancelled."""
    while True:
        for role, now in memory_of(server).items():
            most[role] = max(most.get(role, 0), now)
        await asyncio.sleep(0.25)


async def test_memory_is_flat_and_everybody_is_told_under_a_flood() -> None:
    print(f"seed {SEED}")
    with serve(*SIM, *LIMITS, "--check-laws", "true") as server:
        client = Client(server.base_url)
        await flood_of(server.base_url, WARM_S)
        warm, most = memory_of(server), dict[str, int]()
        watching = asyncio.create_task(watch_memory(server, most))
        flood = await flood_of(server.base_url, FLOOD_S - WARM_S)
        watching.cancel()
        print(flood.num_sent, flood.outcomes, {role: (most[role] - warm[role]) >> 10 for role in warm}, "KiB", warm)
        assert flood.wrong == []
        assert flood.outcomes["503"] > 20, "it was not too much"
        assert flood.outcomes["streamed"] > 20
        assert flood.outcomes["whole"] > 20
        assert flood.num_unread > 50
        for role in warm:
            assert most[role] - warm[role] < MAX_GROWTH_BYTES, f"the {role} grew"
        await asyncio.to_thread(client.assert_quiet, within_s=6.0)
        assert_all_accounted_for(client)


def assert_all_accounted_for(client: Client) -> None:
    """Every request that an engine was given ended, or was refused, exactly once."""
    samples = client.metrics()
    given = total(samples, "vllm:request_params_n_count")
    ended = total(samples, "vllm:request_success_total")
    refused = total(samples, "vllm:admission_rejections_total")
    print(f"given {given:g}, ended {ended:g}, refused {refused:g}")
    assert 0 < ended <= given <= ended + refused
    tired = labelled(samples, "vllm:admission_rejections_total", reason="queue_timeout")
    expired = labelled(samples, "vllm:admission_rejections_total", reason="expired")
    # What the frontend itself refused was given to nobody: of the engine's refusals only these are told apart.
    assert given >= ended + tired
    assert given <= ended + tired + expired + labelled(
        samples, "vllm:admission_rejections_total", reason="max_num_queued_reqs"
    )


# ---- deadlines, waiting and priority, over HTTP ----


@pytest.fixture(scope="module")
def narrow() -> Iterator[Client]:
    """One request at a time, and nobody waits for longer than 5 s."""
    with serve(*SIM, "--max-num-seqs", "1", "--queue-timeout-s", "5", "--check-laws", "true") as server:
        yield Client(server.base_url)


@contextmanager
def busy(client: Client) -> Iterator[OpenRequest]:
    """The only row is taken within the block, until `leave` or its end."""
    sim = {"runs": [[582]] * 4000, "step_ms": 5}
    with OpenRequest(client, {"prompt": "x", "max_tokens": 4000, "stream": True, "sim": sim}) as one:
        yield one.wait_for(1)
    client.assert_quiet(within_s=5, steady_s=0)


def body_of(path: str, stream: bool, num_steps: int, step_ms: float = 20) -> dict[str, object]:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    return {
        **prompt, "stream": stream, "max_tokens": 4000, "sim": {"runs": [[582]] * num_steps, "step_ms": step_ms},
    }  # fmt: skip


def ask(client: Client, path: str, timeout: str | None, **fields: object) -> requests.Response:
    headers = {} if timeout is None else {HEADER: timeout}
    return requests.post(client.base_url + path, json=fields, headers=headers, timeout=30)


def aborted(client: Client) -> float:
    return labelled(client.metrics(), "vllm:request_success_total", finished_reason="abort")


def rejected(client: Client, reason: str) -> float:
    return labelled(client.metrics(), "vllm:admission_rejections_total", reason=reason)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_whose_time_is_up_while_it_waits_is_a_504(narrow: Client, path: str, stream: bool) -> None:
    with busy(narrow):
        before = rejected(narrow, "expired")
        began = time.monotonic()
        response = ask(narrow, path, "0.4", **body_of(path, stream, 3))
        assert time.monotonic() - began >= 0.4 * 0.99
        error = narrow.assert_error(response, status=504)
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        assert rejected(narrow, "expired") == before + 1


def test_a_request_whose_time_is_up_while_it_runs_is_a_504(narrow: Client) -> None:
    before = aborted(narrow)
    narrow.assert_error(ask(narrow, COMPLETIONS, "0.4", **body_of(COMPLETIONS, False, 2000)), status=504)
    assert aborted(narrow) == before + 1
    narrow.assert_quiet(within_s=2, steady_s=0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_whose_time_is_up_ends_with_one_error_event(narrow: Client, path: str) -> None:
    before = aborted(narrow)
    with OpenRequest(narrow, body_of(path, True, 2000), path, headers=f"{HEADER}: 0.5\r\n") as one:
        one.wait_for(2).read_to_end(within_s=10)
        events = one.data()
    assert one.status == 200
    assert events[-1] == "[DONE]"
    assert [event for event in events[:-1] if "error" in event] == events[-2:-1]
    assert events[-2]["error"]["code"] == "deadline_exceeded"
    assert aborted(narrow) == before + 1
    narrow.assert_quiet(within_s=2, steady_s=0)


def test_a_request_that_ends_in_time_notices_nothing_of_its_deadline(narrow: Client) -> None:
    response = ask(narrow, COMPLETIONS, "60", **body_of(COMPLETIONS, False, 5))
    assert response.json()["choices"][0]["text"] == " one" * 5


def test_who_waits_too_long_is_sent_away_to_come_back_later(narrow: Client) -> None:
    with busy(narrow):
        before = rejected(narrow, "queue_timeout")
        began = time.monotonic()
        response = ask(narrow, COMPLETIONS, None, **body_of(COMPLETIONS, False, 3))
        assert time.monotonic() - began >= 4.9
        error = narrow.assert_error(response, "waited 5 s", status=503)
        assert error["type"] == "overloaded_error"
        assert int(response.headers["Retry-After"]) >= 1
        assert rejected(narrow, "queue_timeout") == before + 1


def test_urgent_requests_go_first_and_take_nothing_from_who_runs(narrow: Client) -> None:
    order: list[int] = []

    def run(priority: int) -> None:
        response = ask(narrow, COMPLETIONS, None, **body_of(COMPLETIONS, False, 10), priority=priority)
        assert response.status_code == 200, response.text
        order.append(priority)

    threads = [threading.Thread(target=run, args=(priority,)) for priority in (7, 0, -7, 3)]
    with busy(narrow) as running:
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while total(narrow.metrics(), "vllm:num_requests_waiting") < number:
                time.sleep(0.01)
        assert b"error" not in running.wait_for(running.num_chunks + 5).received
        running.leave()
        for thread in threads:
            thread.join(30)
    assert order == [-7, 0, 3, 7]
