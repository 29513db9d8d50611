"""HTTP-4, raising in detokenising: the one request ends with a reason, whichever way it was asked, and nobody else notices.

In process, because no token of the shipped vocabulary makes the real detokeniser raise.
"""

import asyncio
import json
import logging

import pytest
from aiohttp.test_utils import TestClient, TestServer

from frontend.app import build_app
from frontend.detokenizer import Detokenizer
from frontend.metrics import FrontendMetrics
from protocol.reasons import CloseReason
from tests.frontend.fakes_client import FakeEngineClient, hello, server_over

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POISON = 1137  # " said"
STOPS = pytest.mark.parametrize("stops", [{}, {"stop": ["zzz"]}], ids=["plain", "with stop strings"])
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
async def http(monkeypatch):
    push = Detokenizer.push

    def poisoned(self, token_ids):
        token_ids = list(token_ids)
        if POISON in token_ids:
            raise ValueError("a secret of the tokenizer")
        return push(self, token_ids)

    monkeypatch.setattr(Detokenizer, "push", poisoned)
    engine = FakeEngineClient(hello())
    async with TestClient(TestServer(build_app(server_over(engine)))) as client:
        client.engine = engine
        yield client


def asked(path, runs, **fields):
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "max_tokens": 50, "sim": {"runs": runs}, **fields}


async def stream(http, path, runs, **fields):
    """(status, what came): the events of a stream, or the error object of a refusal."""
    response = await http.post(path, json=asked(path, runs, stream=True, **fields))
    text = await response.text()
    if response.status != 200:
        return response.status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.count("[DONE]") == 1
    assert lines.pop() == "[DONE]"
    return response.status, [json.loads(line) for line in lines]


async def finished(http, reason):
    page = await (await http.get("/metrics")).text()
    lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total")]
    [line] = [line for line in lines if f'finished_reason="{reason}"' in line]
    return float(line.split(" ")[-1])


def text_of(events):
    """What the first child said."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    said = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    return "".join(piece or "" for piece in said)


@PATHS
@STOPS
async def test_http_4_a_stream_whose_text_cannot_be_made_ends_with_one_error_event(http, path, stops, caplog):
    caplog.set_level(logging.CRITICAL)
    good = [[582, 827], [1296]] * 5
    status_and_events, *others = await asyncio.gather(
        stream(http, path, [[582], [827], [POISON], [1296]], **stops),
        *(stream(http, path, good, **more) for more in ({}, {"stop": ["zzz"]}, {"n": 2})),
    )
    status, events = status_and_events
    assert status == 200
    assert text_of(events[:-1]) == " one two"
    error = events[-1]["error"]
    assert error["type"] == "server_error"
    assert "secret" not in json.dumps(events)
    assert all(choice.get("finish_reason") is None for event in events[:-1] for choice in event["choices"])
    assert [reason for _, reason, _ in http.engine.submitted[0].closes] == [CloseReason.CLIENT_GONE]
    for other_status, other in others:
        assert other_status == 200
        assert text_of(other) == " one two three" * 5
        assert not any("error" in event for event in other)
    assert await finished(http, "error") == 1
    assert await finished(http, "abort") == 0
    assert await finished(http, "stop") == 4


@PATHS
@STOPS
@pytest.mark.parametrize("streamed", [False, True])
async def test_http_4_before_the_first_byte_it_is_a_500(http, path, stops, streamed, caplog):
    caplog.set_level(logging.CRITICAL)
    body = asked(path, [[POISON], [582]], stream=streamed, **stops)
    response = await http.post(path, json=body)
    answer = await response.json()
    assert response.status == 500
    assert answer["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(answer)
    assert [reason for _, reason, _ in http.engine.submitted[0].closes] == [CloseReason.CLIENT_GONE]
    assert await finished(http, "error") == 1
    assert await finished(http, "abort") == 0


@PATHS
async def test_http_4_a_plain_answer_that_fails_after_good_tokens_is_a_500_and_the_engine_is_told(http, path, caplog):
    caplog.set_level(logging.CRITICAL)
    response = await http.post(path, json=asked(path, [[582]] * 3 + [[POISON]] + [[582]] * 3))
    assert response.status == 500
    assert http.engine.submitted[0].closes != []
    assert await finished(http, "error") == 1
    good = await http.post(path, json=asked(path, [[582], [827]]))
    assert good.status == 200


async def test_a_failure_while_a_stream_is_put_together_is_counted_as_ours(http, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr("frontend.choices.Choice.take", lambda choice: 1 / 0)
    response = await http.post(COMPLETIONS, json=asked(COMPLETIONS, [[582]] * 3, stream=True))
    assert response.status == 500
    assert await finished(http, "error") == 1
    assert await finished(http, "abort") == 0


async def test_a_failure_while_a_plain_answer_is_put_together_ends_the_request_in_error(http, monkeypatch, caplog):
    """Its children had ended by themselves, and stay counted so; the request as a whole did not succeed."""
    caplog.set_level(logging.CRITICAL)
    ends = []
    ended = FrontendMetrics.request_ended
    monkeypatch.setattr(
        FrontendMetrics,
        "request_ended",
        lambda *args, **named: (ends.append(named["error_type"]), ended(*args, **named)),
    )
    monkeypatch.setattr("frontend.choices.Choice.take", lambda choice: 1 / 0)
    response = await http.post(COMPLETIONS, json=asked(COMPLETIONS, [[582]] * 3))
    assert response.status == 500
    assert ends == ["error"]
    assert await finished(http, "length") + await finished(http, "stop") == 1
    assert await finished(http, "abort") == 0
