"""LOGP: log-probs under speculation are the target's own, at accepted and at bonus positions alike.

They are natural logs of the untransformed distribution, so the values do not depend on sampling parameters.
"""

import math
from typing import Any

import pytest

from tests.cases.client import (
    CHAT,
    COMPLETIONS,
    IS_LONG,
    LIST,
    PAT,
    Client,
    Logprob,
    Streamed,
    assert_same,
    speculation_delta,
    together,
)

CLOSE = 0.01  # REF against SPEC in fp32: only the shapes of the matrix products differ
BLOCK = 16
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)
RIVERS = "Write about rivers."


def assert_well_formed(entries: list[Logprob], width: int) -> None:
    """Finite, at most 0, and no top list that weighs more than 1."""
    assert entries and not all(entry.logprob == 0.0 for entry in entries)
    for entry in entries:
        assert entry.logprob is not None and -1000 < entry.logprob <= 0.0
        values = [value for _, value in entry.top]
        assert 1 <= len(values) <= width + 1
        assert all(math.isfinite(value) and value <= 0.0 for value in values)
        assert sum(math.exp(value) for value in values) <= 1.001


def assert_close(ref: Streamed, spec: Streamed) -> int:
    """Compare position by position up to a near tie; return how many positions were compared."""
    same = 0
    for position, (wanted, got) in enumerate(zip(ref.entries[0], spec.entries[0])):
        if ref.token_ids[0][position] != spec.token_ids[0][position]:
            break
        assert wanted.logprob == pytest.approx(got.logprob, abs=CLOSE), position
        tops = dict(wanted.top), dict(got.top)
        for token in tops[0].keys() & tops[1].keys():
            assert tops[0][token] == pytest.approx(tops[1][token], abs=CLOSE), (position, token)
        assert len(tops[0].keys() & tops[1].keys()) >= min(len(tops[0]), len(tops[1])) - 1, position
        same += 1
    return same


# ---- A-LOGP-1, ggml-org/llama.cpp#27972 ----


def test_logp_1_values_under_speculation_are_those_without(ref: Client, spec: Client) -> None:
    asked: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 64 if IS_LONG else 32,
        "logprobs": 5,
        "return_token_ids": True,
    }
    prompts = (LIST, RIVERS, PAT) if IS_LONG else (LIST, RIVERS)
    calls = [(path, form, prompt) for path in (COMPLETIONS, CHAT) for form in (False, True) for prompt in prompts]
    wanted = together(lambda p=path, t=text: ref.ask(p, False, t, **asked) for path, form, text in calls if not form)
    before = spec.metrics()
    got = together(lambda p=path, f=form, t=text: spec.ask(p, f, t, **asked) for path, form, text in calls)
    moved = speculation_delta(before, spec.metrics(), 5)
    assert moved.drafts > 0 and moved.accepted > 0
    by_prompt = dict(zip([(path, text) for path, form, text in calls if not form], wanted))
    ties = 0
    for (path, _, text), answer in zip(calls, got):
        assert answer.usage is not None
        count = answer.usage["completion_tokens"]
        assert len(answer.entries[0]) == len(answer.token_ids[0]) == count
        assert_well_formed(answer.entries[0], 5)
        for entry in answer.entries[0]:
            assert (entry.token, entry.logprob) == max(entry.top, key=lambda pair: pair[1]), "greedy emits rank 1"
            assert path == COMPLETIONS or len(entry.top) == 5
        ties += assert_same(by_prompt[path, text], answer)
        assert assert_close(by_prompt[path, text], answer) >= (1 if ties else count)
    assert ties <= 1


