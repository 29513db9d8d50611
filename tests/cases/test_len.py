"""LEN: budgets and edges. What was asked for is what arrives, and what cannot fit is refused before any byte."""

from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, LIST, Client, speculation_delta, together, total

WIDTH = 5


def list_ids(client: Client, length: int) -> list[int]:
    """LIST's token ids, repeated and cut to `length`."""
    ids: list[int] = client.post("/tokenize", {"prompt": LIST, "add_special_tokens": False}).json()["tokens"]
    return (ids * (length // len(ids) + 1))[:length]


# ---- A-LEN-1, ikawrakow/ik_llama.cpp#2358 ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_len_1_exactly_max_tokens_arrive_and_are_counted(spec: Client, path: str) -> None:
    asked = {"ignore_eos": True, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    counts = range(1, 21) if IS_LONG else (1, 2, 3, 5, 6, 7, 12, 20)
    calls = [(count, form) for count in counts for form in (False, True)]
    before = spec.metrics()
    answers = together(lambda c=count, f=form: spec.ask(path, f, LIST, max_tokens=c, **asked) for count, form in calls)
    moved = speculation_delta(before, spec.metrics(), WIDTH)
    for (count, _), answer in zip(calls, answers):
        assert answer.usage is not None
        assert len(answer.token_ids[0]) == len(answer.entries[0]) == answer.usage["completion_tokens"] == count
        assert answer.finish[0] == "length"
    assert moved.generation == sum(count for count, _ in calls)
    assert moved.drafts > 0 and (path == CHAT or moved.accepted > 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("streamed", [False, True])
def test_len_1_a_run_that_overshoots_is_cut_at_max_tokens(sim: Client, max_tokens: int, streamed: bool) -> None:
    before = sim.metrics()
    asked = {"max_tokens": max_tokens, "logprobs": 1, "return_token_ids": True}
    answer = sim.ask(COMPLETIONS, streamed, sim={"runs": [[582] * 4, [827] * 6]}, **asked)
    after = sim.metrics()
    assert answer.token_ids[0] == ([582] * 4 + [827] * 6)[:max_tokens]
    assert len(answer.entries[0]) == max_tokens
    assert answer.usage is not None and answer.usage["completion_tokens"] == max_tokens
    assert answer.finish[0] == "length"
    name = "vllm:generation_tokens_total"
    assert total(after, name) - total(before, name) == max_tokens


# ---- A-LEN-2, turboderp-org/exllamav2#274 ----

CONTEXT = 128


def test_len_2_drafts_never_run_past_the_context(setup, ref: Client) -> None:
    short = setup("short")
    probe = short.probe()
    lengths = range(120, 128)
    asked: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    before = short.metrics()
    answers = together(lambda n=n: short.ask(COMPLETIONS, n % 2 == 0, list_ids(short, n), **asked) for n in lengths)
    moved = speculation_delta(before, short.metrics(), WIDTH)
    wanted = together(
        lambda n=n: ref.ask(COMPLETIONS, False, list_ids(ref, n), max_tokens=CONTEXT - n, **asked) for n in lengths
    )
    for length, answer, plain in zip(lengths, answers, wanted):
        assert answer.usage is not None
        assert answer.usage["prompt_tokens"] == length
        assert answer.usage["total_tokens"] == CONTEXT
        assert answer.finish[0] == "length"
        assert answer.token_ids == plain.token_ids
        assert answer.text == plain.text
    assert moved.accepted > 0
    assert 0 < moved.draft_tokens < WIDTH * moved.drafts, "drafts must get shorter near the edge"
    short.assert_live(probe)


def test_len_2_a_chat_runs_to_the_end_of_the_context(setup) -> None:
    short = setup("short")
    calls = [(words, words % 2 == 0) for words in (22, 23, 24, 25)]
    asked = {"ignore_eos": True, "temperature": 0}
    for answer in together(
        lambda w=words, f=form: short.ask(CHAT, f, "red blue green " * w, **asked) for words, form in calls
    ):
        assert answer.usage is not None and answer.usage["total_tokens"] == CONTEXT
        assert answer.finish[0] == "length"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_len_2_a_prompt_that_fills_the_context_is_refused_with_both_numbers(setup, length: int, streamed: bool) -> None:
    short = setup("short")
    probe = short.probe()
    response = short.post(COMPLETIONS, {"prompt": list_ids(short, length), "stream": streamed})
    error = short.assert_error(response, str(CONTEXT))
    assert str(length) in error["message"]
    assert error["code"] == "context_length_exceeded"
    short.assert_live(probe)


def test_len_2_exactly_what_fits_is_served(setup) -> None:
    short = setup("short")
    answer = short.ask(COMPLETIONS, False, list_ids(short, CONTEXT - 3), max_tokens=3, ignore_eos=True)
    assert answer.usage is not None and answer.usage["total_tokens"] == CONTEXT
    short.assert_error(short.post(COMPLETIONS, {"prompt": list_ids(short, CONTEXT - 3), "max_tokens": 4}), "max_tokens")


# ---- A-LEN-3, vllm-project/vllm#7746 ----

EMPTY: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": [""]},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [[], [582]]},
    {"prompt": [[582], []]},
    {"prompt": ["ok", ""]},
    {"prompt": ["", "ok"]},
    {"prompt": None},
    {},
]


@pytest.mark.parametrize("name", ["sim", "spec"])
@pytest.mark.parametrize("streamed", [False, True])
def test_len_3_an_empty_prompt_is_refused_and_nothing_of_it_runs(setup, name: str, streamed: bool) -> None:
    client = setup(name)
    probe = client.probe() if name == "spec" else ""
    counted = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    before = client.metrics()
    for body in EMPTY:
        response = client.post(COMPLETIONS, {**body, "max_tokens": 4, "stream": streamed})
        assert client.assert_error(response, "prompt")["param"].startswith("prompt"), body
    after = client.metrics()
    for family in counted:
        assert total(after, family) == total(before, family), family
    if name == "spec":
        client.assert_live(probe)


# ---- A-LEN-4, llm-d/llm-d-inference-sim#596 ----


@pytest.mark.parametrize("name", ["short", "sim"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_len_4_what_cannot_fit_is_refused_before_any_event(setup, name: str, path: str) -> None:
    client = setup(name)
    context = client.get("/v1/models").json()["data"][0]["max_model_len"]
    long_text = " one" * (context + 10)
    too_long: dict[str, Any] = {"messages": [{"role": "user", "content": long_text}]}
    fits_not: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": context}
    if path == COMPLETIONS:
        too_long, fits_not = {"prompt": long_text}, {"prompt": "hi there", "max_tokens": context}
    for body in (too_long, fits_not, {**too_long, "max_tokens": 1}):
        errors = []
        for streamed in (False, True):
            response = client.post(path, {**body, "stream": streamed})
            errors.append(client.assert_error(response, str(context)))
        assert errors[0] == errors[1]
        assert errors[0]["code"] == "context_length_exceeded"


def test_len_4_one_prompt_too_long_refuses_the_whole_list(sim: Client) -> None:
    context = sim.get("/v1/models").json()["data"][0]["max_model_len"]
    before = total(sim.metrics(), "vllm:prompt_tokens_total")
    body = {"prompt": [[582], [582] * (context + 10)], "max_tokens": 2}
    sim.assert_error(sim.post(COMPLETIONS, body), str(context))
    assert total(sim.metrics(), "vllm:prompt_tokens_total") == before
