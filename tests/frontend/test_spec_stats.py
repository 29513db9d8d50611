"""Statistics of a request's rounds: the sums, when they are reported, and where in an answer they stand."""

import asyncio
import functools
import json

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from frontend.app import Listener, build_app
from frontend.choices import Choice, TextSettings
from frontend.errors import ApiError
from frontend.openai import ChatRequest, CompletionRequest, decode_request
from frontend.prompts import draft_of, job_of
from frontend.spec_stats import SpecStats, wanted_statistics
from protocol.messages import Finish, Round, SequenceOutput
from protocol.reasons import FinishReason
from tests.frontend.fakes_client import FakeEngineClient, embedded_text, hello, server_over

ONE, TWO, THREE, END, EOS = 582, 827, 1296, 36588, 2
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
KINDS = pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
WIDTH = 5
FIELDS = (
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
)
USAGE = {"stream_options": {"include_usage": True}}


def verified(drafted: int, accepted: int, aborted: bool = False) -> Round:
    return Round(drafted, drafted, accepted, 1, accepted + 1 if aborted else 0, 0, aborted)


DRAFTS = st.integers(0, WIDTH).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


# ---- the sums ----


@given(st.lists(DRAFTS, max_size=60))
def test_the_numbers_of_a_report_agree_with_the_rounds_and_with_each_other(drafts):
    stats = SpecStats(WIDTH, detailed=True)
    for drafted, accepted in drafts:
        stats.add(verified(drafted, accepted))
    report = stats.report()
    steps = [(drafted, accepted) for drafted, accepted in drafts if drafted]
    histogram = report["acceptance_histogram"]
    assert len(histogram) == report["num_spec_tokens"] + 1 == WIDTH + 1
    assert sum(histogram) == report["num_spec_steps"] == len(steps)
    assert report["num_draft_tokens"] == sum(drafted for drafted, _ in steps) == sum(report["per_step_drafted"])
    accepted = report["num_accepted_draft_tokens"]
    assert accepted == sum(accepted for _, accepted in steps) == sum(report["per_step_accepted"])
    assert accepted == sum(j * count for j, count in enumerate(histogram))
    # What the ledger counts per position: a round that accepted j raises the first j.
    assert [sum(histogram[i + 1 :]) for i in range(WIDTH)] == [sum(a > i for _, a in steps) for i in range(WIDTH)]
    assert list(zip(report["per_step_drafted"], report["per_step_accepted"])) == steps
    assert report["mean_acceptance_length"] * max(len(steps), 1) == pytest.approx(max(len(steps), 1) + accepted)
    assert report["draft_acceptance_rate"] * report["num_draft_tokens"] == pytest.approx(accepted)


