"""No request kills a process or gives a 500: what the shipped description allows, what it forbids, and spoiled bytes.

schemathesis makes requests from docs/openapi.json; the spoiled ones are ours. A simulated engine with a short context keeps
every answer short.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.chaos.crowd import quiet_pages
from tests.chaos.members import Fleet, fleet_in

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = json.loads((ROOT / "docs" / "openapi.json").read_text())
MODEL = "SmolLM2-135M-Instruct"
LAST_TOKEN = 49151
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
SEED = 20261130
TIMEOUT_S = 20.0
MODES = {GenerationMode.POSITIVE: 30, GenerationMode.NEGATIVE: 40}  # requests per route
quick = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Bodies that are served, to spoil.
SERVED: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": ["red blue", "green"], "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": -1.5},
        "stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 7, "logprobs": 2,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi \u00e9 \U0001f389"}]}], "max_tokens": 4,
        "top_p": 0.9, "bad_words": ["x"], "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1},
    },
    "/tokenize": {"prompt": "red blue", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "model": MODEL},
}  # fmt: skip


def described_for(mode: GenerationMode) -> Any:
    """The shipped description without scripts: one may sleep for a minute, and fail, because it is there to do so.

    For requests that are to be served: fields that do not depend on one another, and what this server's model has.
    """
    document = copy.deepcopy(SHIPPED)
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest"):
        schemas[name]["properties"]["sim"] = {"type": "null"}
    if mode is GenerationMode.POSITIVE:
        for name, fields in INDEPENDENT.items():
            kept = {field: schemas[name]["properties"][field] for field in fields.split()}
            schemas[name] |= {"properties": kept, "additionalProperties": False, "required": [fields.split()[0]]}
            kept["model"] = {"enum": [None, MODEL]}
            for short in ("max_tokens", "max_completion_tokens", "min_tokens", "n"):
                if short in kept:
                    kept[short]["anyOf"][0]["maximum"] = {"min_tokens": 1, "n": 3}.get(short, 64)
            _bound_token_ids({field: kept[field] for field in ("prompt", "tokens", "stop_token_ids") if field in kept})
        schemas["ChatMessage"] |= {
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {"type": "string"}},
            "required": ["role", "content"],
            "additionalProperties": False,
        }
    return schemathesis.openapi.from_dict(document)


_COMMON = (
    "max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed n stop "
    "stop_token_ids min_tokens ignore_eos skip_special_tokens return_token_ids priority stream model"
)
# The first of each is required.
INDEPENDENT = {
    "CompletionRequest": f"prompt {_COMMON} logprobs echo",
    "ChatRequest": f"messages {_COMMON} max_completion_tokens logprobs",
    "TokenizeRequest": "prompt add_special_tokens return_token_strs model",
    "DetokenizeRequest": "tokens model",
}


def _bound_token_ids(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema |= {"minimum": 0, "maximum": LAST_TOKEN}
        for inner in list(schema.values()):
            _bound_token_ids(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _bound_token_ids(inner)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One server for all; afterwards it lives, is idle and has never failed."""
    with fleet_in(1, "--max-model-len", "192") as one:
        yield one
        assert all(member.is_alive for member in one.everybody)
        quiet_pages(one)
        for member in one.everybody:
            assert "Traceback" not in member.log(), member.log()[-4000:]


def check(route: str, response: requests.Response) -> int:
    """Never a 500; a status that is described; an error says why in OpenAI's shape."""
    status = response.status_code
    detail = (status, response.text[:300], str(response.request.body)[:1000])
    assert str(status) in SHIPPED["paths"][route]["post"]["responses"], detail
    assert status != 500, detail
    if status != 200:
        error = json.loads(response.content)["error"]
        assert error["message"], detail
        assert not any(leak in error["message"] for leak in ("Traceback", ".py", "msgspec", "<class")), detail
    elif response.headers["Content-Type"].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n"), detail
        assert b'"server_error"' not in response.content, detail
    return status


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("route", POSTS)
def test_what_the_description_allows_and_forbids(fleet: Fleet, route: str, mode: GenerationMode):
    url, statuses = fleet.frontends[0].url, Counter[int]()

    operation = described_for(mode)[route]["POST"]

    @settings(quick, max_examples=MODES[mode])
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        response = requests.request(**case.as_transport_kwargs(base_url=url), timeout=TIMEOUT_S)
        statuses[check(route, response)] += 1

    ask()
    print(route, mode.value, dict(statuses))
    assert (statuses[200] if mode is GenerationMode.POSITIVE else statuses[400]) >= 2, statuses


@pytest.mark.parametrize("route", POSTS)
def test_spoiled_bodies(fleet: Fleet, route: str):
    print(f"seed {SEED}")
    rng, statuses = random.Random(SEED), Counter[int]()
    whole = json.dumps(SERVED[route], ensure_ascii=False).encode()
    with requests.Session() as session:
        session.headers["Content-Type"] = "application/json"
        url = fleet.frontends[0].url + route
        assert check(route, session.post(url, data=whole, timeout=TIMEOUT_S)) == 200
        for _ in range(250):
            statuses[check(route, session.post(url, data=spoiled_text(whole, rng), timeout=TIMEOUT_S))] += 1
    print(route, dict(statuses))
    assert statuses[400] > 50
    assert statuses[200] > 0


_BITS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"NaN", b"1e999", b"-0", b"1.5", b"\\u0000", b"\\ud800", b"\xff",
    b"\x00", b"9" * 400, b"[" * 100, b'"a":1,', b'"prompt":[],', b'"n":129,', b"\xf0\x9f\x8e\x89", b"\xef\xbb\xbf",
)  # fmt: skip


def spoiled_text(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0:
            data[at:at] = rng.choice(_BITS)
        elif how == 1:
            data[at : at + rng.randint(1, 6)] = rng.choice(_BITS)
        elif how == 2:
            del data[at : at + rng.randint(1, 10)]
        elif at < len(data):
            data[at] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("route", [*SHIPPED["paths"], "/", "/v1", "/%00", "/v1/models/%ff%fe", "/v1/completions/"])
def test_every_route_survives_every_method_and_odd_headers(fleet: Fleet, route: str):
    url = fleet.frontends[0].url + route.replace("{model}", MODEL)
    odd = {"X-Request-Timeout": "-1", "Authorization": "Bearer \u00e9".encode("latin-1"), "Content-Encoding": "zstd"}
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"):
        for headers in ({}, odd, {"Content-Type": "text/plain", "Accept": "x" * 4000}):
            response = requests.request(method, url, headers=headers, data=b"{}", timeout=TIMEOUT_S)
            assert response.status_code < 500 or response.status_code == 503, (
                method,
                response.status_code,
                response.text,
            )
