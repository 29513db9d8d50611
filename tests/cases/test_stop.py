"""STOP: stop strings, stop tokens and EOS inside a run of tokens that one step commits.

Black box. The simulated engine scripts the run; the real model shows that REF and SPEC cut at the same place.
"""

import pytest

from tests.cases.client import CHAT, COMPLETIONS, LIST, Client, Streamed, speculation_delta, together, total

ONE, TWO, FOUR, FIVE, SIX, END, EOS = 582, 827, 1876, 2531, 2976, 36588, 2
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)


def check(answer: Streamed, *, text: str, ids: list[int], finish: str, stop_reason: object = None) -> None:
    """Every account of the answer agrees: text, ids, finish, usage, and log-probs where they were asked for."""
    assert answer.text[0] == text
    assert answer.token_ids[0] == ids
    assert (answer.finish[0], answer.stop_reason[0]) == (finish, stop_reason)
    assert answer.usage is not None and answer.usage["completion_tokens"] == len(ids)
    assert len(answer.entries[0]) in (0, len(ids))


# ---- A-STOP-1, vllm-project/vllm#47616 ----


@FORMS
@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (" END", " one two", 3),
        ("wo", " one t", 2),
        ("wo E", " one t", 3),
        (" one", "", 1),
        (" four five", " one two END", 5),
        ("five", " one two END four ", 5),
    ],
)
def test_stop_1_ids_and_logprobs_end_with_the_token_that_completes_the_stop(
    sim: Client, path: str, streamed: bool, stop: str, text: str, kept: int
) -> None:
    run = [ONE, TWO, END, FOUR, FIVE]
    asked = {"stop": [stop], "logprobs": 1, "max_tokens": 20, "return_token_ids": True}
    answer = sim.ask(path, streamed, sim={"runs": [run]}, **asked)
    check(answer, text=text, ids=run[:kept], finish="stop", stop_reason=stop)
    assert len(answer.entries[0]) == kept


@FORMS
def test_stop_1_the_stop_can_be_kept_in_the_text(sim: Client, path: str, streamed: bool) -> None:
    asked = {"stop": ["wo E"], "include_stop_str_in_output": True, "return_token_ids": True}
    answer = sim.ask(path, streamed, sim={"runs": [[ONE, TWO, END, FOUR, FIVE]]}, **asked)
    check(answer, text=" one two E", ids=[ONE, TWO, END], finish="stop", stop_reason="wo E")


@FORMS
def test_stop_1_of_two_stops_the_one_completed_first_wins(sim: Client, path: str, streamed: bool) -> None:
    asked = {"stop": [" four", "two END", "nothing"], "return_token_ids": True}
    answer = sim.ask(path, streamed, sim={"runs": [[ONE], [TWO, END, FOUR, FIVE]]}, **asked)
    check(answer, text=" one ", ids=[ONE, TWO, END], finish="stop", stop_reason="two END")


@FORMS
def test_stop_1_the_numbers_do_not_depend_on_how_steps_are_cut(sim: Client, path: str, streamed: bool) -> None:
    for runs in ([[ONE, TWO, END, FOUR]], [[ONE, TWO], [END, FOUR]], [[ONE], [TWO], [END], [FOUR]]):
        answer = sim.ask(path, streamed, sim={"runs": runs}, stop=["wo E"], logprobs=1, return_token_ids=True)
        check(answer, text=" one t", ids=[ONE, TWO, END], finish="stop", stop_reason="wo E")
        assert len(answer.entries[0]) == 3


