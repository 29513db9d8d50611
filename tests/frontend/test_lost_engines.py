"""An engine is lost under a request: what nobody has seen begins anew at another engine, once; what was seen ends with an error.

Two engines played by hand behind the real handlers; `test_death_retry.py` has the same with real ones.
"""

import asyncio
import functools
import json
from dataclasses import replace

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from frontend import completions
from frontend.app import build_app
from frontend.deadlines import HEADER, deadline_of
from frontend.retry import RetriedStream
from protocol.messages import Finish, PromptReport, Round
from protocol.reasons import CloseReason, FinishReason, RejectReason
from tests.frontend.fakes_client import FakeEngineClient, server_over

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
ONE, TWO, THREE, END, FIVE = 582, 827, 1296, 36588, 2531  # " one", " two", " three", " END", " five"
BIRD = (10813, 116, 246)  # one character
STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)
ENDED = Finish(FinishReason.ABORT, message="the engine is shutting down")
GONE = CloseReason.CLIENT_GONE


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


class TwoEngines(FakeEngineClient):
    """Engine a takes every request, engine b what a loses. Nothing answers by itself."""

    def __init__(self):
        super().__init__()
        self.autoplay = False
        self.has_other = True
        self.remaining_ns = []
        self._asked = 0

    def submit(self, *arguments, **options):
        stream = self._at("a", *arguments, **options)
        return RetriedStream(stream, functools.partial(self._again, arguments, options))

    def _at(self, engine_id, *arguments, **options):
        self.remaining_ns.append(options["remaining_ns"])
        stream = super().submit(*arguments, **options)
        stream.engine_id = engine_id
        return stream

    def _again(self, arguments, options, lost_engine_id):
        assert lost_engine_id == "a"
        return self._at("b", *arguments, **options) if self.has_other else None

    async def given(self):
        """The next request that an engine got."""
        self._asked += 1
        await until(lambda: len(self.submitted) >= self._asked)
        return self.submitted[self._asked - 1]

    def _on_close(self, request_id, index, reason, kept):
        self.submitted[request_id - 1].closes.append((index, reason, kept))


class Api:
    def __init__(self, http, engine, server):
        self.http, self.engine, self.server = http, engine, server

    def asking(self, path=COMPLETIONS, timeout=None, **body):
        """(status, answer or events) once it is there. The events end with [DONE], which is not among them."""
        prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        headers = {} if timeout is None else {HEADER: timeout}

        async def post():
            response = await self.http.post(path, json={**prompt, **body}, headers=headers)
            text = await response.text()
            if not response.headers["Content-Type"].startswith("text/event-stream"):
                return response.status, json.loads(text)
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            return response.status, [json.loads(event) for event in events]

        return asyncio.create_task(post())

    async def samples(self, name):
        """Values of a family by the engine's label, and by the reason where there is one; those at 0 left out."""
        page = await (await self.http.get("/metrics/frontend")).text()
        found = {}
        for line in page.splitlines():
            if line.startswith(name + "{"):
                labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
                key = tuple(labels[label].strip('"') for label in ("engine", "finished_reason") if label in labels)
                found[key if len(key) > 1 else key[0]] = float(line.rsplit(" ", 1)[1])
        return {key: value for key, value in found.items() if value}

    async def settled(self):
        """Once the handler is through: nothing is reserved any more."""
        await until(lambda: not self.server.admission.sequences)


@pytest.fixture
async def api():
    engine = TwoEngines()
    server = server_over(engine)
    server.metrics.several_engines()
    for engine_id in ("b", "a"):
        server.metrics.attach(engine_id, server.model_name)
    engine.hello = msgspec.structs.replace(engine.hello, engine_id="a")
    async with TestClient(TestServer(build_app(server))) as http:
        yield Api(http, engine, server)


def text_of(path, choice):
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def verified(drafted, accepted):
    return Round(drafted, drafted, accepted, 1, 0, 0, False)


def reported(given, num_cached):
    return PromptReport(len(given.prompt_token_ids), num_cached, 0, 1_000_000, None)


# ---- plain answers: nobody has seen anything until all of it is written ----


