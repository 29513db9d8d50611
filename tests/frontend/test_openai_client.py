"""The official `openai` client, unmodified, against a frontend on a real port."""

import contextlib

import openai
import pytest

from frontend.app import Listener, build_app
from tests.frontend.fakes_client import FakeEngineClient, hello, server_over

MESSAGES = [{"role": "user", "content": "Say hello"}]


@contextlib.asynccontextmanager
async def client_of(engine):
    server = server_over(engine, port=0)
    listener = Listener(build_app(server), server.config)
    await listener.start()
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{listener.port}/v1", api_key="none", max_retries=0, timeout=10
        ) as client:
            yield client
    finally:
        await listener.stop()


@pytest.fixture
async def client():
    async with client_of(FakeEngineClient(hello(), play=lambda given: [[19556, 905], [582]])) as found:
        yield found


async def test_chat(client):
    answer = await client.chat.completions.create(model="embedded", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello world one"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


async def test_chat_stream_with_usage_and_logprobs(client):
    stream = await client.chat.completions.create(
        model="embedded",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello world one"
    entries = [e for c in chunks[:-1] if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == ["Hello", " world", " one"]
    assert bytes(entries[1].bytes) == b" world"
    assert len(entries[0].top_logprobs) == 2
    assert chunks[-1].usage.completion_tokens == 3


async def test_completions_with_logprobs_stop_and_stream(client):
    answer = await client.completions.create(model="embedded", prompt=["x", "y"], logprobs=1, stop=" one")
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[1].logprobs.tokens == ["Hello", " world", " one"]
    stream = await client.completions.create(model="embedded", prompt=[582], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world one"


async def test_every_optional_field_may_be_null(client):
    names = (
        "stop", "max_tokens", "temperature", "top_p", "n", "seed", "logit_bias", "logprobs", "top_logprobs",
        "stream_options", "tools", "tool_choice", "response_format", "user", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    plain = await client.chat.completions.create(model="embedded", messages=MESSAGES)
    for given in (*({name: None} for name in names), dict.fromkeys(names)):
        answer = await client.chat.completions.create(model="embedded", messages=MESSAGES, **given)
        assert answer.choices[0].message.content == plain.choices[0].message.content


async def test_models_and_errors_have_the_clients_types(client):
    models = [model async for model in client.models.list()]
    assert (await client.models.retrieve(models[0].id)).id == models[0].id
    assert models[0].root == "embedded"
    assert models[0].max_model_len == 128
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="embedded", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        await client.chat.completions.create(
            model="embedded", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="embedded", prompt=[582] * 200, stream=True)
    assert long.value.code == "context_length_exceeded"


async def test_an_error_within_a_stream_raises_in_the_client():
    engine = FakeEngineClient(hello())

    def play(given):
        yield [19556]
        engine.lose("it died")

    engine._play = play
    async with client_of(engine) as client:
        stream = await client.completions.create(model="embedded", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="it died"):
            [chunk async for chunk in stream]
