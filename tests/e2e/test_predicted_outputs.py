"""The embedded model behind real processes, asked by the official client: a prediction changes the speed and nothing else."""

from collections.abc import Iterator

import openai
import pytest
import requests

from tests.e2e.servers import Server, serve

OPTIONS = ("--dtype", "fp32", "--check-laws", "true", "--speculator", "first_of:prediction,ngram")
MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]
LENGTH = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*OPTIONS, "--kv-cache-tokens", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> str:
    return answered(client).choices[0].message.content


def answered(client: openai.OpenAI, prediction: str | None = None, **options):
    given = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return client.chat.completions.create(
        model="embedded", messages=MESSAGES, max_tokens=LENGTH, temperature=0, **given, **options
    )


def by_source(server: Server, what: str) -> dict[str, int]:
    """The engine's totals of `drafthouse:spec_{what}_tokens_by_source_total`."""
    counted = {}
    for line in requests.get(f"{server.base_url}/metrics", timeout=10).text.splitlines():
        if line.startswith(f"drafthouse:spec_{what}_tokens_by_source_total{{"):
            counted[line.split('source="')[1].split('"')[0]] = int(float(line.rsplit(" ", 1)[1]))
    return counted


def edited(text: str) -> str:
    """One word replaced, one inserted: the first and the last part of the text are as they were."""
    words = text.split(" ")
    return " ".join([*words[:4], "rather", words[4], "and", "above", *words[6:]])


def test_the_answer_is_the_same_and_its_usage_is_what_the_engine_counted(
    server: Server, client: openai.OpenAI, plain: str
) -> None:
    before = by_source(server, "draft"), by_source(server, "accepted")
    assert set(before[0]) == {"prediction", "ngram"}
    whole = answered(client, plain)
    changed = answered(client, edited(plain))
    other = answered(client, "Zebras! 0123456789 is not what anybody would say here.")
    after = by_source(server, "draft"), by_source(server, "accepted")
    for answer in (whole, changed, other):
        assert answer.choices[0].message.content == plain
        assert answer.usage.completion_tokens == LENGTH
    details = [answer.usage.completion_tokens_details for answer in (whole, changed, other)]
    accepted = [one.accepted_prediction_tokens for one in details]
    rejected = [one.rejected_prediction_tokens for one in details]
    assert sum(accepted) + sum(rejected) == after[0]["prediction"] - before[0]["prediction"]
    assert sum(accepted) <= after[1]["prediction"] - before[1]["prediction"]  # less what max_tokens cut
    assert accepted[0] >= LENGTH // 2  # of every six tokens one is the target's own
    assert rejected[0] == 0
    assert accepted[1] >= 6 and rejected[1] > 0  # on both sides of the edits
    assert accepted[2] == 0


def test_a_seeded_answer_is_the_same_with_a_prediction(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="embedded", messages=MESSAGES, max_tokens=LENGTH, temperature=0.8, seed=7
    )
    text = first.choices[0].message.content
    again = client.chat.completions.create(
        model="embedded",
        messages=MESSAGES,
        max_tokens=LENGTH,
        temperature=0.8,
        seed=7,
        prediction={"type": "content", "content": text},
    )
    assert again.choices[0].message.content == text
    assert again.usage.completion_tokens_details.accepted_prediction_tokens >= LENGTH // 2


def test_a_prediction_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="an answer") as caught:
        answered(client, "sea " * 3000)
    assert caught.value.param == "prediction"