@PATHS
async def test_a_plain_answer_is_that_of_the_engine_that_finished_it_and_nothing_of_the_lost_one_is_in_it(api, path):
    asking = api.asking(path, logprobs=True if path == CHAT else 1, spec_decode_metrics="detailed")
    lost = await api.engine.given()
    lost.output(0, [ONE], prompt=reported(lost, 1))
    lost.output(0, [TWO, TWO], round=verified(3, 1))
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    assert (kept.prompt_token_ids, kept.sampling, kept.n) == (lost.prompt_token_ids, lost.sampling, lost.n)
    assert api.server.admission.sequences == 1, "the second attempt has the place of the first"
    kept.output(0, [THREE], prompt=reported(kept, 0))
    kept.output(0, [FIVE, END], round=verified(5, 1), finish=LENGTH)
    status, answer = await asking
    [choice] = answer["choices"]
    assert (status, text_of(path, choice), choice["finish_reason"]) == (200, " three five END", "length")
    entries = choice["logprobs"]["tokens"] if path == COMPLETIONS else choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    statistics = answer["metrics"]["speculative_decoding"]
    assert (statistics["per_step_drafted"], statistics["per_step_accepted"]) == ([5], [1])
    await api.settled()
    assert api.server.admission.prompt_tokens == 0


async def test_what_is_measured_is_once_per_child_of_the_answer_and_once_per_engine_of_what_it_gave(api):
    asking = api.asking()
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    lost.output(0, [TWO, TWO])
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    kept.output(0, [THREE])
    await asyncio.sleep(0.01)
    kept.output(0, [FIVE], finish=LENGTH)
    await asking
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("b", "length"): 1}
    assert await api.samples("vllm:request_generation_tokens_sum") == {"b": 2}
    for once in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert await api.samples(f"vllm:{once}_count") == {"b": 1}, once
    assert await api.samples("vllm:time_to_first_token_seconds_count") == {"a": 1, "b": 1}
    assert await api.samples("drafthouse:inter_token_latency_per_token_seconds_count") == {"a": 2, "b": 1}
    assert await api.samples("drafthouse:requests_retried_total") == {"a": 1}
    assert await api.samples("drafthouse:retried_tokens_total") == {"a": 3}, "first tokens and gaps of the lost engine"


async def test_latencies_count_from_the_requests_arrival_and_stages_from_the_second_submit(api):
    asking = api.asking()
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.2)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    kept.output(0, [THREE], prompt=reported(kept, 0), finish=LENGTH)
    await asking
    await api.settled()
    assert (await api.samples("vllm:e2e_request_latency_seconds_sum"))["b"] >= 0.2
    assert (await api.samples("vllm:time_to_first_token_seconds_sum"))["b"] >= 0.2
    assert (await api.samples("vllm:request_prefill_time_seconds_sum")).get("b", 0.0) < 0.15


@pytest.mark.parametrize("stream", [False, True])
async def test_children_that_had_ended_keep_their_answers_and_the_others_begin_anew(api, stream):
    asking = api.asking(n=2, stream=stream)
    lost = await api.engine.given()
    lost.output(0, [ONE, TWO], finish=STOP)
    await asyncio.sleep(0.01)
    lost.output(1, [BIRD[0]])  # no character yet, so a stream has shown nothing of it either
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    assert kept.n == 2 and kept.closes == [(0, GONE, 0)]
    kept.output(0, [THREE])  # before the close is heard
    kept.output(0, finish=Finish(FinishReason.ABORT))
    kept.output(1, [FIVE], finish=LENGTH)
    status, answer = await asking
    assert status == 200
    if stream:
        texts = ["".join(c["text"] for e in answer for c in e["choices"] if c["index"] == i) for i in (0, 1)]
    else:
        texts = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == 3
    assert texts == [" one two", " five"]
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("b", "length"): 1, ("a", "stop"): 1}
    assert await api.samples("drafthouse:retried_tokens_total") == {"a": 1}


async def test_of_several_prompts_only_those_at_the_lost_engine_begin_anew(api):
    asking = api.asking(prompt=["x", "y", "z"])
    first, second, third = [await api.engine.given() for _ in range(3)]
    first.output(0, [ONE], finish=STOP)
    second.output(0, [TWO])
    third.output(0, [THREE])
    await asyncio.sleep(0.01)
    second.stream.fail("it was killed")
    again = await api.engine.given()
    assert again.prompt_token_ids == second.prompt_token_ids
    third.output(0, [THREE], finish=LENGTH)
    again.output(0, [FIVE, FIVE], finish=LENGTH)
    _, answer = await asking
    assert [choice["text"] for choice in answer["choices"]] == [" one", " five five", " three three"]
    assert answer["usage"]["completion_tokens"] == 5 and len(api.engine.submitted) == 4


