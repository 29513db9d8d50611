"""GET /openapi.json: the API described for tools, from the Structs that decode it.

Owns the description. Field names and types come from the Structs, limits from protocol.sampling, so that neither can differ
from what is served; docs/openapi.json is the same text, and a test holds it and the routes to each other. Never looks at a
request. Routed by `frontend.app`; `python -m frontend.openapi` writes the file.
"""

import functools
import sys
from typing import Any

import msgspec
from aiohttp import web

from frontend.chat import MAX_MESSAGES, ROLES, ChatMessage
from frontend.health import version
from frontend.openai import SPEC_DECODE_METRICS, UNSUPPORTED, ChatRequest, CompletionRequest
from frontend.sampling_fields import MAX_PRIORITY
from frontend.token_routes import DetokenizeRequest, TokenizeRequest
from protocol.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_STRING: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_PENALTY: Schema = {"minimum": -2, "maximum": 2}

# What the decoder leaves open and the request is held to afterwards. Bounds that depend on the model are not here.
_LIMITS: dict[str, Schema] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS},
    "seed": {"minimum": MIN_SEED, "maximum": MAX_SEED},
    "n": {"minimum": 1, "maximum": MAX_N},
    "stop": {"maxItems": MAX_STOP_STRINGS, "minLength": 1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "min_tokens": {"minimum": 0},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "allowed_token_ids": {"minItems": 1},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "spec_decode_metrics": {"enum": list(SPEC_DECODE_METRICS)},
    "role": {"enum": sorted(ROLES)},
}
_APPLIES_TO = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("number",),
    "maxProperties": ("object",),
    "maxItems": ("array",),
    "minItems": ("array",),
    "minLength": ("string",),
    "enum": ("string",),
}

# Fields that are decoded in two steps, because their form decides their type.
_IN_TWO_STEPS: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            _SOME_TEXT,
            {"type": "array", "items": _SOME_TEXT, "minItems": 1},
            {"type": "array", "items": _INTEGER, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": _INTEGER, "minItems": 1}, "minItems": 1},
        ]
    },
    "messages": {
        "type": "array",
        "items": {"$ref": _REFERENCE.format(name="ChatMessage")},
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
    },
}
_REQUIRED = {"CompletionRequest": ["prompt"], "ChatRequest": ["messages"]}

_HEADERS: list[Schema] = [
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "schema": {"type": "string", "pattern": r"^([1-9][0-9]{0,3}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])$"},
        "description": "Seconds this request may take, more than 0; decimals are fine.",
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Repeated in the answer when it is 1 to 128 harmless characters.",
    },
]
_ERRORS = {
    400: "a value or type is wrong; the message names the field",
    401: "a key is needed",
    404: "no such model or route",
    413: "the body is too large",
    415: "a content encoding that is not taken",
    429: "this key asks too much; see Retry-After",
    500: "the engine failed at this request",
    503: "no engine takes requests now; see Retry-After",
    504: "not finished within X-Request-Timeout",
}


@functools.cache
def text(version_name: str) -> bytes:
    """The document as JSON, the same bytes for the same code."""
    return msgspec.json.format(msgspec.json.encode(document(version_name)), indent=2) + b"\n"


