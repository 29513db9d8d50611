"""The small pages: liveness, readiness, version, models, tokenising."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from frontend.app import build_app
from tests.frontend.fakes_client import MODEL, FakeEngineClient, embedded_text, server_over


@pytest.fixture
async def engine():
    return FakeEngineClient()


@pytest.fixture
async def http(engine):
    async with TestClient(TestServer(build_app(server_over(engine)))) as client:
        yield client


async def test_health_outlives_the_engine_and_ready_says_why(http, engine):
    ready = await http.get("/ready")
    listed = {"id": "0", "address": "ipc:///engine", "ready": True, "reason": None}
    assert (ready.status, await ready.json()) == (200, {"status": "ready", "engine": "0", "engines": [listed]})
    engine.lose("the engine at X is not available: it was killed")
    for path in ("/health", "/ping"):
        assert (await http.get(path)).status == 200
    ready = await http.get("/ready")
    assert ready.status == 503
    said = await ready.json()
    assert "it was killed" in said["reason"] and said["engines"][0]["reason"] == said["reason"]


async def test_models_have_the_keys_bench_clients_need(http):
    listed = (await (await http.get("/v1/models")).json())["data"][0]
    assert (listed["id"], listed["root"], listed["max_model_len"]) == (MODEL, "embedded", 128)
    assert listed["owned_by"] == "drafthouse"
    assert listed["permission"][0]["object"] == "model_permission"
    assert await (await http.get(f"/v1/models/{MODEL}")).json() == listed
    assert (await http.get("/v1/models/other")).status == 404


async def test_tokenize_gives_what_completions_would_run(http, engine):
    for body in ({"prompt": "Hello world", "add_special_tokens": False}, {"prompt": "Hello world", "model": MODEL}):
        answer = await (await http.post("/tokenize", json=body)).json()
        assert answer == {"count": 2, "max_model_len": 128, "tokens": [19556, 905], "token_strs": None}
    strings = await (await http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True})).json()
    assert strings["token_strs"] == ["Hello"]
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await (await http.post("/tokenize", json=messages)).json())["tokens"]
    await (await http.post("/v1/chat/completions", json=messages)).read()
    assert tuple(tokens) == engine.submitted[0].prompt_token_ids


async def test_detokenize_is_the_inverse(http):
    text = "Hello 世界 🎉"
    tokens = embedded_text().encode_prompt(text)
    assert await (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": "x", "messages": []}), ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [49152]}),
        ("/detokenize", {"tokens": "x"}), ("/detokenize", {"tokens": [1], "model": "other"}),
    ],
)  # fmt: skip
async def test_bad_bodies_are_refused(http, path, body):
    response = await http.post(path, json=body)
    assert response.status == (404 if "model" in body else 400)
    assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_the_version_is_not_empty(http):
    assert (await (await http.get("/version")).json())["version"]