async def test_all_prompts_of_an_engine_begin_anew_when_it_is_lost(api):
    asking = api.asking(prompt=["x", "y"])
    before = [await api.engine.given() for _ in range(2)]
    for given in before:
        given.output(0, [ONE])
    await asyncio.sleep(0.01)
    for given in before:
        given.stream.fail("it was killed")
    for given in [await api.engine.given() for _ in range(2)]:
        given.output(0, [FIVE], finish=LENGTH)
    _, answer = await asking
    assert [choice["text"] for choice in answer["choices"]] == [" five", " five"]
    assert await api.samples("drafthouse:requests_retried_total") == {"a": 2}


async def test_a_stop_string_is_looked_for_in_the_text_of_one_attempt(api):
    asking = api.asking(stop=["two END"])
    lost = await api.engine.given()
    lost.output(0, [ONE, TWO])  # the beginning of the stop, held back
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    kept.output(0, [END])  # would complete it
    kept.output(0, [ONE, TWO, END, FIVE])
    await until(lambda: kept.closes)
    assert kept.closes == [(0, CloseReason.STOP_STRING, 4)]
    kept.output(0, finish=STOP)
    _, answer = await asking
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == (" END one ", "two END")
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_final_text_whose_engine_dies_before_confirming_it_is_delivered(api, stream):
    asking = api.asking(stop=[" END"], stream=stream, spec_decode_metrics="summary", stream_options=usage_of(stream))
    lost = await api.engine.given()
    lost.output(0, [ONE], round=verified(3, 0))
    lost.output(0, [TWO, END])
    await until(lambda: lost.closes)
    lost.stream.fail("it was killed")
    status, answer = await asking
    text = "".join(c["text"] for e in answer for c in e["choices"]) if stream else answer["choices"][0]["text"]
    assert (status, text) == (200, " one two")
    told = answer[-1] if stream else answer
    assert told["metrics"] == {"speculative_decoding": None}, "rounds may be missing"
    assert told["usage"]["completion_tokens"] == 3
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("a", "stop"): 1}
    assert len(api.engine.submitted) == 1


def usage_of(stream):
    return {"include_usage": True} if stream else None


async def test_an_engine_that_ends_before_its_requests_do_gives_them_to_another(api):
    """It drained and its time is up: as good as lost."""
    asking = api.asking()
    ending = await api.engine.given()
    ending.output(0, [ONE])
    await asyncio.sleep(0.01)
    ending.output(0, finish=ENDED)
    kept = await api.engine.given()
    kept.output(0, [FIVE], finish=LENGTH)
    status, answer = await asking
    assert (status, answer["choices"][0]["text"]) == (200, " five")
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("b", "length"): 1}


@pytest.mark.parametrize(("reason", "goes_on"), [(RejectReason.DRAINING, True), (RejectReason.QUEUE_FULL, False)])
async def test_an_engine_that_drains_is_no_answer_and_one_that_is_full_is(api, reason, goes_on):
    asking = api.asking()
    refusing = await api.engine.given()
    refusing.output(0, finish=Finish(FinishReason.ERROR, message="no", rejected=reason))
    if goes_on:
        kept = await api.engine.given()
        kept.output(0, [FIVE], finish=LENGTH)
    status, _ = await asking
    assert status == (200 if goes_on else 503)
    assert len(api.engine.submitted) == 1 + goes_on


async def test_an_engine_that_cannot_go_on_with_a_request_is_not_lost(api):
    asking = api.asking()
    guilty = await api.engine.given()
    guilty.output(0, [ONE], finish=Finish(FinishReason.ERROR, message="non-finite logits"))
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (500, "non-finite logits")
    assert len(api.engine.submitted) == 1


