"""CACHE: preemption, recompute, prefix cache, and what must not survive from one request into the next."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.client import IS_LONG, LIST, Client, Streamed, together, total
from tests.cases.crowd import answer, answers, assert_same, seeded
from tests.cases.laws import assert_laws, increments
from tests.e2e.servers import serve
from tests.tiny import write_tiny_model

WIDTH = 5
SPEC = ("--speculator", "ngram", "--num-draft-tokens", "5", "--lookup-min", "1", "--lookup-max", "4")
RUNS = [[582, 827, 1296], [1876, 2531], [2976], [421, 421, 421, 421], [582, 827, 1296, 1876, 2531, 2976]]


# ---- CACHE-1: vllm-project/vllm#49620 ----


def test_cache_1_preempted_requests_of_a_tiny_pool_answer_as_alone(setup: Callable[[str], Client]) -> None:
    tiny, ref = setup("tiny_kv"), setup("ref")
    bodies = [
        {"prompt": f"{index}.\n{LIST}", "temperature": 0, "max_tokens": 200 if IS_LONG else 48, "ignore_eos": True}
        for index in range(8 if IS_LONG else 6)
    ]
    before = tiny.metrics()
    got = answers(tiny, bodies)
    tiny.assert_quiet()
    counted = assert_laws(before, tiny.metrics(), WIDTH, first_tokens=len(bodies))
    assert counted.preemptions > 0, "the pool was never too small"
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0
    assert counted.generation == sum(one.completion_tokens for one in got)
    assert counted.prompt == sum(one.prompt_tokens for one in got), "a recompute counts no prompt again"
    assert_same(got, answers(ref, bodies))


def scripted(preempt_at: int | None) -> dict[str, Any]:
    script: dict[str, Any] = {"runs": RUNS}
    if preempt_at is not None:
        script["preempt_at"] = preempt_at
    return {"prompt": "x", "max_tokens": 100, "return_token_ids": True, "sim": script}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("step", range(len(RUNS)))
def test_cache_1_a_step_lost_to_a_preemption_in_flight_is_applied_once(sim: Client, step: int, streamed: bool) -> None:
    wanted = [token for run in RUNS for token in run]
    for _ in range(2):  # "repeated twice"
        before = sim.metrics()
        got: Streamed = sim.ask("/v1/completions", streamed, **scripted(step))
        counted = increments(before, sim.metrics(), WIDTH)
        assert got.token_ids[0] == wanted, "no token twice, none missing"
        assert counted.preemptions == 1
        assert counted.speculation.drafts == 4, "the lost step is not counted beside its repetition"
        assert counted.speculation.draft_tokens == counted.speculation.accepted == 11
        assert counted.generation == len(wanted)
        assert counted.prompt == 1
    sim.assert_quiet()


def test_cache_1_preempted_and_other_requests_do_not_mix(sim: Client) -> None:
    bodies = [scripted(index % 6 if index % 6 < 5 else None) for index in range(24)]
    before = sim.metrics()
    got = together([lambda body=body: Client(sim.base_url).complete(**body) for body in bodies], width=24)
    wanted = [token for run in RUNS for token in run]
    assert all(one["choices"][0]["token_ids"] == wanted for one in got)
    counted = increments(before, sim.metrics(), WIDTH)
    assert counted.preemptions == 20
    assert counted.speculation.drafts == 4 * 24
    assert counted.generation == len(wanted) * 24
    sim.assert_quiet()


# ---- CACHE-2: huggingface/text-generation-inference#2711 ----


def family_of_prompts(rng: random.Random) -> list[list[int]]:
    """S+a, S+b, S+a again: S is five blocks of its own; a and b are short and copy from S, so that drafts are found."""
    shared = [rng.randrange(1000, 40000) for _ in range(10)] * 8
    a, b = [*shared[:6], 582], [*shared[3:9], 827]
    return [shared + a, shared + b, shared + a]


def run_families(client: Client, oracle: Client, num_clients: int) -> None:
    rng = seeded("CACHE-2")
    families = [family_of_prompts(rng) for _ in range(num_clients)]
    common = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}

    def one_client(prompts: list[list[int]]) -> list[dict[str, Any]]:
        asked = [{"prompt": prompt, **common} for prompt in prompts]
        first = [answer(client, **body) for body in asked]
        longer = prompts[0] + first[0].token_ids + [582, 827, 1296]
        asked.append({"prompt": longer, **common})
        got[id(prompts)] = [*first, answer(client, **asked[-1])]
        return asked

    got: dict[int, list[Any]] = {}
    bodies = together([lambda f=f: one_client(f) for f in families], width=num_clients)
    flat = [one for family in families for one in got[id(family)]]
    assert_same(flat, answers(oracle, [body for asked in bodies for body in asked]))


@pytest.mark.parametrize(
    "name", ["spec", "tiny_kv"] if IS_LONG else ["tiny_kv"]
)  # evicted and reused blocks are the harder half
def test_cache_2_cached_prefixes_give_the_answers_of_a_server_without_a_cache(
    setup: Callable[[str], Client], name: str
) -> None:
    client, oracle = setup(name), setup("spec_nocache")
    before, before_oracle = client.metrics(), oracle.metrics()
    run_families(client, oracle, num_clients=8 if IS_LONG else 4)
    after, after_oracle = client.metrics(), oracle.metrics()
    family = "vllm:prefix_cache_hits_total"
    assert total(after, family) > total(before, family), "nothing came from the cache"
    assert total(after_oracle, family) == total(before_oracle, family) == 0, "the oracle has no cache"
    counted = increments(before, after, WIDTH)
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0
    client.assert_quiet()


def test_cache_2_a_hit_is_reported_and_counted_in_whole_blocks(spec: Client) -> None:
    prompt = [20000 + index for index in range(80)]
    spec.complete(prompt=[*prompt, 582], temperature=0, max_tokens=1)
    before = spec.metrics()
    usage = spec.complete(prompt=[*prompt, 827], temperature=0, max_tokens=1)["usage"]
    after = spec.metrics()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 80
    hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    assert total(after, hits) - total(before, hits) == 80
    assert total(after, queries) - total(before, queries) == 81
    cached = "vllm:prompt_tokens_cached_total"
    assert total(after, cached) - total(before, cached) == 80


# ---- CACHE-3: ggml-org/llama.cpp#27852 ----

SHORT_LIST = {"prompt": LIST, "temperature": 0, "max_tokens": 32, "ignore_eos": True}


def made_up_words(num_words: int) -> str:
    rng = seeded("CACHE-3")
    syllables = ["zor", "blim", "quax", "vent", "drub", "ski", "po", "narg"]
    return " ".join("".join(rng.choices(syllables, k=3)) for _ in range(num_words))


def answer_and_counts(client: Client, max_tokens: int = 32) -> tuple[Any, tuple[float, float, float]]:
    before = client.metrics()
    got = answer(client, **{**SHORT_LIST, "max_tokens": max_tokens})
    counted = assert_laws(before, client.metrics(), WIDTH, first_tokens=1).speculation
    return got, (counted.drafts, counted.draft_tokens, counted.accepted)


def test_cache_3_a_request_drafts_as_on_a_fresh_server_after_another_one(tmp_path: Path) -> None:
    """A tiny random model: two fresh servers cost little, and greedy text of such a model soon repeats itself."""
    model = str(write_tiny_model(tmp_path / "tiny", context_length=2048))
    with serve("--model", model, "--dtype", "fp32", *SPEC) as server:
        fresh, fresh_counts = answer_and_counts(Client(server.base_url), 200)
    with serve("--model", model, "--dtype", "fp32", *SPEC) as server:
        client = Client(server.base_url)
        client.complete(prompt=made_up_words(120), temperature=0, max_tokens=64, ignore_eos=True)
        client.complete(prompt=LIST[:-30] + "blue blue", temperature=0, max_tokens=64, ignore_eos=True)
        used, used_counts = answer_and_counts(client, 200)
    assert (used.token_ids, used.text) == (fresh.token_ids, fresh.text)
    assert used_counts == fresh_counts
    assert fresh_counts[0] > 0
    assert fresh_counts[2] > 0


def test_cache_3_a_long_request_leaves_no_words_and_no_drafts_to_the_next(spec: Client) -> None:
    fresh, counts = answer_and_counts(spec)
    words = made_up_words(400 if IS_LONG else 60)
    spec.complete(prompt=words, temperature=0, max_tokens=8)
    used, used_counts = answer_and_counts(spec)
    assert (used.token_ids, used.text, used_counts) == (fresh.token_ids, fresh.text, counts)
    assert not any(word in fresh.text for word in words.split())


# ---- CACHE-4: spiritbuun/buun-llama-cpp#74 ----

THIRTY_WORDS = (
    "cat tree music window seven garden yellow purchase bridge ocean thunder pencil doctor silver marble engine "
    "butter planet whisper castle rabbit candle mirror orange shadow velvet harbor copper jungle anchor"
)


def places_with_a_match(prompt: list[int], tokens: list[int]) -> int:
    """Behind how many of the tokens but the last a lookup of 1 to 4 tokens finds something: where that token came before."""
    history = [*prompt, *tokens]
    return sum(history[end - 1] in history[: end - 1] for end in range(len(prompt) + 1, len(history)))


def test_cache_4_a_round_without_a_match_is_no_draft(ref: Client, spec: Client) -> None:
    """Chunks are not steps (a stream that is behind gets several in one), so the places of rounds are bounded, not known."""
    prompt = spec.post("/tokenize", {"prompt": THIRTY_WORDS}).json()["tokens"]
    assert len(set(prompt)) == len(prompt), "a repeated token would be a match"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    before = spec.metrics()
    tokens = spec.stream(**body).token_ids[0]
    counted = assert_laws(before, spec.metrics(), WIDTH, first_tokens=1)
    assert len(tokens) == 20
    matching = places_with_a_match(prompt, tokens)
    without = len(tokens) - 1 - matching
    assert counted.plain_rounds >= without - counted.speculation.accepted > 0, "there were rounds without a match"
    assert counted.speculation.drafts <= matching
    assert counted.rounds == len(tokens) - 1 - counted.speculation.accepted, "no token came twice"
    got, counts = answer_and_counts(spec)
    assert counts[2] > 0, "drafting works right behind it"
    wanted = answers(ref, [body, SHORT_LIST])
    assert tokens == wanted[0].token_ids
    assert_same([got], [wanted[1]])