def test_stop_1_on_the_real_model_speculation_cuts_where_one_token_per_step_does(
    embedded_ref: Client, embedded: Client
) -> None:
    whole = embedded_ref.ask(COMPLETIONS, False, LIST, temperature=0, max_tokens=40, logprobs=1, return_token_ids=True)
    text, ids = whole.text[0], whole.token_ids[0]
    shown = ["" if token == EOS else entry.token for token, entry in zip(ids, whole.entries[0])]
    ends = [len("".join(shown[: i + 1])) for i in range(len(ids))]
    assert ends[-1] == len(text)
    stops = [text[start : start + 6] for start in range(1, len(text) - 6, 23)]
    stops += [text[start : start + 23] for start in range(2, len(text) - 23, 47)]
    inside = [s for s in stops if text.find(s) not in ends and text.find(s) + len(s) not in ends]
    assert len(inside) >= 4, "no stop starts and ends inside tokens: the text changed, cut it elsewhere"
    before = embedded.metrics()
    calls = [(stop, streamed) for stop in dict.fromkeys(inside) for streamed in (False, True)]
    asked = {"temperature": 0, "max_tokens": 40, "logprobs": 1, "return_token_ids": True}
    answers = together(
        lambda s=stop, f=form: embedded.ask(COMPLETIONS, f, LIST, stop=[s], **asked) for stop, form in calls
    )
    for (stop, _), answer in zip(calls, answers):
        start = text.find(stop)
        kept = next(i for i, end in enumerate(ends, start=1) if end >= start + len(stop))
        check(answer, text=text[:start], ids=ids[:kept], finish="stop", stop_reason=stop)
        assert len(answer.entries[0]) == kept
    after = embedded.metrics()
    moved = speculation_delta(before, after, 5)
    assert moved.drafts > 0 and moved.accepted > 0
    trimmed = total(after, "drafthouse:stop_trimmed_tokens_total") - total(
        before, "drafthouse:stop_trimmed_tokens_total"
    )
    assert moved.generation - trimmed == sum(len(answer.token_ids[0]) for answer in answers)


# ---- A-STOP-2, sgl-project/sglang#23802 ----


@FORMS
def test_stop_2_a_stop_at_any_index_of_a_long_run_is_seen(setup, path: str, streamed: bool) -> None:
    sim15 = setup("sim15")
    runs = [[ONE] * index + [END] + [ONE] * (15 - index) for index in range(16)]
    asked = {"stop": [" END"], "max_tokens": 64, "return_token_ids": True}
    answers = together(lambda r=run: sim15.ask(path, streamed, sim={"runs": [r, [TWO, TWO]]}, **asked) for run in runs)
    for index, answer in enumerate(answers):
        check(answer, text=" one" * index, ids=[ONE] * index + [END], finish="stop", stop_reason=" END")


@FORMS
def test_stop_2_a_stop_that_crosses_into_a_long_run_is_seen(setup, path: str, streamed: bool) -> None:
    runs = [[ONE, TWO], [END] + [ONE] * 15]
    answer = setup("sim15").ask(path, streamed, sim={"runs": runs}, stop=["o END on"], return_token_ids=True)
    check(answer, text=" one tw", ids=[ONE, TWO, END, ONE], finish="stop", stop_reason="o END on")


# ---- A-STOP-3, huggingface/transformers#47912 ----


@FORMS
@pytest.mark.parametrize("position", range(6))
def test_stop_3_an_eos_at_any_place_of_a_run_ends_the_request(
    sim: Client, path: str, streamed: bool, position: int
) -> None:
    run = [EOS if index == position else ONE for index in range(6)]
    asked = {"max_tokens": 64, "return_token_ids": True}
    single = sim.ask(path, streamed, sim={"runs": [[token] for token in run]}, **asked)
    before = sim.metrics()
    answer = sim.ask(path, streamed, sim={"runs": [run, [TWO, TWO], [TWO]]}, **asked)
    rounds = total(sim.metrics(), "drafthouse:verify_rounds_total") - total(before, "drafthouse:verify_rounds_total")
    check(answer, text=" one" * position, ids=run[: position + 1], finish="stop")
    assert answer.usage == single.usage
    assert (answer.text, answer.token_ids) == (single.text, single.token_ids)
    assert rounds == 1


