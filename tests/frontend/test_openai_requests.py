"""What the decoder takes, refuses and names."""

import json
import time

import pytest

from frontend.bodies import MAX_JSON_DEPTH
from frontend.chat import plain_messages, template_kwargs
from frontend.errors import ApiError
from frontend.openai import ACCEPTED_WITHOUT_EFFECT, UNSUPPORTED, ChatRequest, CompletionRequest, decode_request
from frontend.prompts import draft_of, job_of
from frontend.sampling_fields import ModelFacts, prompt_lists, resolve_max_tokens, sampling_params, sim_script
from tests.frontend.fakes_client import embedded_text, hello
from tests.timing import at_most_s

FACTS = ModelFacts(vocab_size=49152, max_model_len=128, defaults={})


def decode(body, kind=CompletionRequest):
    return decode_request(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)


def refusal(body, kind=CompletionRequest):
    with pytest.raises(ApiError) as caught:
        request, _ = decode(body, kind)
        if kind is CompletionRequest:
            prompt_lists(request.prompt)
        else:
            plain_messages(request)
        sampling_params(request, 10, FACTS, lambda words: ())
    assert caught.value.status == 400
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt":',
        b'{"prompt":"x"}}',
        b'{"prompt":"\xff"}',
        b'{"unknown":"\xff","prompt":"x"}',
        '{"prompt":"你"}'.encode("gbk"),
        '{"prompt":"x"}'.encode("utf-16"),
        b'{"prompt":"x","prompt":"y"}',
        b'{"prompt":"x","a":{"b":1,"b":2}}',
        b'{"prompt":"x","\\u0061":1,"a":2}',
        b'{"prompt":"x","\\ud800":1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":"x","a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}",
        b'"' + b'\\"' * 200_000,
    ],
)
def test_bodies_that_are_no_json_object_are_400_in_little_time(body):
    started = time.monotonic()
    refusal(body)
    at_most_s(time.monotonic() - started, 1.0, "the refusal")


def test_byte_order_mark_and_unknown_big_values_are_accepted():
    assert decode(b'\xef\xbb\xbf{"prompt":"x"}')[1] == 0
    assert decode(b'{"prompt":"x","zz":"' + b"y" * 1_000_000 + b'","yy":' + b"9" * 100_000 + b"}")[1] == 2
    assert decode(b'{"prompt":"x","zz":' + b"[" * (MAX_JSON_DEPTH - 1) + b"]" * (MAX_JSON_DEPTH - 1) + b"}")[1] == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-0.1", "101", '"1"', "true"])
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_temperature_outside_its_range_is_refused(value, kind):
    text = '"prompt":"x"' if kind is CompletionRequest else '"messages":[{"role":"user","content":"x"}]'
    error = refusal(f'{{{text},"temperature":{value}}}'.encode(), kind)
    if value[0] not in "NI" and value != "-Infinity":  # those are no JSON at all: there is no field to name
        assert "temperature" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"49152": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1.5": 1}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": None}), ("logit_bias", []), ("logit_bias", {"05": 1}), ("logit_bias", {"٣": 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("allowed_token_ids", []), ("allowed_token_ids", [49152]), ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(1025))), ("bad_words", [""]), ("bad_words", ["x"] * 5000),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5),
        ("top_k", -2), ("top_k", 2**40), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1),
        ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0), ("repetition_penalty", 1e-300),
        ("min_tokens", 11), ("min_tokens", -1), ("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21),
        ("stream_options", {"include_usage": True}),
        ("request_id", "a b"), ("request_id", ""),
    ],
)  # fmt: skip
def test_values_outside_their_limits_are_refused_by_name(field, value):
    assert field in refusal({"prompt": "x", field: value})["message"]


def test_as_many_bad_words_as_allowed_may_have_two_spellings_each():
    request, _ = decode({"prompt": "x", "bad_words": [f"w{number}" for number in range(1024)]})
    assert job_of(draft_of(request, 8), embedded_text(), hello()).prompts[0].sampling.bad_words
    request, _ = decode({"prompt": "x", "bad_words": ["zq" * 400]})
    with pytest.raises(ApiError, match="bad_words has a word of"):
        job_of(draft_of(request, 8), embedded_text(), hello())


@pytest.mark.parametrize(
    ("num_prompts", "n", "max_prompts", "is_taken"),
    [
        (2, 128, 256, True),
        (256, 1, 256, True),
        (1, 128, 8, True),
        (8, 16, 8, True),
        (3, 128, 256, False),
        (8, 17, 8, False),
    ],
)
def test_one_request_runs_no_more_sequences_than_prompts_are_allowed(num_prompts, n, max_prompts, is_taken):
    request, _ = decode({"prompt": ["x"] * num_prompts, "n": n})
    if is_taken:
        assert draft_of(request, max_prompts).num_sequences == num_prompts * n
    else:
        with pytest.raises(ApiError, match=f"{num_prompts * n} sequences, where the limit of one request is"):
            draft_of(request, max_prompts)


@pytest.mark.parametrize("prompt", [[True], [1.5], [None], ["a", 5], {}, 5, None, [[1, "a"]], [[[1]]]])
def test_prompts_of_the_wrong_shape_name_the_prompt(prompt):
    request, _ = decode({"prompt": prompt})
    with pytest.raises(ApiError) as caught:
        prompt_lists(request.prompt)
    assert caught.value.param == "prompt"
    assert "prompt" in caught.value.message


