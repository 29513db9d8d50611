"""SAMP: every sampling parameter acts at every position of a speculated run, not only at the bonus token."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cases.client import (
    CHAT,
    COMPLETIONS,
    IS_LONG,
    LIST,
    PAT,
    Client,
    Speculation,
    assert_same,
    speculation_delta,
    together,
)

WIDTH = 5
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 64 if IS_LONG else 28,
    "logprobs": 2,
    "return_token_ids": True,
}
HA, EOS = 421, 2


class Speculated:
    """Counts what happened on SPEC inside a `with`; a case where nothing was drafted and accepted is void."""

    def __init__(self, spec: Client) -> None:
        self.spec = spec
        self.moved: Speculation

    def __enter__(self) -> "Speculated":
        self.before = self.spec.metrics()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.moved = speculation_delta(self.before, self.spec.metrics(), WIDTH)
            assert self.moved.drafts > 0 and self.moved.accepted > 0, "void: nothing was speculated"


# ---- A-SAMP-1, sgl-project/sglang#33643 ----

PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.05},
    {"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.02},
]


def test_samp_1_penalties_see_every_token_of_an_accepted_run(ref: Client, spec: Client) -> None:
    """On PAT: the model is so sure of the next line of LIST that penalties would change nothing."""
    asked = {**GREEDY, "max_tokens": 64 if IS_LONG else 40, "ignore_eos": True}
    wanted = together(lambda p=penalty: ref.ask(COMPLETIONS, False, PAT, **asked, **p) for penalty in [{}, *PENALTIES])
    with Speculated(spec):
        got = together(lambda p=penalty: spec.ask(COMPLETIONS, False, PAT, **asked, **p) for penalty in PENALTIES)
    for penalty, plain, answer in zip(PENALTIES, wanted[1:], got):
        assert plain.token_ids == answer.token_ids, penalty
    unchanged = [penalty for penalty, answer in zip(PENALTIES, got) if answer.token_ids == wanted[0].token_ids]
    assert not [penalty for penalty in PENALTIES[:3] if penalty in unchanged], "no effect"


def test_samp_1_each_penalty_alone_is_tested_with_drafts(spec: Client) -> None:
    for penalty in PENALTIES[:3]:
        before = spec.metrics()
        spec.ask(COMPLETIONS, False, PAT, temperature=0, max_tokens=40, ignore_eos=True, **penalty)
        assert speculation_delta(before, spec.metrics(), WIDTH).drafts > 0, f"void: no drafts under {penalty}"


# ---- A-SAMP-2, vllm-project/vllm#42744 ----


def test_samp_2a_a_banned_token_occurs_at_no_position(ref: Client, spec: Client) -> None:
    plain = ref.ask(COMPLETIONS, False, LIST, **GREEDY)
    banned = [token for token, _ in Counter(plain.token_ids[0]).most_common(3)]
    bans = [banned, banned[:1]]
    biases = [{str(token): -100 for token in ids} for ids in bans]
    wanted = together(lambda b=bias: ref.ask(COMPLETIONS, False, LIST, logit_bias=b, **GREEDY) for bias in biases)
    with Speculated(spec):
        got = together(lambda b=bias: spec.ask(COMPLETIONS, False, LIST, logit_bias=b, **GREEDY) for bias in biases)
    for ids, plain_answer, answer in zip(bans, wanted, got):
        assert not set(ids) & set(answer.token_ids[0])
        assert plain_answer.token_ids == answer.token_ids


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_samp_2b_a_token_biased_up_is_the_only_one(spec: Client, temperature: float) -> None:
    with Speculated(spec):
        answer = spec.ask(
            COMPLETIONS, False, LIST, logit_bias={str(HA): 100}, temperature=temperature, max_tokens=32,
            return_token_ids=True,
        )  # fmt: skip
    assert answer.token_ids[0] == [HA] * 32
    assert answer.text[0] == " ha" * 32


def test_samp_2c_min_p_of_one_is_greedy_at_every_position(spec: Client) -> None:
    with Speculated(spec):
        greedy, floored, top_1, tiny_nucleus = together(
            lambda o=options: spec.ask(COMPLETIONS, False, LIST, **{**GREEDY, **o})
            for options in (
                {},
                {"min_p": 1.0, "temperature": 1.5},
                {"top_k": 1, "temperature": 1.5},
                {"top_p": 1e-6, "temperature": 1.5},
            )
        )
    assert floored.token_ids == greedy.token_ids
    assert top_1.token_ids == greedy.token_ids
    assert tiny_nucleus.token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_samp_2_only_allowed_tokens_come_at_any_position(ref: Client, spec: Client, temperature: float) -> None:
    plain = ref.ask(COMPLETIONS, False, LIST, **GREEDY)
    allowed = [*sorted(set(plain.token_ids[0]))[::2], HA]
    asked = {**GREEDY, "temperature": temperature, "seed": 9, "allowed_token_ids": allowed}
    wanted = ref.ask(COMPLETIONS, False, LIST, **asked)
    with Speculated(spec):
        got = spec.ask(COMPLETIONS, False, LIST, **asked)
    assert set(got.token_ids[0]) <= set(allowed)
    assert got.token_ids == wanted.token_ids


def test_samp_2_a_bad_word_of_several_tokens_never_comes(ref: Client, spec: Client) -> None:
    asked = {**GREEDY, "bad_words": ["green one", "three"]}
    wanted = ref.ask(COMPLETIONS, False, LIST, **asked)
    with Speculated(spec):
        got = spec.ask(COMPLETIONS, False, LIST, **asked)
    assert "green one" not in got.text[0] and "three" not in got.text[0]
    assert got.token_ids == wanted.token_ids


# ---- A-SAMP-3, vllm-project/vllm#32642 ----

STOPPERS = [
    ({"logit_bias": {str(EOS): 100}}, EOS, None),
    ({"logit_bias": {str(HA): 100}, "stop_token_ids": [HA]}, HA, HA),
]


@pytest.mark.parametrize(("options", "token", "reason"), STOPPERS, ids=["EOS", "stop token"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_samp_3_min_tokens_holds_at_draft_positions_and_not_one_longer(
    setup: Callable[[str], Client], options: dict[str, Any], token: int, reason: int | None, temperature: float
) -> None:
    spec = setup("embedded" if temperature else "spec")  # the stand-in's samples never repeat anything
    asked = {"temperature": temperature, "seed": 1, "max_tokens": 32, "return_token_ids": True, **options}
    with Speculated(spec):
        answers = together(
            lambda m=m: spec.ask(COMPLETIONS, m % 2 == 0, LIST, min_tokens=m, **asked) for m in range(13)
        )
    for m, answer in enumerate(answers):
        ids = answer.token_ids[0]
        assert token not in ids[:m]
        assert ids[m:] == [token]
        assert answer.usage is not None and answer.usage["completion_tokens"] == m + 1
        assert (answer.finish[0], answer.stop_reason[0]) == ("stop", reason)


def test_samp_3_drafts_that_hold_the_eos_itself_do_not_end_a_request_early(ref: Client, spec: Client) -> None:
    """The prompt repeats an EOS, so drafts propose it; the bias makes the target want it as soon as it may."""
    prompt = [582, 827, 1296, EOS] * 12
    asked = {"logit_bias": {str(EOS): 100}, "temperature": 0, "max_tokens": 32, "return_token_ids": True}
    before = spec.metrics()
    answers = together(lambda m=m: spec.ask(COMPLETIONS, False, prompt, min_tokens=m, **asked) for m in range(13))
    assert speculation_delta(before, spec.metrics(), WIDTH).drafts > 0
    for m, answer in enumerate(answers):
        assert EOS not in answer.token_ids[0][:m]
        assert answer.token_ids[0][m:] == [EOS]
    plain = ref.ask(COMPLETIONS, False, prompt, min_tokens=12, **asked)
    assert plain.token_ids == answers[12].token_ids


# ---- A-SAMP-4, vllm-project/vllm#6038 ----

ROBOT: dict[str, Any] = {"temperature": 2.0, "max_tokens": 12, "return_token_ids": True}
COPYING: dict[str, Any] = {"temperature": 0.6, "max_tokens": 20, "return_token_ids": True}


@pytest.mark.parametrize(("prompt", "asked"), [("A robot may not", ROBOT), (LIST, COPYING)], ids=["robot", "copying"])
def test_samp_4_a_seed_gives_one_answer_alone_in_a_batch_streamed_and_without_speculation(
    ref: Client, spec: Client, prompt: str, asked: dict[str, Any]
) -> None:
    before = spec.metrics()
    answers = [spec.ask(COMPLETIONS, i % 2 == 0, prompt, seed=42, **asked) for i in range(5)]
    answers += together(lambda f=i % 2 == 0: spec.ask(COMPLETIONS, f, prompt, seed=42, **asked) for i in range(8))
    moved = speculation_delta(before, spec.metrics(), WIDTH)
    answers.append(ref.ask(COMPLETIONS, False, prompt, seed=42, **asked))  # another process: what a restart would give
    assert len({tuple(answer.token_ids[0]) for answer in answers}) == 1
    assert len({answer.text[0] for answer in answers}) == 1
    assert prompt != LIST or (moved.drafts > 0 and moved.accepted > 0)


def test_samp_4_seeds_differ_from_each_other(spec: Client) -> None:
    answers = together(
        lambda s=seed: spec.ask(COMPLETIONS, False, "A robot may not", seed=s, **ROBOT) for seed in range(1, 21)
    )
    assert len({answer.text[0] for answer in answers}) >= 18


def test_samp_4_without_a_seed_answers_differ(spec: Client) -> None:
    answers = together(lambda: spec.ask(COMPLETIONS, False, "A robot may not", **ROBOT) for _ in range(6))
    assert len({answer.text[0] for answer in answers}) >= 5


# ---- A-SAMP-5, vllm-project/vllm#27077 ----


def test_samp_5_greedy_sampled_and_default_rows_share_a_batch(ref: Client, spec: Client) -> None:
    wanted = ref.ask(COMPLETIONS, False, LIST, **GREEDY)
    probe = spec.probe()
    options: list[dict[str, Any]] = [{"temperature": 0}] * 2 + [{"temperature": 1.0}] * 2 + [{}] * 2
    shared = {key: value for key, value in GREEDY.items() if key != "temperature"}
    before = spec.metrics()
    ties = rounds = 0
    for _ in rounds_for(30.0, at_least=1):
        answers = together(lambda o=o: spec.ask(COMPLETIONS, True, LIST, **shared, **o) for o in options)
        rounds += 1
        for answer in answers:
            assert all(math.isfinite(value) for value in answer.logprobs[0])
            assert answer.usage is not None and answer.usage["completion_tokens"] == len(answer.token_ids[0]) > 0
        ties += sum(assert_same(wanted, answer) for answer in answers[:2])
    after = spec.metrics()
    moved = speculation_delta(before, after, WIDTH)
    assert moved.drafts > 0 and moved.accepted > 0
    assert all(value >= 0 for value in after.values())
    assert ties * 50 <= rounds * 2 or ties <= 1
    spec.assert_live(probe)


def rounds_for(seconds: float, at_least: int) -> Iterator[int]:
    """Count up: for `seconds` in the long form, `at_least` times in the ordinary one."""
    started = time.monotonic()
    number = 0
    while number < at_least or (IS_LONG and time.monotonic() - started < seconds):
        yield number
        number += 1


# ---- A-SAMP-6, vllm-project/vllm#16863 ----

ANIMAL = "My favourite animal is"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_samp_6_each_child_has_one_text_one_finish_and_its_share_of_the_usage(spec: Client, path: str) -> None:
    asked = {"n": 4, "temperature": 1.2, "seed": 7, "max_tokens": 24, "return_token_ids": True, "logprobs": 1}
    streamed, whole, single = together(
        [
            lambda: spec.ask(path, True, ANIMAL, **asked),
            lambda: spec.ask(path, False, ANIMAL, **asked),
            lambda: spec.ask(path, False, ANIMAL, **{**asked, "n": 1}),
        ]
    )
    for answer in (streamed, whole):
        assert set(answer.text) == set(answer.finish) == {0, 1, 2, 3}  # the client refuses a choice after its finish
        assert answer.usage is not None and single.usage is not None
        assert answer.usage["prompt_tokens"] == single.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == sum(len(ids) for ids in answer.token_ids.values())
        assert all(len(answer.entries[i]) == len(answer.token_ids[i]) for i in range(4))
        assert len(set(answer.text.values())) > 1
    assert streamed.text == whole.text
    assert streamed.token_ids == whole.token_ids
    assert streamed.finish == whole.finish
    assert streamed.text[0] == single.text[0]


def test_samp_6_a_child_is_the_request_with_the_next_seed(ref: Client, spec: Client) -> None:
    asked = {"temperature": 0.6, "max_tokens": 24, "return_token_ids": True}
    with Speculated(spec):
        parent = spec.ask(COMPLETIONS, True, LIST, n=4, seed=7, **asked)
    singles = together(lambda s=seed: ref.ask(COMPLETIONS, False, LIST, seed=s, **asked) for seed in range(7, 11))
    assert [parent.token_ids[i] for i in range(4)] == [single.token_ids[0] for single in singles]


def test_samp_6_greedy_children_are_equal_and_stop_strings_cut_each_for_itself(embedded: Client) -> None:
    asked = {**GREEDY, "n": 3, "stop": ["blue green"]}
    streamed, whole = (embedded.ask(COMPLETIONS, form, LIST, **asked) for form in (True, False))
    for answer in (streamed, whole):
        assert len(set(answer.text.values())) == 1
        assert set(answer.stop_reason.values()) == {"blue green"}
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == sum(len(ids) for ids in answer.token_ids.values())
    assert streamed.text == whole.text


def test_samp_6_several_prompts_with_several_children_are_indexed_by_prompt(spec: Client) -> None:
    prompts = ["The sky is", "One two three", ANIMAL]
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "return_token_ids": True}
    streamed, whole = (spec.ask(COMPLETIONS, form, prompts, n=2, **asked) for form in (True, False))
    alone = together(lambda p=prompt: spec.ask(COMPLETIONS, False, p, n=2, **asked) for prompt in prompts)
    wanted = [answer.token_ids[i] for answer in alone for i in range(2)]
    for answer in (streamed, whole):
        assert [answer.token_ids[i] for i in range(6)] == wanted
        assert answer.usage is not None
        assert answer.usage["prompt_tokens"] == sum(a.usage["prompt_tokens"] for a in alone if a.usage)
