"""CLIENT: what OpenAI clients really send, and HTTP-4: how a stream ends when something goes wrong in the middle of it."""

import os
import signal
import time
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, LIST, Client, Streamed, speculation_delta, together, total
from tests.cases.processes import processes_of
from tests.e2e.servers import serve
from tests.timing import at_most_s

WIDTH = 5
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)

# ---- A-CLIENT-1, LostRuins/koboldcpp#643 ----

SHARED_FIELDS = (
    "model", "stop", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logit_bias", "logprobs",
    "stream", "stream_options", "user", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs", "return_token_ids", "priority", "request_id", "response_format",
)  # fmt: skip
CHAT_FIELDS = (
    "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "functions",
    "function_call", "metadata", "store", "service_tier", "reasoning_effort", "modalities", "audio", "prediction",
    "web_search_options", "verbosity", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
)  # fmt: skip
COMPLETION_FIELDS = ("echo", "best_of", "suffix")
FIELDS = {CHAT: SHARED_FIELDS + CHAT_FIELDS, COMPLETIONS: SHARED_FIELDS + COMPLETION_FIELDS}
SCRIPT = {"runs": [[19556, 905], [582, 827]]}
SCRIPT_TEXT = "Hello world one two"


def base_of(path: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}


def answer_of(client: Client, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """What the client sees, without ids, times and what was cached."""
    response = client.post(path, body)
    assert response.status_code == 200, (body, response.text)
    choice = response.json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    usage = {name: count for name, count in response.json()["usage"].items() if name.endswith("_tokens")}
    return text, choice["finish_reason"], choice["logprobs"], usage, choice.get("token_ids")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_client_1_null_is_absent_for_every_field_alone_and_for_all_at_once(sim: Client, path: str) -> None:
    base = {**base_of(path), "sim": SCRIPT}
    wanted = answer_of(sim, path, base)
    assert wanted[0] == SCRIPT_TEXT
    for name in FIELDS[path]:
        assert answer_of(sim, path, {**base, name: None}) == wanted, name
    assert answer_of(sim, path, {**base, **dict.fromkeys(FIELDS[path])}) == wanted


# Fields that change what a model says; the others were tested above.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "n", "logprobs",
)  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_client_1_null_gives_the_real_models_default(spec: Client, path: str) -> None:
    """Greedy with each field null; the temperature itself under a seed, and the limit under nothing but its default."""
    greedy = {**base_of(path), "temperature": 0, "max_tokens": 4}
    sampled = {**base_of(path), "seed": 11, "max_tokens": 4}
    wanted, drawn = answer_of(spec, path, greedy), answer_of(spec, path, sampled)
    null = together(
        lambda n=name: answer_of(spec, path, {**(sampled if n == "temperature" else greedy), n: None})
        for name in SAMPLING_FIELDS
    )
    for name, got in zip(SAMPLING_FIELDS, null):
        assert got == (drawn if name == "temperature" else wanted), name
    limit = {"max_completion_tokens": 4} if path == CHAT else {}
    unlimited = {**base_of(path), "temperature": 0, **limit}
    assert answer_of(spec, path, {**unlimited, "max_tokens": None}) == answer_of(spec, path, unlimited)


@FORMS
def test_client_1_nulls_and_unknown_fields_do_not_disturb_a_stream(sim: Client, path: str, streamed: bool) -> None:
    extras = {"banana": 1, "x": None, "nested": {"a": [1, {"b": 2}]}, "guidance": "none"}
    nulls = dict.fromkeys(name for name in FIELDS[path] if name not in ("stream", "stream_options"))
    before = total(sim.metrics(), "drafthouse:unknown_fields_total")
    answer = sim.ask(path, streamed, "hi", sim=SCRIPT, **{**nulls, **extras})
    assert answer.text[0] == SCRIPT_TEXT
    assert total(sim.metrics(), "drafthouse:unknown_fields_total") - before == len(extras)