def test_a_summary_has_vllms_fields_and_no_list_per_step():
    stats = SpecStats(3, detailed=False)
    for drafted, accepted in [(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3:  # the example of vLLM's document
        stats.add(verified(drafted, accepted))
    report = stats.report()
    assert tuple(report) == FIELDS
    assert report == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_a_request_that_verified_no_draft_reports_numbers_as_vllm_does():
    stats = SpecStats(2, detailed=True)
    stats.add(verified(0, 0))
    assert list(stats.report().values()) == [1.0, 0.0, [0, 0, 0], 0, 0, 0, 2, [], []]


# ---- which rounds are counted ----


def output(tokens=(), round_=None, finish=None):
    return SequenceOutput(1, 0, 0, tuple(tokens), None, None, round_, (), finish)


def choice_with(level, stops=(), max_draft_len=WIDTH):
    wanted = wanted_statistics(level, 1, max_draft_len)
    return Choice(0, embedded_text().tokenizer, TextSettings(tuple(stops), False, True, 0, False, wanted))


def test_rounds_behind_a_stop_string_and_on_the_closing_output_are_counted():
    choice = choice_with("detailed", stops=[" END"])
    assert choice.push(output([ONE])) is None
    assert choice.push(output([TWO, END, THREE], verified(4, 2))) is not None
    assert choice.is_closing
    choice.push(output([ONE, ONE], verified(3, 1)))
    choice.push(output((), verified(2, 2, aborted=True), Finish(FinishReason.STOP)))
    assert choice.is_closed
    report = choice.statistics.report()
    assert (report["per_step_drafted"], report["per_step_accepted"]) == ([4, 3, 2], [2, 1, 2])


def test_a_natural_end_that_crosses_our_close_is_counted_once():
    choice = choice_with("detailed", stops=[" END"])
    choice.push(output([END], verified(1, 0)))
    choice.push(output([EOS], verified(5, 0), Finish(FinishReason.STOP)))
    choice.push(output((), None, Finish(FinishReason.STOP)))
    assert choice.is_closed
    assert choice.statistics.report()["per_step_drafted"] == [1, 5]


def test_the_round_that_ends_a_child_is_counted_with_what_was_cut():
    choice = choice_with("summary")
    choice.push(output([ONE, TWO], Round(5, 5, 5, 1, 4, 0, False), Finish(FinishReason.LENGTH)))
    assert choice.statistics.report()["num_accepted_draft_tokens"] == 5


def test_statistics_that_may_lack_rounds_are_not_reported():
    choice = choice_with("summary", stops=[" END"])
    choice.push(output([END], verified(1, 0)))
    choice.give_up_waiting()
    assert choice.is_closed
    assert choice.statistics is None


def test_waiting_is_not_given_up_for_a_child_that_is_closed():
    choice = choice_with("summary")
    choice.push(output([ONE], verified(1, 0), Finish(FinishReason.LENGTH)))
    choice.give_up_waiting()
    assert choice.statistics is not None


@pytest.mark.parametrize(("level", "max_draft_len"), [("none", WIDTH), ("detailed", 0)])
def test_nothing_is_kept_when_nothing_is_reported(level, max_draft_len):
    assert choice_with(level, max_draft_len=max_draft_len).statistics is None


# ---- who gets them ----


def asked(kind, **fields):
    text = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    return json.dumps({**text, **fields}).encode()


@KINDS
@pytest.mark.parametrize("level", ["", "Summary", "full", "x" * 500, 1, True, ["summary"], {"a": 1}])
def test_a_level_that_does_not_exist_is_refused_by_name(kind, level):
    with pytest.raises(ApiError) as caught:
        decode_request(asked(kind, spec_decode_metrics=level), kind)
    assert (caught.value.status, caught.value.param) == (400, "spec_decode_metrics")
    assert len(caught.value.message) < 300


@KINDS
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("level", ["summary", "detailed"])
def test_a_stream_that_asks_for_them_must_ask_for_usage(kind, options, level):
    body = asked(kind, stream=True, stream_options=options, spec_decode_metrics=level)
    with pytest.raises(ApiError, match=r"set stream_options\.include_usage to true") as caught:
        decode_request(body, kind)
    assert caught.value.param == "spec_decode_metrics"


@KINDS
@pytest.mark.parametrize(
    "fields",
    [
        {"spec_decode_metrics": None, "stream": True},
        {"spec_decode_metrics": "none", "stream": True},
        {"spec_decode_metrics": "summary", "stream": False},
        {"spec_decode_metrics": "detailed", "stream": True, **USAGE},
    ],
)
def test_what_can_be_answered_is_accepted_and_is_no_unknown_field(kind, fields):
    request, num_unknown = decode_request(asked(kind, **fields), kind)
    assert num_unknown == 0
    assert request.spec_decode_metrics == fields["spec_decode_metrics"]


@pytest.mark.parametrize("own", [None, "none", "summary", "detailed"])
@pytest.mark.parametrize("server", ["none", "summary", "detailed"])
def test_a_requests_own_level_wins_over_the_servers(server, own):
    request, _ = decode_request(asked(CompletionRequest, spec_decode_metrics=own), CompletionRequest)
    wanted = job_of(draft_of(request, 8), embedded_text(), hello(), server).settings.statistics
    level = own or server
    assert wanted == (None if level == "none" else wanted_statistics(level, 1, hello().max_draft_len))
    if wanted is not None:
        assert wanted.collects
        assert wanted.detailed == (level == "detailed")


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["x", "y"]}, {"prompt": [[ONE], [TWO]]}])
def test_several_sequences_have_none(fields):
    request, _ = decode_request(asked(CompletionRequest, **fields), CompletionRequest)
    assert not job_of(draft_of(request, 8), embedded_text(), hello(), "summary").settings.statistics.collects


# ---- where they stand ----


class RoundEngine(FakeEngineClient):
    """Says one token and its round per step, and one more round behind a Close."""

    rounds = (verified(5, 3), verified(2, 0), verified(0, 0))
    late = verified(4, 1)

    async def _run(self, given):
        self.report(given)
        for index in range(given.n):
            given.output(index, [ONE])
            for number, one in enumerate(self.rounds):
                await asyncio.sleep(0)
                is_last = number == len(self.rounds) - 1
                if index not in given.closed:
                    given.output(index, [TWO], round=one, finish=Finish(FinishReason.LENGTH) if is_last else None)

    def _on_close(self, request_id, index, reason, kept):
        given = self.submitted[request_id - 1]
        given.closed.add(index)
        answer = functools.partial(given.output, index, round=self.late, finish=Finish(FinishReason.STOP))
        asyncio.get_running_loop().call_soon(answer)


SUMMARY = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": pytest.approx(3 / 7),
    "acceptance_histogram": [1, 0, 0, 1, 0, 0],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 7,
    "num_spec_tokens": 5,
}
DETAILED = {**SUMMARY, "per_step_accepted": [3, 0], "per_step_drafted": [5, 2]}


@pytest.fixture
async def http():
    async with TestClient(TestServer(build_app(server_over(RoundEngine())))) as client:
        yield client