def document(version_name: str) -> Schema:
    """OpenAPI 3.1. `version_name`: of the distribution."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "drafthouse",
            "version": version_name,
            "description": "OpenAI's API with vLLM's extensions. Unknown fields are accepted and counted; known ones that "
            f"are not offered are refused by name: {', '.join(sorted(UNSUPPORTED.keys() - set(CompletionRequest.__struct_fields__)))}.",
        },
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "where keys are set up"}},
        },
    }


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=text(version()), content_type="application/json")


# ---- paths ----


def _paths() -> Schema:
    plain, events = "application/json", "text/event-stream"
    generation = {"parameters": _HEADERS, "security": [{"key": []}, {}]}
    return {
        "/v1/completions": {
            "post": {**_post("CompletionRequest", {plain: _ref("Completion"), events: _STRING}), **generation}
        },
        "/v1/chat/completions": {
            "post": {**_post("ChatRequest", {plain: _ref("ChatCompletion"), events: _STRING}), **generation}
        },
        "/tokenize": {"post": _post("TokenizeRequest", {plain: _ref("Tokens")})},
        "/detokenize": {"post": _post("DetokenizeRequest", {plain: _ref("Text")})},
        "/v1/models": {"get": _get({plain: {"type": "object", "required": ["object", "data"]}})},
        "/v1/models/{model}": {"get": {**_get({plain: {"type": "object"}}, 404), "parameters": [_path("model")]}},
        **{path: {"post": _profile()} for path in ("/start_profile", "/stop_profile")},
        **{path: {"get": _get({plain: {"type": "object"}})} for path in ("/health", "/ping", "/version")},
        "/openapi.json": {"get": _get({plain: {"type": "object"}})},
        "/ready": {"get": _ready()},
        **{
            path: {"get": _get({"text/plain": _STRING, "application/openmetrics-text": _STRING})}
            for path in ("/metrics", "/metrics/", "/metrics/engine", "/metrics/frontend")
        },
    }


def _post(body: str, answers: dict[str, Schema]) -> Schema:
    content = {"application/json": {"schema": _ref(body)}}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": _response("the answer", answers), **_errors(*_ERRORS)},
    }


def _get(answers: dict[str, Schema], *errors: int) -> Schema:
    return {"responses": {"200": _response("the page", answers), **_errors(401, *errors)}}


def _ready() -> Schema:
    state = {"application/json": {"type": "object", "required": ["status"]}}
    return {
        "responses": {
            "200": _response("a request sent now would be served", state),
            "503": _response("it would not, and why", state),
        }
    }


def _profile() -> Schema:
    answer = {"application/json": {"type": "object", "required": ["status"]}}
    engine = {"name": "engine", "in": "query", "schema": _STRING, "description": "one engine by its id; default: all"}
    return {
        "description": "For admins: the key of --admin-key-file.",
        "parameters": [engine],
        "security": [{"key": []}],
        "responses": {"200": _response("done", answer), **_errors(400, 401, 404, 409, 500, 501, 503, 504)},
    }


def _path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _STRING}


def _response(description: str, content: dict[str, Schema]) -> Schema:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _errors(*statuses: int) -> Schema:
    error = {"application/json": _ref("Error")}
    return {str(status): _response(_ERRORS.get(status, "it cannot be done now"), error) for status in statuses}


def _ref(name: str) -> Schema:
    return {"$ref": _REFERENCE.format(name=name)}


# ---- schemas ----


def _schemas() -> Schema:
    found: Schema = {}
    for kind in (CompletionRequest, ChatRequest, ChatMessage, TokenizeRequest, DetokenizeRequest):
        found[kind.__name__] = _struct(kind, found)
    return {**found, **_answers()}


def _struct(kind: type[msgspec.Struct], found: Schema) -> Schema:
    """The schema of one Struct; schemas of Structs inside go into `found`."""
    properties = {}
    for field in msgspec.structs.fields(kind):
        schema = _IN_TWO_STEPS.get(field.encode_name)
        if field.type is not msgspec.Raw:
            (schema,), inner = msgspec.json.schema_components((field.type,), ref_template=_REFERENCE)
            found.update(inner)
        elif schema is None:
            raise TypeError(f"{kind.__name__}.{field.name} is Raw and has no schema")
        assert schema is not None
        _limit(schema, _LIMITS.get(field.encode_name, {}))
        properties[field.encode_name] = schema
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    required += _REQUIRED.get(kind.__name__, [])
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _limit(schema: Schema, limits: Schema) -> None:
    """Put the limits where they apply: to the numbers, lists or strings of a union, not to its null."""
    for branch in schema.get("anyOf", [schema]):
        for name, value in limits.items():
            if branch.get("type") in _APPLIES_TO[name]:
                branch[name] = value


def _answers() -> Schema:
    token_ids = {"type": "array", "items": _INTEGER}
    usage = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
    error = _object(
        message=_STRING, type=_STRING, param={"type": ["string", "null"]}, code={"type": ["string", "null"]}
    )
    return {
        "Completion": _answer(_object(index=_INTEGER, text=_STRING, finish_reason=_STRING), usage),
        "ChatCompletion": _answer(_object(index=_INTEGER, message={"type": "object"}, finish_reason=_STRING), usage),
        "Tokens": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=token_ids),
        "Text": _object(prompt=_STRING),
        "Error": _object(error=error),
    }


def _answer(choice: Schema, usage: Schema) -> Schema:
    choices = {"type": "array", "items": choice, "minItems": 1}
    return _object(id=_STRING, object=_STRING, created=_INTEGER, model=_STRING, choices=choices, usage=usage)


def _object(**properties: Schema) -> Schema:
    """All of them are always there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def main() -> int:
    sys.stdout.buffer.write(text(version()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
