"""What the case book asks for and this server does not offer yet: listed with the reason, and refused by name today.

A case leaves this file when its feature comes. Where the book says "or ERR if not offered", the ERR is tested here.
"""

import json
import time
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Client
from tests.cases.crowd import bystanders
from tests.cases.processes import processes_of, resident_bytes, unharmed
from tests.timing import at_most_s

LATER = {
    "GRAM-1": "structured output is not offered; asking for it is an ERR (below)",
    "GRAM-2": "structured output by regular expression is not offered; ERR below, while other streams run",
    "GRAM-3": "structured_outputs is not offered in any form; ERR below",
    "GRAM-4": "json_schema is not offered; deep and huge ones are refused as fast as small ones (below)",
    "HTTP-4 (detokenising)": "no request can make the detokeniser raise; every byte sequence is in TEXT-3 and the unit tests",
    "FILES-3 (drafter vocabulary)": "no drafter has weights of its own; engine against frontend is in FILES-3",
    "LOSS-3 (fixed drafter)": "no drafter proposes fixed ids; answers drawn evenly from the prompt's letters do the same",
}


def test_every_case_that_waits_says_why() -> None:
    assert all(len(reason) > 20 for reason in LATER.values())


# ---- GRAM: refused by name ----

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMATS: list[Any] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    {"type": "json_schema"},
    {"type": "regex", "pattern": "a+"},
    {"type": "banana"},
    {"type": None},
    {},
    [],
    "json",
    5,
]
REGEXES = ["[", "(", "*a", "(?P<n", "a{99999999}", "(a+)+$", "\\\\", "(" * 100_000]
CONSTRAINTS: list[Any] = [
    {"json_object": False},
    {"json": ""},
    {"json": {}},
    {"choice": []},
    {"grammar": ""},
    {},
    {"json": {}, "regex": "a"},
    *[{"regex": regex} for regex in REGEXES],
]


def bodies(path: str, stream: bool, **extra: Any) -> dict[str, Any]:
    what: dict[str, Any] = (
        {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return {**what, "max_tokens": 2, "stream": stream, **extra}


def refused(client: Client, path: str, field: str, value: Any, stream: bool) -> None:
    started = time.monotonic()
    response = client.post(path, bodies(path, stream, **{field: value}))
    at_most_s(time.monotonic() - started, 2.0, "the refusal")
    client.assert_error(response, field)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_gram_1_a_response_format_is_refused_by_name(sim: Client, path: str, stream: bool) -> None:
    with unharmed(sim):
        for value in FORMATS:
            refused(sim, path, "response_format", value, stream)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_gram_2_and_3_constraints_of_any_content_are_refused_while_others_run(sim: Client, path: str) -> None:
    slow = {"sim": {"runs": [[582, 827]] * 100, "step_ms": 10}}
    with unharmed(sim), bystanders(sim, **slow) as watch:
        for value in CONSTRAINTS:
            refused(sim, path, "structured_outputs", value, stream=False)
        for regex in REGEXES:
            refused(sim, path, "guided_regex", regex, stream=True)
    assert watch.errors == []
    at_most_s(watch.longest_gap_s, 1.0, "the longest gap of a bystander")


def test_gram_1_the_format_that_asks_for_nothing_is_served(sim: Client) -> None:
    assert sim.post(CHAT, bodies(CHAT, False, response_format={"type": "text"})).status_code == 200
    assert sim.post(CHAT, bodies(CHAT, False, response_format=None)).status_code == 200


@pytest.mark.parametrize("depth", [200, 5_000, 50_000])
@pytest.mark.parametrize("kind", ["properties", "items"])
def test_gram_4_a_deep_schema_is_refused_at_once(sim: Client, depth: int, kind: str) -> None:
    opening = '{"properties":{"a":' if kind == "properties" else '{"items":'
    closing = "}}" if kind == "properties" else "}"
    schema = opening * depth + "{}" + closing * depth
    assert_schema_refused(sim, schema)


def test_gram_4_a_huge_pattern_is_refused_at_once(sim: Client) -> None:
    assert_schema_refused(sim, json.dumps({"type": "string", "pattern": "a" * 5_000_000}))


def assert_schema_refused(client: Client, schema: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],"response_format":{{"type":"json_schema","json_schema":{schema}}}}}'
    frontend = processes_of(client).frontends[0]
    before = resident_bytes(frontend)
    with unharmed(client):
        started = time.monotonic()
        response = client.post_raw(CHAT, body.encode())
        at_most_s(time.monotonic() - started, 2.0, "the refusal")
        client.assert_error(response, "response_format", "nested deeper than")
    assert resident_bytes(frontend) - before < 200_000_000