async def chunks_of(http, path, **body):
    response = await http.post(path, json={**body_of(path), "stream": True, **USAGE, **body})
    assert response.status == 200, await response.text()
    data = [line[6:] for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


async def whole(http, path, **body):
    response = await http.post(path, json=body_of(path) | body)
    assert response.status == 200, await response.text()
    return json.loads(await response.read(), parse_constant=pytest.fail)


def body_of(path):
    return {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}


@PATHS
@pytest.mark.parametrize(("level", "expected"), [("summary", SUMMARY), ("detailed", DETAILED)])
async def test_the_body_has_them_at_the_top_and_a_stream_on_its_usage_chunk_only(http, path, level, expected):
    answer = await whole(http, path, spec_decode_metrics=level)
    assert answer["metrics"] == {"speculative_decoding": expected}
    chunks = await chunks_of(http, path, spec_decode_metrics=level)
    assert (chunks[-1]["choices"], chunks[-1]["metrics"]) == ([], answer["metrics"])
    assert chunks[-1]["usage"] == answer["usage"]
    assert len(chunks) > 2
    assert not any("metrics" in chunk for chunk in chunks[:-1])


@PATHS
async def test_usage_on_every_chunk_does_not_repeat_them(http, path):
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = await chunks_of(http, path, spec_decode_metrics="summary", **options)
    assert all(chunk["usage"] for chunk in chunks)
    assert [chunk for chunk in chunks if "metrics" in chunk] == [chunks[-1]]


@PATHS
@pytest.mark.parametrize("fields", [{}, {"spec_decode_metrics": "none"}, {"spec_decode_metrics": None}])
async def test_answers_do_not_mention_what_was_not_asked_for(http, path, fields):
    assert "metrics" not in await whole(http, path, **fields)
    assert not any("metrics" in chunk for chunk in await chunks_of(http, path, **fields))


@PATHS
async def test_they_are_null_for_several_children(http, path):
    fields = {"n": 2, "spec_decode_metrics": "detailed"}
    assert (await whole(http, path, **fields))["metrics"] == {"speculative_decoding": None}
    assert (await chunks_of(http, path, **fields))[-1]["metrics"] == {"speculative_decoding": None}


async def test_they_are_null_for_several_prompts(http):
    answer = await whole(http, COMPLETIONS, prompt=["x", "y"], spec_decode_metrics="summary")
    assert answer["metrics"] == {"speculative_decoding": None}


@PATHS
async def test_they_are_null_without_speculation(path):
    engine = FakeEngineClient(hello(max_draft_len=0))
    async with TestClient(TestServer(build_app(server_over(engine)))) as http:
        answer = await whole(http, path, spec_decode_metrics="summary")
        assert answer["metrics"] == {"speculative_decoding": None}


@PATHS
async def test_the_round_that_ran_behind_a_stop_string_is_in_both_forms(http, path):
    fields = {"stop": [" two"], "spec_decode_metrics": "detailed"}
    answer = await whole(http, path, **fields)
    assert answer["choices"][0]["finish_reason"] == "stop"
    report = answer["metrics"]["speculative_decoding"]
    assert (report["per_step_drafted"], report["per_step_accepted"]) == ([5, 4], [3, 1])
    assert (await chunks_of(http, path, **fields))[-1]["metrics"] == answer["metrics"]


@PATHS
async def test_the_servers_setting_needs_nothing_of_the_request(path):
    server = server_over(RoundEngine(), per_request_spec_decode_metrics="detailed")
    async with TestClient(TestServer(build_app(server))) as http:
        assert (await whole(http, path))["metrics"] == {"speculative_decoding": DETAILED}
        assert (await chunks_of(http, path))[-1]["metrics"] == {"speculative_decoding": DETAILED}
        plain = await chunks_of(http, path, stream_options=None)
        assert not any("metrics" in chunk for chunk in plain)
        assert "metrics" not in await whole(http, path, spec_decode_metrics="none")


# ---- the official client ----


async def test_the_official_client_reads_them_from_its_extra_fields():
    server = server_over(RoundEngine(), port=0)
    listener = Listener(build_app(server), server.config)
    await listener.start()
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{listener.port}/v1", api_key="none", max_retries=0, timeout=10
        ) as client:
            extra = {"extra_body": {"spec_decode_metrics": "detailed"}}
            chat = {"model": "embedded", "messages": [{"role": "user", "content": "x"}], **extra}
            answer = await client.chat.completions.create(**chat)
            assert answer.model_extra["metrics"] == {"speculative_decoding": DETAILED}
            stream = await client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
            last = [chunk async for chunk in stream][-1]
            assert last.model_extra["metrics"] == {"speculative_decoding": DETAILED}
            answer = await client.completions.create(model="embedded", prompt="x", **extra)
            assert answer.model_extra["metrics"] == {"speculative_decoding": DETAILED}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**chat, stream=True)
            assert refused.value.param == "spec_decode_metrics"
    finally:
        await listener.stop()
