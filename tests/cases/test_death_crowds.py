"""DEATH-3 and DEATH-4: many requests under one id, and more requests at once than a server can hold."""

import resource
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests

from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, PROBE, Client, strict_json, together, total
from tests.cases.crowd import OpenRequest, leave_all, seeded
from tests.cases.laws import engine_scope, increments, labelled
from tests.cases.processes import processes_of, unharmed
from tests.e2e.servers import fleet, serve

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")


def finished(samples: dict[str, float], reason: str) -> float:
    return labelled(samples, "vllm:request_success_total", finished_reason=reason)


# ---- DEATH-3: vllm-project/vllm#10583 ----


def ask_with_id(client: Client, token: int) -> list[int]:
    """A request whose answer is its own token, under the same id as every other one; in turn by either API, streamed or not."""
    path, is_stream = (COMPLETIONS, CHAT)[token % 2], token // 2 % 2 == 1
    # A prompt of its own and the id in header and body, in the header alone, in the body alone.
    what = {"prompt": [token]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": str(token)}]}
    body = {**what, "max_tokens": 100, "return_token_ids": True, "sim": {"runs": [[token] * 6] * 5, "step_ms": 20}}
    body |= {"request_id": "id"} if token % 3 else {}
    headers = {} if token % 3 == 1 else {"X-Request-Id": "id"}
    if is_stream:
        return Client(client.base_url).stream(path, headers, **body).token_ids[0]
    response = requests.post(client.base_url + path, json=body, headers=headers, timeout=20)
    assert response.status_code == 200, response.text
    assert response.headers["X-Request-Id"] == "id" or not headers
    ids: list[int] = strict_json(response.content)["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("name", ["sim", "sim_4f"])
@pytest.mark.parametrize("count", [2, 20])
def test_death_3_requests_under_one_id_get_their_own_answers(
    setup: Callable[[str], Client], name: str, count: int
) -> None:
    client = setup(name)
    before = engine_scope(client.metrics())
    with unharmed(client):
        tokens = [1000 + index for index in range(count)]
        got = together([lambda t=t: ask_with_id(client, t) for t in tokens], width=count)
        assert got == [[token] * 30 for token in tokens]
        client.assert_quiet()
    counted = increments(before, engine_scope(client.metrics()), WIDTH)
    assert counted.generation == 30 * count + 2 * PROBE["max_tokens"]


def test_death_3_leaving_one_of_two_requests_under_one_id_leaves_the_other() -> None:
    body = {
        "prompt": "x", "max_tokens": 4000, "stream": True, "request_id": "id", "return_token_ids": True,
        "sim": {"runs": [RUN] * 40, "step_ms": 15},
    }  # fmt: skip
    with fleet(2, *SIM) as urls:
        clients = [Client(url) for url in urls]
        for first_at, second_at in ((0, 0), (0, 1)):  # both at one frontend, and at one each
            before = [client.metrics() for client in clients]
            stays = OpenRequest(clients[first_at], body, headers="X-Request-Id: id\r\n").wait_for(1)
            with OpenRequest(clients[second_at], body, headers="X-Request-Id: id\r\n") as leaves:
                leaves.wait_for_headers()
            stays.read_to_end()
            assert ids_of(stays) == RUN * 40
            stays.leave()
            for client in clients:
                client.assert_quiet(steady_s=0.3)
            after = [client.metrics() for client in clients]
            for reason in ("abort", "stop"):
                assert sum(finished(page, reason) for page in after) == 1 + sum(
                    finished(page, reason) for page in before
                )
            increments(engine_scope(before[0]), engine_scope(after[1]), WIDTH)


def ids_of(stream: OpenRequest) -> list[int]:
    events = stream.data()
    assert events[-1] == "[DONE]"
    return [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"] or []]


@pytest.mark.parametrize("header", ["", "a" * 10_000, "a b", "\u00e4", "a\x00b", "<script>", '"'])
def test_death_3_a_request_id_of_any_form_harms_nobody(sim: Client, header: str) -> None:
    with (
        unharmed(sim),
        OpenRequest(sim, {"prompt": "x", "max_tokens": 1}, headers=f"X-Request-Id: {header}\r\n") as one,
    ):
        one.read_to_end(within_s=5)
        assert one.status in (200, 400, 431)


# ---- DEATH-4: vllm-project/vllm#32193 ----

# The pool holds four requests of the usual length, and one of them takes about a tenth of a second.
SMALL_POOL = ("--kv-cache-tokens", "4096", "--max-model-len", "2100", "--max-num-queued-requests", "100")
SMALL_POOL += ("--sim-step-ms", "10")


def burst(client: Client, bodies: list[dict[str, Any]]) -> list[OpenRequest]:
    """All of them sent as fast as one thread can, every third one a stream."""
    started = time.monotonic()
    opened = [OpenRequest(client, {**body, "stream": index % 3 == 0}) for index, body in enumerate(bodies)]
    print(f"{len(bodies)} requests in {time.monotonic() - started:.3f} s")
    return opened


def answered(one: OpenRequest, num_tokens: int) -> bool:
    """Whether it was answered in full; otherwise it was refused, with a reason and a time to come back."""
    body = one.received.split(b"\r\n\r\n", 1)[1]
    if one.status != 200:
        assert one.status in (429, 503), one.received[:300]
        assert strict_json(body)["error"]["message"]
        assert b"retry-after:" in one.received.lower()
        return False
    if b"text/event-stream" in one.received:
        assert len(ids_of(one)) == num_tokens
    else:
        assert strict_json(body)["usage"]["completion_tokens"] == num_tokens
    return True


@pytest.mark.parametrize("frontends", [1, 2] if IS_LONG else [2])
def test_death_4_a_burst_is_queued_or_refused_with_a_reason_and_loses_nobody(frontends: int) -> None:
    rng = seeded("DEATH-4")
    with serve(*SIM, *SMALL_POOL, "--frontends", str(frontends)) as server:
        client = Client(server.base_url, timeout_s=60)
        for pid in processes_of(client).all:
            psutil.Process(pid).rlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        with unharmed(client):
            before = engine_scope(client.metrics())
            lengths = [rng.randint(50, 2000) for _ in range(500)]
            bodies = [
                {"prompt": [1000 + i] * size, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
                for i, size in enumerate(lengths)
            ]
            opened = burst(client, bodies)
            together([lambda one=one: one.read_to_end(within_s=60) for one in opened], width=50)
            leave_all(opened)
            client.assert_quiet()
            after = engine_scope(client.metrics())
        num_answered = sum([answered(one, 20) for one in opened])
        assert 50 <= num_answered < 500, "some were too many, and not all"
        assert total(after, "vllm:generation_tokens_total") - total(before, "vllm:generation_tokens_total") == (
            20 * num_answered
        ), "nobody was refused who had been run"
