"""The shipped description of the API is the API: routes, fields, types and limits."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from frontend import openapi
from frontend.app import build_app
from frontend.chat import ChatMessage
from frontend.openai import ChatRequest, CompletionRequest, StreamOptions
from frontend.token_routes import DetokenizeRequest, TokenizeRequest
from protocol.sampling import SamplingParams
from tests.frontend.fakes_client import FakeEngineClient, server_over

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = json.loads((ROOT / "docs" / "openapi.json").read_text())
STRUCTS = [CompletionRequest, ChatRequest, ChatMessage, TokenizeRequest, DetokenizeRequest, StreamOptions]
EXAMPLES = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


@pytest.fixture
async def app():
    return build_app(server_over(FakeEngineClient()))


@pytest.fixture
async def http(app: web.Application):
    async with TestClient(TestServer(app)) as client:
        yield client


def test_the_shipped_file_is_what_this_code_serves():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (ROOT / "docs" / "openapi.json").read_bytes() == openapi.text(version), "run python -m frontend.openapi"


async def test_every_route_is_described_and_nothing_else(app: web.Application):
    served = {
        (route.resource.canonical.replace(":.+", ""), route.method.lower())
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    described = {(path, method) for path, methods in SHIPPED["paths"].items() for method in methods}
    assert described == served


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described_with_the_types_it_takes(kind: type[msgspec.Struct]):
    schema = SHIPPED["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == set(kind.__struct_encode_fields__)
    for name, described in schema["properties"].items():
        types = {branch.get("type", "reference") for branch in described.get("anyOf", [described])}
        if "reference" in types or name in ("prompt", "messages"):
            continue
        for json_type, example in EXAMPLES.items():
            is_described = not described or json_type in types or (json_type == "integer" and "number" in types)
            assert _takes(kind, name, example) is is_described, (name, json_type)


def _takes(kind: type[msgspec.Struct], name: str, value: object) -> bool:
    required = {
        field.name: [] if field.name == "tokens" else "x" for field in msgspec.structs.fields(kind) if field.required
    }
    try:
        msgspec.json.decode(json.dumps({**required, name: value}), type=kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "seed", "top_k"]
)
def test_the_limits_are_those_that_are_enforced(name: str):
    (described,) = [
        branch for branch in SHIPPED["components"]["schemas"]["CompletionRequest"]["properties"][name]["anyOf"]
        if branch["type"] in ("number", "integer")
    ]  # fmt: skip
    for bound, inside, outside in (("minimum", 0, -1), ("maximum", 0, 1)):
        if bound not in described:
            continue
        # -1 is the request's word for "off", which becomes 0
        limit = max(described[bound], 0) if name == "top_k" else described[bound]
        value = float(limit) if described["type"] == "number" else limit
        _check(**{name: value + inside})
        with pytest.raises(ValueError, match=name):
            _check(**{name: value + outside})


def _check(**fields: float) -> None:
    SamplingParams(max_tokens=1, **fields).check(vocab_size=10)


async def test_it_is_served_as_json(http):
    response = await http.get("/openapi.json")
    assert response.status == 200
    assert response.content_type == "application/json"
    served = await response.json()
    assert served["paths"] == SHIPPED["paths"]
    assert served["components"] == SHIPPED["components"]