def test_logp_1_accepted_positions_carry_their_own_values(spec: Client) -> None:
    """The whole continuation of LIST, given as a prompt, has the same values where nothing was ever drafted."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "logprobs": 1, "return_token_ids": True}
    before = spec.metrics()
    answer = spec.ask(COMPLETIONS, False, LIST, **asked)
    assert speculation_delta(before, spec.metrics(), 5).accepted >= 5
    prompt_ids = spec.post("/tokenize", {"prompt": LIST}).json()["tokens"]
    echoed = spec.complete(prompt=prompt_ids + answer.token_ids[0], max_tokens=1, echo=True, logprobs=1, temperature=0)
    values = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    for got, wanted in zip(answer.logprobs[0], values[len(prompt_ids) :]):
        assert got == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_logp_1_sampled_requests_report_the_untransformed_distribution(ref: Client, spec: Client, path: str) -> None:
    """Temperature, top_k and a bias change which token comes, never the value reported for it."""
    asked: dict[str, Any] = {"seed": 5, "temperature": 1.4, "top_k": 40, "max_tokens": 24, "logprobs": 5}
    plain = ref.ask(path, False, LIST, return_token_ids=True, **asked)
    answer = spec.ask(path, True, LIST, return_token_ids=True, **asked)
    assert_well_formed(answer.entries[0], 5)
    assert answer.token_ids == plain.token_ids
    assert assert_close(plain, answer) == 24


@FORMS
def test_logp_1_zero_alternatives_still_give_the_chosen_tokens_value(spec: Client, path: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    none = spec.ask(path, streamed, LIST, logprobs=0, **asked)
    five = spec.ask(path, streamed, LIST, logprobs=5, **asked)
    assert len(none.entries[0]) == 8
    assert none.logprobs[0] == pytest.approx(five.logprobs[0], abs=CLOSE)
    absent = spec.ask(path, streamed, LIST, **asked)
    assert not absent.entries[0]


# ---- A-LOGP-2, vllm-project/vllm#8268 ----


@pytest.mark.parametrize("length", [33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_logp_2_prompt_logprobs_are_the_same_when_the_prompt_is_cached(ref: Client, spec: Client, length: int) -> None:
    ids = [582 + 7 * i for i in range(length)]
    asked: dict[str, Any] = {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
    spec.complete(prompt=ids, max_tokens=1)  # the blocks are cached now
    first, second = (spec.complete(**asked)["choices"][0]["prompt_logprobs"] for _ in range(2))
    assert len(first) == length and first[0] is None
    assert [set(entry) for entry in first[1:]] == [set(entry) for entry in second[1:]]
    for position, entry in enumerate(first[1:], start=1):
        assert str(ids[position]) in entry
        for token, value in entry.items():
            assert value["logprob"] == pytest.approx(second[position][token]["logprob"], abs=1e-6)
    plain = ref.complete(**asked)["choices"][0]["prompt_logprobs"]
    for mine, other, token in zip(first[1:], plain[1:], ids[1:]):
        assert mine[str(token)]["logprob"] == pytest.approx(other[str(token)]["logprob"], abs=CLOSE)


def test_logp_2_prompt_logprobs_of_a_stream_are_refused_by_name(spec: Client) -> None:
    response = spec.post(COMPLETIONS, {"prompt": [582, 827], "prompt_logprobs": 1, "max_tokens": 1, "stream": True})
    spec.assert_error(response, "prompt_logprobs")


# ---- A-LOGP-3, vllm-project/vllm#10234 ----


@pytest.mark.parametrize("streamed", [False, True])
def test_logp_3_an_echoed_prompt_with_logprobs_is_strict_json(spec: Client, streamed: bool) -> None:
    prompt = "correct horse battery"
    asked: dict[str, Any] = {"echo": True, "logprobs": 5, "temperature": 1, "top_k": 1, "max_tokens": 4}
    answer = spec.ask(COMPLETIONS, streamed, prompt, return_token_ids=True, **asked)  # the client parses strictly
    num_prompt = answer.usage["prompt_tokens"]
    assert answer.text[0].startswith(prompt)
    assert "".join(entry.token for entry in answer.entries[0]) == answer.text[0]
    assert len(answer.entries[0]) == num_prompt + 4
    assert answer.logprobs[0][0] is None
    assert_well_formed(answer.entries[0][1:], 5)


@FORMS
@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [421]},
        {"allowed_token_ids": [421, 582], "temperature": 1.0, "seed": 3},
        {"logit_bias": {"421": 100, "582": -100}},
        {"bad_words": [" one"], "min_tokens": 3},
        {"top_k": 1, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 0.01},
    ],
)
def test_logp_3_masked_tokens_never_show_an_infinity(
    spec: Client, path: str, streamed: bool, options: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "logprobs": 5, "return_token_ids": True, **options}
    answer = spec.ask(path, streamed, "Numbers: one two", **asked)  # the client parses strictly
    assert len(answer.entries[0]) == len(answer.token_ids[0])
    assert_well_formed(answer.entries[0], 5)
    allowed = options.get("allowed_token_ids")
    assert allowed is None or set(answer.token_ids[0]) <= set(allowed)
