"""VALID: requests that must be refused, not executed; each with the field named and nothing of our insides shown."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.cases.client import CHAT, COMPLETIONS, Client, strict_json
from tests.cases.crowd import bystanders
from tests.cases.processes import processes_of, resident_bytes, unharmed
from tests.timing import at_most_s

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
PROMPT = '"prompt":"hi"'
FORMS = [(COMPLETIONS, False), (COMPLETIONS, True), (CHAT, False), (CHAT, True)]


@pytest.fixture(autouse=True, scope="module")
def still_alive(sim_alive: None) -> None:
    """LIVE around the whole file: no refused request may harm the server for the others."""


@pytest.fixture(scope="module")
def sim_alive(setup: Any) -> Iterator[None]:
    with unharmed(setup("sim")):
        yield


def refused(client: Client, path: str, body: bytes | str, *names: str, status: int = 400) -> str:
    """ERR within 2 s; returns the message."""
    raw = body.encode() if isinstance(body, str) else body
    started = time.monotonic()
    response = client.post_raw(path, raw)
    at_most_s(time.monotonic() - started, 2.0, "the answer")
    return str(client.assert_error(response, *names, status=status)["message"])


# ---- VALID-1: sgl-project/sglang#28153 ----

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
OUT_OF_RANGE = {
    "temperature": ["-0.1", "-1e-9", "101", "1e300"],
    "top_p": ["0", "-0.1", "1.01", "1e300"],
    "min_p": ["-0.1", "1.01", "1e300"],
    "presence_penalty": ["-2.01", "2.01", "1e300"],
    "frequency_penalty": ["-2.01", "2.01", "1e300"],
    "repetition_penalty": ["0", "-1", "1e300"],
}


def raw_body(path: str, stream: bool, field: str, value: str) -> str:
    what = PROMPT if path == COMPLETIONS else MESSAGES
    return f'{{{what},"max_tokens":2,"stream":{"true" if stream else "false"},"{field}":{value}}}'


@pytest.mark.parametrize(("path", "stream"), FORMS)
@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "nan", "+1"])
def test_valid_1_a_number_that_is_none_is_refused(sim: Client, path: str, stream: bool, field: str, value: str) -> None:
    refused(sim, path, raw_body(path, stream, field, value), field)


@pytest.mark.parametrize(("path", "stream"), FORMS)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field in FLOATS for value in OUT_OF_RANGE[field]])
def test_valid_1_a_number_outside_its_range_is_refused_and_named(
    sim: Client, path: str, stream: bool, field: str, value: str
) -> None:
    refused(sim, path, raw_body(path, stream, field, value), field)


@pytest.mark.parametrize(("path", "stream"), FORMS)
@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", ['"1"', "[]", "{}", "true", '"NaN"', "[1]"])
def test_valid_1_a_float_of_another_type_is_refused_and_named(
    sim: Client, path: str, stream: bool, field: str, value: str
) -> None:
    refused(sim, path, raw_body(path, stream, field, value), field)


WRONG_VALUES: list[tuple[str, str]] = [
    *[("max_tokens", value) for value in ("0", "-1", "1.5", '"5"', "99999999", "true", "1" + "0" * 30)],
    *[("n", value) for value in ("0", "-1", "1.5", '"2"', "100000", "true")],
    *[("seed", value) for value in ("1.5", '"x"', str(2**63), str(-(2**63) - 1), "1e30", "true")],
    *[("top_k", value) for value in ("-2", "1.5", '"5"', "1e10", str(2**40))],
    *[("min_tokens", value) for value in ("-1", "3", "1.5", '"5"')],
    *[("stop_token_ids", value) for value in ("[-1]", "[49152]", '["a"]', "5", "[1.5]", "[null]")],
    *[("bad_words", value) for value in ('[""]', "[5]", "5", '"x"')],
    *[("allowed_token_ids", value) for value in ("[]", "[-1]", "[49152]", '["a"]', "5")],
    *[("ignore_eos", value) for value in ("1", '"true"', "[]")],
    *[("stream", value) for value in ("1", '"true"', "[]")],
    *[("stop", value) for value in ('""', '["","x"]', "[null]", "[5]", "5", "{}", "true")],
    *[("priority", value) for value in ('"high"', "1.5", str(2**40))],
    *[("return_token_ids", value) for value in ("1", '"yes"')],
    *[("model", value) for value in ("5", "[]", "{}")],
    *[("stream_options", value) for value in ("5", '{"include_usage":5}', "[]")],
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
def test_valid_1_every_field_refuses_wrong_values_by_name(sim: Client, path: str, field: str, value: str) -> None:
    what = PROMPT if path == COMPLETIONS else MESSAGES
    limit = "" if field in ("max_tokens", "stream") else '"max_tokens":2,"stream":true,'
    refused(sim, path, f'{{{what},{limit}"{field}":{value}}}', field)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *[(COMPLETIONS, "logprobs", value) for value in ("-1", "21", "true", '"5"', "1.5", "1000000")],
        *[(CHAT, "logprobs", value) for value in ("5", '"true"', "[]")],
        *[(CHAT, "top_logprobs", value) for value in ("-1", "21", '"5"', "1.5", "5")],
        *[(COMPLETIONS, "prompt_logprobs", value) for value in ("-1", "21", '"5"', "true")],
        *[(COMPLETIONS, "echo", value) for value in ("1", '"x"')],
        *[(COMPLETIONS, "best_of", value) for value in ("2", '"x"')],
        *[(CHAT, "max_completion_tokens", value) for value in ("0", "-1", "1.5", '"5"')],
    ],
)
def test_valid_1_fields_of_one_endpoint_refuse_wrong_values_by_name(
    sim: Client, path: str, field: str, value: str
) -> None:
    what = PROMPT if path == COMPLETIONS else MESSAGES
    refused(sim, path, f'{{{what},"{field}":{value}}}', field)


# ---- VALID-2: vllm-project/vllm#51795 ----

BAD_PROMPTS = [
    "[-1]",
    "[[-1]]",
    "[582,-49152]",
    "[true]",
    "[1.5]",
    "[null]",
    '["a",5]',
    "[49152]",
    "[[582],[49152]]",
    '[5,"a"]',
    "[[582],5]",
    '[["a"]]',
    "[[[582]]]",
    "5",
    "true",
    "{}",
    f"[{2**63}]",
    f"[{-(2**70)}]",
    "[1e30]",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_valid_2_a_prompt_that_is_no_prompt_is_refused_and_named(sim: Client, prompt: str, stream: bool) -> None:
    flag = "true" if stream else "false"
    refused(sim, COMPLETIONS, f'{{"prompt":{prompt},"max_tokens":1,"stream":{flag}}}', "prompt")


def test_valid_2_the_ends_of_the_vocabulary_are_prompts(sim: Client) -> None:
    for token in (0, 16, 49151):
        assert sim.complete(prompt=[token], max_tokens=1)["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("body", ['{"tokens":[-1]}', '{"tokens":[49152]}', '{"tokens":"x"}', '{"tokens":[1.5]}'])
def test_valid_2_detokenize_refuses_ids_outside_the_vocabulary(sim: Client, body: str) -> None:
    refused(sim, "/detokenize", body, "tokens")


# ---- VALID-3: vllm-project/vllm#16529 ----

BAD_BIASES = [
    '{"49152":1}',
    '{"-1":1}',
    '{"abc":1}',
    '{"1.5":1}',
    '{"5":1e9}',
    '{"5":"x"}',
    '{"5":null}',
    "[]",
    '{"5":100.5}',
    '{"5":-100.5}',
    '{"":1}',
    '{" 5":1}',
    '{"5 ":1}',
    '{"+5":1}',
    '{"05":1}',
    '{"1e2":1}',
    '{"5":true}',
    '{"5":[1]}',
    '{"99999999999999999999":1}',
    '"x"',
    "5",
]


@pytest.mark.parametrize(("path", "stream"), FORMS)
@pytest.mark.parametrize("bias", BAD_BIASES)
def test_valid_3_a_bias_outside_vocabulary_or_range_is_refused_and_named(
    sim: Client, path: str, stream: bool, bias: str
) -> None:
    refused(sim, path, raw_body(path, stream, "logit_bias", bias), "logit_bias")


@pytest.mark.parametrize("bias", ['{"49151":100}', '{"0":-100}', "{}", "null"])
def test_valid_3_a_bias_at_its_limits_is_served(sim: Client, bias: str) -> None:
    response = sim.post_raw(COMPLETIONS, raw_body(COMPLETIONS, False, "logit_bias", bias).encode())
    assert response.status_code == 200, response.text


# ---- VALID-4: vllm-project/vllm#55164 ----

LONG_LISTS: list[tuple[str, Any]] = [
    ("allowed_token_ids", list(range(17, 2017))),
    ("allowed_token_ids", list(range(49152))),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("logit_bias", {str(token): 1 for token in range(49152)}),
    ("stop_token_ids", list(range(17, 146))),
    ("stop_token_ids", list(range(17, 10017))),
    ("stop", [f"stop {index}" for index in range(5000)]),
    ("bad_words", [f"word {index}" for index in range(5000)]),
]


def asked_at_best(client: Client, body: dict[str, Any]) -> tuple[requests.Response, float]:
    """The answer and how long it took; asked again when slow: a refusal takes milliseconds, a busy machine seconds."""
    took_s = math.inf
    for _ in range(3):
        started = time.monotonic()
        response = client.post(COMPLETIONS, body)
        took_s = min(took_s, time.monotonic() - started)
        if took_s < 2.0:
            break
    return response, took_s


def test_valid_4_long_lists_work_or_are_refused_with_the_limit_and_stall_nobody(spec: Client) -> None:
    with unharmed(spec), bystanders(spec, num_streams=1, temperature=0) as watch:
        for field, value in LONG_LISTS:
            body = {"prompt": "The sky is", "max_tokens": 2, "temperature": 0, field: value}
            response, took_s = asked_at_best(spec, body)
            if response.status_code != 200:
                message = spec.assert_error(response, field)["message"]
                assert any(character.isdigit() for character in message.replace(str(len(value)), "")), message
                at_most_s(took_s, 2.0, "the answer")
    assert watch.errors == []
    at_most_s(watch.longest_gap_s, 1.0, "the longest gap of a bystander")
    at_most_s(watch.longest_health_s, 1.0, "the slowest /health")


def test_valid_4_a_long_list_that_is_served_is_obeyed_in_full(spec: Client) -> None:
    """The first ids alone would be another answer: the list may not be cut at a buffer's length."""
    allowed = [*range(17, 2016), 30000]
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    got = spec.complete(**body, allowed_token_ids=allowed, logit_bias={"30000": 100})
    assert got["choices"][0]["token_ids"] == [30000] * 3


