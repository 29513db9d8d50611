"""LOSS: speculation must not change the answer, whatever the drafter proposes."""

from typing import Any

from tests.cases.client import IS_LONG, PAT, Client
from tests.cases.crowd import answer, answers, assert_same
from tests.cases.laws import Increments, assert_laws

WIDTH = 5


def counted_answers(spec: Client, bodies: list[dict[str, Any]], width: int = 64) -> tuple[list[Any], Increments]:
    """The answers of the speculating server, and what it counted for them."""
    before = spec.metrics()
    got = answers(spec, bodies, width)
    return got, assert_laws(before, spec.metrics(), WIDTH, first_tokens=len(bodies))


# ---- LOSS-1: ohdearquant/lattice#243 ----

SHORT_PROMPTS = [[421, 421, 421], [582], [582, 582], [582, 827, 582], [10813]]


def test_loss_1_the_first_draft_token_is_verified_for_prompts_shorter_than_the_lookup(
    ref: Client, spec: Client
) -> None:
    bodies = [
        {"prompt": prompt, "temperature": 0, "max_tokens": length} for prompt in SHORT_PROMPTS for length in range(1, 9)
    ]
    got, counted = counted_answers(spec, bodies)
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0
    assert_same(got, answers(ref, bodies))


# ---- LOSS-2: vllm-project/vllm#41758 ----

WORDS = ["apple", "river", "no", "blue", "seven", "run", "the", "music", "cold", "up"]


def repeated_word_bodies() -> list[dict[str, Any]]:
    """One word 5 to 60 times; the ordinary run takes every fourth of the twenty and fewer tokens."""
    counts = [5 + 55 * index // 19 for index in range(20)]
    prompts = [" ".join([WORDS[index % 10]] * count) for index, count in enumerate(counts)]
    chosen = prompts if IS_LONG else [*prompts[::4], prompts[-1]]
    return [{"prompt": prompt, "temperature": 0, "max_tokens": 64 if IS_LONG else 24} for prompt in chosen]


def test_loss_2_a_word_repeated_is_continued_as_without_speculation(ref: Client, spec: Client) -> None:
    bodies = repeated_word_bodies()
    got, counted = counted_answers(spec, bodies, width=8)
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0
    assert_same(got, answers(ref, bodies, width=8))


def test_loss_2_a_word_repeated_is_continued_alike_alone_and_in_a_batch(ref: Client, spec: Client) -> None:
    bodies = repeated_word_bodies() if IS_LONG else repeated_word_bodies()[1::2]
    alone, counted = counted_answers(spec, bodies, width=1)
    assert counted.speculation.accepted > 0
    assert_same(alone, answers(ref, bodies, width=8))


def test_loss_2_seeded_samples_are_the_same_with_and_without_speculation(
    embedded_ref: Client, embedded: Client
) -> None:
    """At 0.7 the samples go on repeating, so that drafts are found; at 1.5 the distribution is flat and draws are delicate."""
    bodies = [
        {**body, "temperature": temperature, "seed": index, "max_tokens": 24 if IS_LONG else 12}
        for index, body in enumerate(repeated_word_bodies())
        for temperature in (0.7, 1.5)
    ]
    got, counted = counted_answers(embedded, bodies)
    assert counted.speculation.drafts > 0
    wanted = answers(embedded_ref, bodies)
    parted = [index for index, (a, b) in enumerate(zip(got, wanted, strict=True)) if a.token_ids != b.token_ids]
    # Two tokens come within rounding of a tie in the draw far less often than 1 in 50.
    assert parted == []


# ---- LOSS-3: vllm-project/vllm#14742 ----


def misleading_prompt(num_words: int) -> str:
    """A B C A B D A B E ...: the lookup always finds `A B` and always proposes what followed it before."""
    last = [chr(ord("C") + index % 24) for index in range(num_words // 3)]
    return " ".join(f"A B {letter}" for letter in last)


def test_loss_3_misleading_prompts_change_nothing(ref: Client, spec: Client) -> None:
    num_requests, num_tokens = (16, 64) if IS_LONG else (4, 12)
    bodies = [
        {"prompt": misleading_prompt(300 - 3 * index), "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
        for index in range(num_requests)
    ]
    got, counted = counted_answers(spec, bodies)
    assert counted.speculation.drafts > 0
    assert_same(got, answers(ref, bodies))
    spec.assert_quiet()


def test_loss_3_drafts_that_are_almost_always_wrong_change_nothing(ref: Client, spec: Client) -> None:
    """Every answer is drawn evenly from 26 letters that the prompt holds: always a draft, hardly ever a right one."""
    letters = [spec.post("/tokenize", {"prompt": f" {chr(65 + i)}"}).json()["tokens"] for i in range(26)]
    assert all(len(ids) == 1 for ids in letters)
    ids = [token for (token,) in letters]
    prompt = [ids[index % 26] for index in range(52)]
    common = {"prompt": prompt, "temperature": 100.0, "allowed_token_ids": ids, "max_tokens": 40 if IS_LONG else 14}
    bodies = [{**common, "seed": seed} for seed in range(16 if IS_LONG else 6)]
    got, counted = counted_answers(spec, bodies)
    assert counted.speculation.drafts >= 8 * len(bodies)
    assert counted.speculation.accepted < 0.15 * counted.speculation.draft_tokens
    wanted = answers(ref, bodies)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    assert {token for one in got for token in one.token_ids} <= set(ids)
    spec.assert_quiet()


def test_loss_3_the_server_answers_the_same_after_a_long_time_of_wrong_drafts(spec: Client) -> None:
    body = {"prompt": PAT, "temperature": 0, "max_tokens": 24}
    before = answer(spec, **body)
    bodies = [
        {"prompt": misleading_prompt(90), "temperature": 2.0, "seed": seed, "max_tokens": 12}
        for seed in range(8 if IS_LONG else 3)
    ]
    for _ in range(10 if IS_LONG else 1):
        answers(spec, bodies)
    after = answer(spec, **body)
    assert (after.token_ids, after.text, after.finish) == (before.token_ids, before.text, before.finish)