def test_stop_3_ignore_eos_runs_through_it(sim: Client) -> None:
    answer = sim.ask(
        COMPLETIONS, False, sim={"runs": [[ONE, EOS, ONE, TWO]]}, ignore_eos=True, max_tokens=4, return_token_ids=True
    )
    check(answer, text=" one one two", ids=[ONE, EOS, ONE, TWO], finish="length")


# ---- A-STOP-4, ggml-org/llama.cpp#15007 ----


@FORMS
@pytest.mark.parametrize(
    ("runs", "max_tokens", "finish", "num_ids"),
    [
        ([[FIVE, SIX], [EOS]], 20, "stop", 3),
        ([[FIVE, SIX, EOS]], 20, "stop", 3),
        ([[FIVE], [SIX]], 20, "stop", 2),
        ([[FIVE, SIX]], 2, "length", 2),
        ([[FIVE], [SIX, ONE, ONE]], 2, "length", 2),
    ],
)
def test_stop_4_text_held_back_as_a_possible_stop_is_not_lost(
    sim: Client, path: str, streamed: bool, runs: list[list[int]], max_tokens: int, finish: str, num_ids: int
) -> None:
    asked = {"stop": ["six\nQQQQQQ"], "max_tokens": max_tokens, "return_token_ids": True}
    answer = sim.ask(path, streamed, sim={"runs": runs}, **asked)
    check(answer, text=" five six", ids=[FIVE, SIX, EOS][:num_ids], finish=finish)


@FORMS
def test_stop_4_text_held_back_is_sent_once_it_cannot_be_a_stop(sim: Client, path: str, streamed: bool) -> None:
    runs = [[FIVE, SIX], [198, ONE], [FIVE]]
    answer = sim.ask(path, streamed, sim={"runs": runs}, stop=["six\nQQQQQQ"], return_token_ids=True)
    check(answer, text=" five six\n one five", ids=[FIVE, SIX, 198, ONE, FIVE], finish="stop")


# ---- A-STOP-5, ai-dynamo/dynamo#14317 ----


@FORMS
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, " one"),
        ({"include_stop_str_in_output": True}, " one END"),
        ({"max_tokens": 2}, " one"),
        ({"max_tokens": 2, "include_stop_str_in_output": True}, " one END"),
        ({"stop": ["zzz"]}, " one"),
    ],
)
def test_stop_5_a_stop_token_is_among_the_ids_and_only_hidden_from_the_text(
    sim: Client, path: str, streamed: bool, options: dict[str, object], text: str
) -> None:
    asked = {"stop_token_ids": [END], "logprobs": 1, "return_token_ids": True, **options}
    for runs in ([[ONE, END, TWO]], [[ONE], [END], [TWO]]):
        answer = sim.ask(path, streamed, sim={"runs": runs}, **asked)
        check(answer, text=text, ids=[ONE, END], finish="stop", stop_reason=END)
        assert len(answer.entries[0]) == 2


# ---- A-STOP-6, sgl-project/sglang#38712 ----


@FORMS
@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["x", ""], [None], [5], 5, {"a": "b"}, [["x"]]])
def test_stop_6_a_stop_that_is_no_string_or_empty_is_refused(
    sim: Client, path: str, streamed: bool, stop: object
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    error = sim.assert_error(sim.post(path, {**prompt, "stop": stop, "stream": streamed, "max_tokens": 4}), "stop")
    assert error["param"].startswith("stop")
    assert sim.get("/health").status_code == 200


@FORMS
@pytest.mark.parametrize("stop", [[], None])
def test_stop_6_no_stop_at_all_is_a_normal_request(sim: Client, path: str, streamed: bool, stop: object) -> None:
    answer = sim.ask(path, streamed, sim={"runs": [[ONE, TWO]]}, stop=stop, return_token_ids=True)
    check(answer, text=" one two", ids=[ONE, TWO], finish="stop")