@pytest.mark.parametrize("prompt", [[-1], [[-1]], [582, -49152], [49152]])
def test_token_ids_outside_the_vocabulary_name_the_prompt(prompt):
    request, _ = decode({"prompt": prompt})
    with pytest.raises(ApiError, match="prompt has token id"):
        job_of(draft_of(request, 8), embedded_text(), hello())


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_every_unsupported_field_is_refused_by_name_and_null_is_fine(name):
    kind = ChatRequest if name in CompletionRequest.__struct_fields__ else CompletionRequest
    text = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ApiError) as caught:
        decode({**text, name: {"something": "asked"}}, kind)
    assert caught.value.param == name
    assert name in caught.value.message
    assert decode({**text, name: None}, kind)[1] == 0


def test_values_that_ask_for_nothing_are_accepted():
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "suffix": "",
        "modalities": ["text"],
        "use_beam_search": False,
    }
    assert decode({"prompt": "x", **nothing})[1] == 0


def test_fields_without_effect_are_no_unknown_fields():
    assert decode({"prompt": "x", **dict.fromkeys(ACCEPTED_WITHOUT_EFFECT, "x")})[1] == 0
    assert decode({"prompt": "x", "banana": 1, "apple": {"a": 1}})[1] == 2


def test_null_for_every_field_is_the_same_as_absence():
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"] + sorted(UNSUPPORTED)
    messages = [{"role": "user", "content": "x"}]
    request, unknown = decode({"messages": messages, **dict.fromkeys(names)}, ChatRequest)
    plain, _ = decode({"messages": messages}, ChatRequest)
    assert unknown == 0
    assert sampling_params(request, 10, FACTS, lambda words: ()) == sampling_params(plain, 10, FACTS, lambda words: ())


def test_model_defaults_apply_where_the_client_is_silent():
    facts = ModelFacts(49152, 128, {"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    params = sampling_params(decode({"prompt": "x", "top_k": -1})[0], 10, facts, lambda words: ())
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 0, 0.95)


def test_max_tokens_must_fit_the_context_and_defaults_stay_inside():
    def tokens(body, prompt, kind=CompletionRequest):
        return resolve_max_tokens(decode(body, kind)[0], prompt, 128)

    assert tokens({"prompt": "x"}, 10) == 16
    assert tokens({"prompt": "x"}, 125) == 3
    assert tokens({"messages": []}, 100, ChatRequest) == 28
    assert tokens({"messages": [], "max_tokens": 9, "max_completion_tokens": 5}, 100, ChatRequest) == 5
    for prompt, asked in ((128, None), (129, None), (120, 9), (138, 1)):
        with pytest.raises(ApiError) as caught:
            tokens({"prompt": "x", "max_tokens": asked}, prompt)
        assert caught.value.code == "context_length_exceeded"
        assert "128" in caught.value.message
        assert str(prompt) in caught.value.message
    with pytest.raises(ApiError, match="at least 1"):
        tokens({"prompt": "x", "max_tokens": 0}, 10)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"), (None, "messages"), ("hi", "messages"), (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"), ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "banana", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_bad_messages_are_refused_with_their_index(messages, where):
    error = refusal({"messages": messages}, ChatRequest)
    assert error["param"].startswith(where)
    assert where in error["message"]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_lists_of_text_parts_equal_their_joined_string_in_every_role(role):
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    listed, _ = decode({"messages": [{"role": role, "content": parts}]}, ChatRequest)
    plain, _ = decode({"messages": [{"role": role, "content": "Hello world"}]}, ChatRequest)
    assert plain_messages(listed) == plain_messages(plain)


@pytest.mark.parametrize("kwargs", [{"messages": "x"}, {"_a": 1}, {"a b": 1}, {"a": []}, {"a": "x" * 2000}])
def test_template_variables_are_few_plain_and_not_reserved(kwargs):
    request, _ = decode({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}, ChatRequest)
    with pytest.raises(ApiError, match="chat_template_kwargs"):
        template_kwargs(request)


@pytest.mark.parametrize(
    "sim",
    [
        {"runs": [[1] * 7]}, {"runs": [[]]}, {"runs": [[49152]]}, {"runs": [[-1]]}, {"runs": [[1, 2]], "drafted": [0]},
        {"runs": [[1]], "drafted": [1, 1]}, {"runs": [[1]], "drafted": [6]}, {"runs": [[1]], "fail_at": -1},
        {"runs": [[1]], "step_ms": 1e9},
    ],
)  # fmt: skip
def test_scripts_that_no_engine_could_play_are_refused(sim):
    request, _ = decode({"prompt": "x", "sim": sim})
    with pytest.raises(ApiError) as caught:
        sim_script(request, hello(max_draft_len=5))
    assert caught.value.param == "sim"


def test_scripts_are_refused_by_engines_with_a_model():
    request, _ = decode({"prompt": "x", "sim": {"runs": [[1]]}})
    assert sim_script(request, hello()) is not None
    with pytest.raises(ApiError, match="simulated"):
        sim_script(request, hello(executor="model"))