def test_client_1_null_inside_stream_options_is_absent(sim: Client) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    answer = sim.stream(COMPLETIONS, prompt="hi", sim=SCRIPT, stream_options=options)
    assert answer.text[0] == SCRIPT_TEXT
    assert answer.usage is None


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "alloy", "format": "wav"}),
        (CHAT, "prediction", {"type": "content", "content": "x"}),
        (CHAT, "functions", [{"name": "f"}]),
        (COMPLETIONS, "suffix", "the end"),
        (COMPLETIONS, "best_of", 3),
        (COMPLETIONS, "response_format", {"type": "json_object"}),
        (COMPLETIONS, "structured_outputs", {"regex": "a+"}),
        (COMPLETIONS, "guided_json", {"type": "object"}),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "truncate_prompt_tokens", 5),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_client_1_what_is_not_offered_is_refused_by_name(
    sim: Client, path: str, field: str, value: object, streamed: bool
) -> None:
    response = sim.post(path, {**base_of(path), "sim": SCRIPT, "stream": streamed, field: value})
    assert sim.assert_error(response, field)["param"] == field


# ---- A-CLIENT-2, vllm-project/vllm#9028 ----


def sent_after_each_chunk(answer: Streamed) -> list[tuple[int, int]]:
    """(tokens sent so far over all choices, completion_tokens the chunk claims), for chunks with choices."""
    sent, pairs = 0, []
    for chunk in answer.chunks:
        if not chunk["choices"]:
            continue
        sent += sum(len(choice.get("token_ids") or []) for choice in chunk["choices"])
        pairs.append((sent, chunk["usage"]["completion_tokens"]))
    return pairs


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_client_2_running_usage_is_what_was_sent_so_far(spec: Client, path: str, n: int) -> None:
    long_prompt = "The quick brown fox jumps over the lazy dog again. " * (100 if IS_LONG else 60)
    calls = [(LIST, 32), (long_prompt, 1), (long_prompt, 6)]
    asked = {"temperature": 0, "n": n, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    before = spec.metrics()
    for prompt, count in calls:
        whole = spec.ask(path, False, prompt, max_tokens=count, **asked)
        body = {**base_of(path), **({"prompt": prompt} if path == COMPLETIONS else {})}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        answer = spec.stream(path, **body, max_tokens=count, stream_options=options, **asked)
        assert whole.usage is not None and answer.usage is not None
        pairs = sent_after_each_chunk(answer)
        assert pairs and all(sent == claimed for sent, claimed in pairs)
        roles = sum("role" in choice.get("delta", {}) for chunk in answer.chunks for choice in chunk["choices"])
        assert sum(sent == 0 for sent, _ in pairs) <= min(roles, 1), "no chunk for a piece of prompt"
        assert count > 1 or len(pairs) <= n + roles
        for chunk in answer.chunks:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == whole.usage["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        last = answer.chunks[-1]
        assert last["choices"] == [] and sum(not chunk["choices"] for chunk in answer.chunks) == 1
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][name] for name in names] == [whole.usage[name] for name in names]
        assert answer.text == whole.text
    moved = speculation_delta(before, spec.metrics(), WIDTH)
    assert moved.drafts > 0 and (path == CHAT or moved.accepted > 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_client_2_usage_only_at_the_end_unless_asked_for_more(sim: Client, path: str) -> None:
    body = {**base_of(path), "sim": {"runs": [[582, 827], [1296]], "step_ms": 20}}
    answer = sim.stream(path, stream_options={"include_usage": True}, **body)
    assert all(chunk.get("usage") is None for chunk in answer.chunks[:-1])
    assert answer.chunks[-1]["choices"] == []
    assert answer.usage is not None and answer.usage["completion_tokens"] == 3
    for options in (None, {}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": False}):
        silent = sim.stream(path, stream_options=options, **body)
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in silent.chunks)
        assert silent.text == answer.text


def test_client_2_usage_jumps_by_the_run_length(sim: Client) -> None:
    runs = [[582, 827, 1296], [582], [582, 827, 1296, 1876, 2531, 2976]]
    answer = sim.stream(
        COMPLETIONS,
        prompt="x",
        sim={"runs": runs, "step_ms": 100},
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
    )
    assert [claimed for _, claimed in sent_after_each_chunk(answer)] == [3, 4, 10]


# ---- A-HTTP-4, waybarrios/vllm-mlx#302 (what a simulated engine can show; the rest is in test_http.py) ----

LONG_RUNS = [[582, 827]] * 8


def assert_ends_with_one_error(answer: Streamed) -> None:
    """The client saw an error event, then [DONE], and no finish beside it."""
    errors = [chunk["error"] for chunk in answer.chunks if "error" in chunk]
    assert len(errors) == 1 and "error" in answer.chunks[-1]
    assert set(errors[0]) >= {"message", "type", "param", "code"} and errors[0]["message"]
    assert "Traceback" not in errors[0]["message"] and ".py" not in errors[0]["message"]
    assert not answer.finish
    assert answer.done == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fail_at", [1, 3])
@pytest.mark.parametrize("options", [{}, {"stop": ["zzz"]}], ids=["plain", "awaiting a stop"])
def test_http_4_a_request_that_fails_in_mid_stream_ends_with_one_error_event(
    sim: Client, path: str, fail_at: int, options: dict[str, Any]
) -> None:
    normal = {"runs": LONG_RUNS, "step_ms": 10}
    failing = {**normal, "fail_at": fail_at}
    started = time.monotonic()
    answers = together(
        [
            lambda: sim.ask(path, True, sim=normal, max_tokens=64, **options),
            lambda: sim.ask(path, True, sim=failing, max_tokens=64, **options),
            lambda: sim.ask(path, True, sim=normal, max_tokens=64, **options),
        ]
    )
    at_most_s(time.monotonic() - started, 2.0, "three answers")
    for answer in (answers[0], answers[2]):
        assert (answer.text[0], answer.finish[0]) == (" one two" * 8, "stop")
        assert answer.error is None
    assert_ends_with_one_error(answers[1])
    assert answers[1].text.get(0, "") == " one two" * fail_at
    sim.assert_quiet()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_http_4_a_request_that_fails_before_any_byte_is_an_http_error(sim: Client, path: str) -> None:
    body = {**base_of(path), "sim": {"runs": LONG_RUNS, "fail_at": 3}}
    sim.assert_error(sim.post(path, body), status=500)
    sim.assert_quiet()


def test_http_4_a_failing_request_leaves_its_numbers_whole(sim: Client) -> None:
    before = sim.metrics()
    together(lambda: sim.ask(COMPLETIONS, True, sim={"runs": LONG_RUNS, "fail_at": 3}) for _ in range(8))
    after = sim.metrics()
    moved = speculation_delta(before, after, WIDTH)
    assert moved.generation == moved.accepted * 2 == moved.drafts * 2 == 8 * 6
    failed = 'finished_reason="error"'
    errors = [
        sum(v for s, v in page.items() if "request_success_total" in s and failed in s) for page in (before, after)
    ]
    assert errors[1] - errors[0] == 8


@FORMS
@pytest.mark.parametrize("n", [1, 3])
def test_http_4_every_normal_stream_has_one_terminal_event_per_choice(
    sim: Client, path: str, streamed: bool, n: int
) -> None:
    for script in ({"runs": []}, {"runs": [[2]]}, {"runs": [[582]]}, {"runs": LONG_RUNS}):
        answer = sim.ask(
            path, streamed, n=n, sim=script
        )  # the client refuses a choice after its finish, and a second [DONE]
        assert set(answer.finish) == set(range(n))
        assert set(answer.finish.values()) <= {"stop", "length"}
        assert answer.error is None


def test_http_4_an_engine_killed_in_mid_stream_ends_every_stream_with_one_error_event() -> None:
    with serve("--executor", "sim", "--num-draft-tokens", "5") as server:
        client = Client(server.base_url)
        engine = processes_of(client).engine
        slow = {"runs": [[582, 827]] * 200, "step_ms": 25}

        ends: list[float] = []

        def reader(path: str) -> Streamed:
            answer = client.ask(path, True, sim=slow, max_tokens=1000)
            ends.append(time.monotonic())
            return answer

        def killer() -> Streamed:
            time.sleep(0.6)  # the streams are real: nothing but time puts the kill in the middle of them
            os.kill(engine, signal.SIGKILL)
            return Streamed(done=1)

        started = time.monotonic()
        answers = together([*[lambda p=path: reader(p) for path in (COMPLETIONS, CHAT) * 2], killer])[:-1]
        for answer in answers:
            assert_ends_with_one_error(answer)
            assert len(answer.chunks) >= 3
        assert max(ends) - started < 0.6 + 2.0