# ---- VALID-5: ggml-org/llama.cpp#6396 ----

BAD_BODIES: dict[str, bytes] = {
    "gbk": '{"prompt":"你好世界","max_tokens":1}'.encode("gbk"),
    "utf16_with_bom": '{"prompt":"hi","max_tokens":1}'.encode("utf-16"),
    "utf32": '{"prompt":"hi","max_tokens":1}'.encode("utf-32"),
    "latin1": '{"prompt":"caf\u00e9","max_tokens":1}'.encode("latin-1"),
    "byte_ff_in_string": b'{"prompt":"a\xffb","max_tokens":1}',
    "byte_ff_in_key": b'{"prompt":"ab","a\xff":1}',
    "cut_utf8": '{"prompt":"世'.encode()[:-1] + b'","max_tokens":1}',
    "overlong_utf8": b'{"prompt":"\xc0\xaf"}',
    "surrogate_in_utf8": b'{"prompt":"\xed\xa0\x80"}',
    "lone_surrogate_escape": b'{"prompt":"\\ud800"}',
    "empty": b"",
    "blanks": b"  \n",
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "number": b"5",
    "cut": b'{"prompt":',
    "duplicate_keys": b'{"prompt":"a","prompt":"b"}',
    "duplicate_nested_keys": b'{"prompt":"a","stream_options":{"include_usage":true,"include_usage":false}}',
    "single_quotes": b"{'prompt':'a'}",
    "trailing_comma": b'{"prompt":"a",}',
    "two_documents": b'{"prompt":"a"}{"prompt":"b"}',
    "nul": b'{"prompt":"a"}\x00',
    "control_character": b'{"prompt":"a\x01b"}',
    "bad_escape": b'{"prompt":"\\x41"}',
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
@pytest.mark.parametrize("name", list(BAD_BODIES))
def test_valid_5_a_body_that_is_no_json_object_in_utf_8_is_refused(sim: Client, name: str, path: str) -> None:
    body = BAD_BODIES[name]
    if path == CHAT:
        body = body.replace(b'"prompt":"', b'"messages":[{"role":"user","content":"hi"}],"user":"')
    response = sim.post_raw(path, body)
    response.content.decode("utf-8")
    sim.assert_error(response)


def test_valid_5_a_bom_before_utf_8_is_accepted(sim: Client) -> None:
    response = sim.post_raw(COMPLETIONS, b"\xef\xbb\xbf" + b'{"prompt":"hi","max_tokens":1}')
    assert response.status_code == 200
    assert strict_json(response.content)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("charset", ["utf-8", "gbk", "nonsense"])
def test_valid_5_a_charset_in_the_content_type_changes_nothing(sim: Client, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    response = sim.post_raw(COMPLETIONS, b'{"prompt":"hi","max_tokens":1}', headers=headers)
    assert response.status_code in (200, 400, 415), response.text
    if response.status_code != 200:
        sim.assert_error(response, status=response.status_code)


# ---- VALID-6: triton-inference-server/server#8172 ----

DEEP_BODIES: dict[str, bytes] = {
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "closed_brackets": b"[" * 100_000 + b"]" * 100_000,
    "nested_prompt": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unknown_field_10000_deep": b'{"prompt":"hi","max_tokens":1,"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "long_number": b'{"prompt":"hi","max_tokens":' + b"1" * 100_000 + b"}",
    "long_fraction": b'{"prompt":"hi","max_tokens":1,"temperature":-0.' + b"1" * 100_000 + b"}",
    "long_exponent": b'{"prompt":"hi","max_tokens":1,"temperature":1e' + b"9" * 100_000 + b"}",
    "open_string": b'{"prompt":"' + b"\\\\" * 500_000,
    "many_quotes": b'{"prompt":"hi","max_tokens":1,' + b'"' * 1_000_001,
}


@pytest.mark.parametrize("name", list(DEEP_BODIES))
def test_valid_6_a_body_made_to_exhaust_the_parser_is_refused_at_once(sim: Client, name: str) -> None:
    refused(sim, COMPLETIONS, DEEP_BODIES[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("string", b'"' + b"a" * 10_000_000 + b'"'),
        ("number", b"1" * 100_000),
        ("keys", b'{"a":1,' * 20 + b'"b":1' + b"}" * 20),
    ],
)
def test_valid_6_a_huge_unknown_field_is_ignored_or_refused(sim: Client, name: str, value: bytes) -> None:
    started = time.monotonic()
    response = sim.post_raw(COMPLETIONS, b'{"prompt":"hi","max_tokens":1,"unknown_field":' + value + b"}")
    at_most_s(time.monotonic() - started, 2.0, "the answer")
    if response.status_code != 200:
        sim.assert_error(response, status=response.status_code)
        assert response.status_code in (400, 413)


def test_valid_6_memory_is_given_back(sim: Client) -> None:
    frontend = processes_of(sim).frontends[0]
    big = b'{"prompt":"hi","max_tokens":1,"unknown_field":"' + b"a" * 10_000_000 + b'"}'
    sim.post_raw(COMPLETIONS, big)
    before = resident_bytes(frontend)
    for _ in range(8):
        sim.post_raw(COMPLETIONS, big)
        for name in ("brackets", "objects", "open_string"):
            sim.post_raw(COMPLETIONS, DEEP_BODIES[name])
    assert resident_bytes(frontend) - before < 50_000_000


# ---- the whole kind: what is known but not offered, and what is not there ----

NOT_OFFERED = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= x",
    "structured_outputs": {"regex": "a"},
    "suffix": "tail",
    "logits_processors": ["x"],
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "use_beam_search": True,
    "truncate_prompt_tokens": 5,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", list(NOT_OFFERED))
def test_valid_what_is_not_offered_is_refused_by_name(sim: Client, field: str, path: str, stream: bool) -> None:
    what: dict[str, Any] = (
        {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    )
    refused(sim, path, json.dumps({**what, "stream": stream, field: NOT_OFFERED[field]}), field)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_valid_an_unknown_model_is_not_found(sim: Client, path: str) -> None:
    what: dict[str, Any] = (
        {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    )
    response = sim.post(path, {**what, "model": "no-such-model"})
    error = sim.assert_error(response, "no-such-model", status=404)
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v1/completions/x", "/v1/models/no-such-model"])
def test_valid_an_unknown_route_is_not_found(sim: Client, path: str) -> None:
    sim.assert_error(sim.get(path), status=404)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", COMPLETIONS), ("DELETE", CHAT), ("POST", "/health"), ("PUT", "/metrics")]
)
def test_valid_a_wrong_method_is_an_error_object(sim: Client, method: str, path: str) -> None:
    response = requests.request(method, sim.base_url + path, timeout=10)
    sim.assert_error(response, status=405)


def test_valid_a_script_is_only_for_a_simulated_engine(spec: Client) -> None:
    with unharmed(spec):
        refused(spec, COMPLETIONS, '{"prompt":"hi","sim":{"runs":[[582]]}}', "sim")


@pytest.mark.parametrize(
    "script",
    [
        "{}",
        '{"runs":[[582,582,582,582,582,582,582]]}',
        '{"runs":[[-1]]}',
        '{"runs":[[49152]]}',
        '{"runs":[[]]}',
        '{"runs":"x"}',
        '{"runs":[[582]],"drafted":[6]}',
        '{"runs":[[582,827]],"drafted":[0]}',
        '{"runs":[[582]],"drafted":[]}',
        '{"runs":[[582]],"fail_at":-1}',
        '{"runs":[[582]],"preempt_at":"x"}',
        '{"runs":[[582]],"step_ms":-1}',
        '{"runs":[[582]],"step_ms":NaN}',
        '{"runs":[[582]],"surprise":1}',
        "[]",
        '"x"',
    ],
)
def test_valid_a_script_that_cannot_be_played_is_refused(sim: Client, script: str) -> None:
    refused(sim, COMPLETIONS, f'{{"prompt":"hi","sim":{script}}}', "sim", "not valid JSON")