# ---- once, in time, and for somebody ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_lost_two_engines_is_told(api, path, stream):
    asking = api.asking(path, stream=stream)
    (await api.engine.given()).stream.fail("it was killed")
    second = await api.engine.given()
    second.output(0, [BIRD[0]])
    await asyncio.sleep(0.01)
    second.stream.fail("the other was killed")
    status, answer = await asking
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
    assert "the other was killed" in answer["error"]["message"]
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("b", "error"): 1}
    assert await api.samples("drafthouse:retried_tokens_total") == {}


async def test_without_another_engine_the_loss_is_told(api):
    api.engine.has_other = False
    asking = api.asking()
    lost = await api.engine.given()
    lost.output(0, [ONE])
    lost.stream.fail("it was killed")
    status, answer = await asking
    assert (status, "it was killed" in answer["error"]["message"]) == (503, True)
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("a", "error"): 1}
    assert await api.samples("drafthouse:requests_retried_total") == {}


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    hand = Clock()

    def by_hand(headers, default_s, began_s):
        deadline = deadline_of(headers, default_s, began_s)
        return None if deadline is None else replace(deadline, began_s=0.0, clock=hand)

    monkeypatch.setattr(completions, "deadline_of", by_hand)
    return hand


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_counts_from_the_arrival_and_beyond_it_nothing_begins_anew(api, clock, stream):
    asking = api.asking(timeout="10", stream=stream)
    lost = await api.engine.given()
    lost.output(0, [BIRD[0]])
    await asyncio.sleep(0.01)
    clock.now_s = 10.0
    lost.stream.fail("it was killed")
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("a", "abort"): 1}
    assert len(api.engine.submitted) == 1


async def test_a_client_that_left_is_not_answered_twice(api):
    asking = api.asking()
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    asking.cancel()
    await until(lambda: lost.closes)
    lost.stream.fail("it was killed")
    await api.settled()
    assert len(api.engine.submitted) == 1
    assert await api.samples("vllm:request_success_total") == {("a", "abort"): 1}


async def test_a_client_that_leaves_the_second_attempt_is_recorded_once_at_its_engine(api):
    asking = api.asking()
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    asking.cancel()
    await until(lambda: kept.closes)
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("b", "abort"): 1}


# ---- streams: what was written cannot be taken back ----


@PATHS
@pytest.mark.parametrize("held", [(), BIRD[:2], (TWO,)], ids=["nothing", "half a character", "perhaps a stop"])
async def test_a_stream_that_has_written_no_text_begins_anew(api, path, held):
    asking = api.asking(path, stream=True, stop=[" two END"], stream_options={"include_usage": True})
    lost = await api.engine.given()
    lost.output(0, held, prompt=reported(lost, 1))
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    kept = await api.engine.given()
    kept.output(0, [THREE], prompt=reported(kept, 0))
    kept.output(0, [FIVE], finish=LENGTH)
    await until(lambda: kept.closes)
    kept.output(0, finish=LENGTH)
    status, events = await asking
    choices = [choice for event in events for choice in event["choices"]]
    if path == CHAT:
        assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        text = "".join(choice["text"] for choice in choices)
    assert (status, text, choices[-1]["finish_reason"]) == (200, " three five", "length")
    usage = events[-1]["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (2, 0)


@PATHS
async def test_a_stream_that_has_written_text_ends_with_an_error_event(api, path):
    asking = api.asking(path, stream=True)
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    status, events = await asking
    assert status == 200 and "it was killed" in events[-1]["error"]["message"]
    assert len(api.engine.submitted) == 1
    await api.settled()
    assert await api.samples("vllm:request_success_total") == {("a", "error"): 1}


async def test_a_stream_of_which_one_child_was_begun_ends_with_an_error_and_nothing_runs_on(api):
    asking = api.asking(stream=True, n=2)
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    lost.stream.fail("it was killed")
    _, events = await asking
    assert "error" in events[-1] and len(api.engine.submitted) == 1


async def test_what_arrived_with_the_loss_is_written_before_the_error(api):
    asking = api.asking(stream=True)
    lost = await api.engine.given()
    lost.output(0, [ONE])
    await asyncio.sleep(0.01)
    lost.output(0, [TWO])
    lost.stream.fail("it was killed")
    _, events = await asking
    assert [choice["text"] for event in events[:-1] for choice in event["choices"]] == [" one", " two"]
    assert "error" in events[-1]
