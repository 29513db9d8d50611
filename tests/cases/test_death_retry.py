"""DEATH: one engine of two is killed in the middle of answers of which no client has seen anything; the other gives them whole."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.cases.client import CHAT, COMPLETIONS, Client, total
from tests.cases.laws import labelled
from tests.cases.processes import wait_until
from tests.e2e.servers import Server, serve

RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true", "--sim-step-ms", "25", "--engines", "2")
LONG = {"runs": [RUN] * 60, "step_ms": 25}
SCRIPTED = {"sim": LONG, "max_tokens": 1000, "return_token_ids": True, "spec_decode_metrics": "summary"}
DRAWN = {
    "prompt": "once",
    "seed": 7,
    "temperature": 1.0,
    "max_tokens": 150,
    "ignore_eos": True,
    "return_token_ids": True,
}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((COMPLETIONS, {"prompt": f"{number}", **SCRIPTED}) for number in range(4)),
    *((CHAT, {"messages": [{"role": "user", "content": f"{number}"}], **SCRIPTED}) for number in range(2)),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], **SCRIPTED}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 2, **SCRIPTED}),
    (COMPLETIONS, {**DRAWN, "logprobs": 3}),
    (COMPLETIONS, {**DRAWN, "prompt": "twice", "n": 3}),
)
FAMILIES = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*SIM) as started:
        yield started


def post(client: Client, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(client.base_url + path, json=body, timeout=60)


def engine_pid(server: Server, engine_id: str) -> int:
    [pid] = [pid for pid in server.pids("engine") if f"--engine-id={engine_id}" in psutil.Process(pid).cmdline()]
    return pid


def test_death_1_answers_that_nobody_has_seen_are_given_whole_by_the_other_engine(server: Server) -> None:
    client = Client(server.base_url)
    wanted = [post(client, *asked).json() for asked in ASKED[-2:]]
    before = client.metrics()
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answering = [pool.submit(post, client, path, body) for path, body in ASKED]
        # Two of six tokens a step are enough to know that answers have begun, at both engines.
        for engine_id in ("0", "1"):
            wait_until(lambda e=engine_id: grown(client, before, FAMILIES[0], e) > 60, 20, "both engines generate")
        os.kill(engine_pid(server, "0"), signal.SIGKILL)
        responses = [one.result() for one in answering]
    assert {response.status_code for response in responses} == {200}
    answers = [response.json() for response in responses]
    for answer in answers[:-2]:
        assert [choice_tokens(choice) for choice in answer["choices"]] == [RUN * 60] * len(answer["choices"])
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    for answer, reference in zip(answers[-2:], wanted, strict=True):
        assert answer["choices"] == reference["choices"], "a seed draws the same again"
    for answer in answers[:6]:
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 60 * 5
    assert_totals(client, before, answers)


def choice_tokens(choice: dict[str, Any]) -> list[int]:
    ids: list[int] = choice["token_ids"]
    return ids


def grown(client: Client, before: dict[str, float], family: str, engine_id: str) -> float:
    return labelled(client.metrics(), family, engine=engine_id) - labelled(before, family, engine=engine_id)


def assert_totals(client: Client, before: dict[str, float], answers: list[dict[str, Any]]) -> None:
    """The engine that lived gave all the answers: they add up to its totals. What the other gave is left over and counted."""
    used = sum(answer["usage"]["completion_tokens"] for answer in answers)
    num_choices = sum(len(answer["choices"]) for answer in answers)
    client.assert_quiet()
    assert grown(client, before, FAMILIES[0], "1") == used
    after = client.metrics()
    retried = labelled(after, "drafthouse:requests_retried_total", engine="0")
    assert 0 < retried <= len(ASKED) + 2, "prompts, not children"
    assert labelled(after, "drafthouse:retried_tokens_total", engine="0") > 60
    assert labelled(after, "drafthouse:retried_tokens_total", engine="1") == 0
    finished = total(after, "vllm:request_success_total") - total(before, "vllm:request_success_total")
    assert finished == num_choices
    assert labelled(after, "vllm:request_success_total", finished_reason="error") == 0
