"""TEXT: streamed text when a step carries several tokens, halves of characters, or bytes that are no text."""

import random
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Client, Streamed, together

WORDS = {
    1137: " said",
    28: ",",
    476: ' "',
    10407: "yes",
    1002: '",',
    582: " one",
    1270: '."',
    827: " two",
    18: '"',
    198: "\n",
}
QUOTED = [1137, 28, 476, 10407, 1002, 582, 1270, 827, 18, 10407, 18, 198]
PARTY = [10813, 232, 227]
FAMILY = [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]
PARTY_TEXT, FAMILY_TEXT = "🎉", "👨‍👩‍👧"
SEED = 20260
NUM_SPLITS = 64
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)


def pieces(answer: Streamed) -> list[tuple[str, list[int]]]:
    """(text, token ids) of every chunk with a choice; none is empty but a role's or a finish's."""
    result = []
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            text = choice["text"] if "text" in choice else delta.get("content") or ""
            assert text or choice["finish_reason"] or "role" in delta, chunk
            text.encode("utf-8")  # raises on half a surrogate pair
            result.append((text, choice.get("token_ids") or []))
    return result


def random_runs(ids: list[int], chooser: random.Random, longest: int = 6) -> list[list[int]]:
    runs, rest = [], list(ids)
    while rest:
        width = chooser.randint(1, min(longest, len(rest)))
        runs.append(rest[:width])
        rest = rest[width:]
    return runs


def fixed_runs(ids: list[int], width: int) -> list[list[int]]:
    return [ids[start : start + width] for start in range(0, len(ids), width)]


# ---- A-TEXT-1, vllm-project/vllm#52469 ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [{}, {"stop": ["zzz"]}, {"logprobs": 1}], ids=["plain", "holding", "logprobs"])
def test_text_1_words_next_to_quotes_arrive_whatever_the_steps_are(
    sim: Client, path: str, options: dict[str, Any]
) -> None:
    text = "".join(WORDS[token] for token in QUOTED)
    chooser = random.Random(SEED)
    print(f"seed={SEED}")
    splits = [random_runs(QUOTED, chooser) for _ in range(NUM_SPLITS)]
    asked = {"max_tokens": 64, "return_token_ids": True, **options}
    answers = together(lambda runs=runs: sim.ask(path, True, sim={"runs": runs}, **asked) for runs in splits)
    answers.append(sim.ask(path, False, sim={"runs": splits[0]}, **asked))
    for answer in answers:
        assert (answer.text[0], answer.token_ids[0]) == (text, QUOTED)
        assert answer.usage is not None and answer.usage["completion_tokens"] == len(QUOTED)
        assert len(answer.entries[0]) == (len(QUOTED) if "logprobs" in options else 0)
    for runs, answer in zip(splits, answers):
        assert_sent_in_its_step(runs, answer)


def assert_sent_in_its_step(runs: list[list[int]], answer: Streamed) -> None:
    """Chunks end where steps end (a slow reader may get several at once), and each holds exactly its tokens' text."""
    borders = {sum(len(run) for run in runs[: i + 1]) for i in range(len(runs))} | {0}
    sent = 0
    for text, ids in pieces(answer):
        sent += len(ids)
        assert sent in borders
        assert text == "".join(WORDS[token] for token in ids)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_1_a_step_is_sent_before_the_next_one_ends(sim: Client, path: str) -> None:
    runs = fixed_runs(QUOTED, 2)
    answer = sim.ask(path, True, sim={"runs": runs, "step_ms": 100})
    texts = [text for text, _ in pieces(answer) if text]
    assert texts == ["".join(WORDS[token] for token in run) for run in runs]


# ---- A-TEXT-2, tenstorrent/tt-inference-server#2594 ----


@FORMS
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (PARTY, PARTY_TEXT),
        (FAMILY, FAMILY_TEXT),
        (PARTY + FAMILY, PARTY_TEXT + FAMILY_TEXT),
        ([7906, 240, 178, 239, 230, 143, 233, 10813, 230, 131, 15107, 232, 227], "世界ď🌶 🎉"),
    ],
    ids=["party", "family", "both", "scripts"],
)
def test_text_2_characters_of_several_tokens_arrive_whole(
    sim: Client, path: str, streamed: bool, width: int, ids: list[int], text: str
) -> None:
    runs = fixed_runs(ids, width)
    for options in ({}, {"logprobs": 2}, {"stop": ["zzz"]}):
        answer = sim.ask(path, streamed, sim={"runs": runs}, max_tokens=40, return_token_ids=True, **options)
        assert answer.text[0] == text
        assert answer.token_ids[0] == ids
        assert answer.usage is not None and answer.usage["completion_tokens"] == len(ids)
        if streamed:
            assert all("�" not in piece for piece, _ in pieces(answer))


@FORMS
def test_text_2_a_stop_of_several_token_characters_is_found(sim: Client, path: str, streamed: bool) -> None:
    ids = [582, *PARTY, 827]
    for width in (1, 2, 5):
        asked = {"stop": [PARTY_TEXT], "return_token_ids": True}
        answer = sim.ask(path, streamed, sim={"runs": fixed_runs(ids, width)}, **asked)
        assert (answer.text[0], answer.token_ids[0]) == (" one", ids[:4])
        assert (answer.finish[0], answer.stop_reason[0]) == ("stop", PARTY_TEXT)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_2_logprob_bytes_of_a_split_character_join_to_it(sim: Client, path: str) -> None:
    """OpenAI: `bytes` exists so that clients can join tokens that hold parts of one character (chat only)."""
    answer = sim.ask(path, False, sim={"runs": fixed_runs(PARTY, 2)}, logprobs=1)
    choice = answer.chunks[0]["choices"][0]
    if path == CHAT:
        entries = choice["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == PARTY_TEXT
    else:
        assert len(choice["logprobs"]["text_offset"]) == len(PARTY)


# ---- A-TEXT-3, vllm-project/vllm#17448 ----

ODD_RUNS = [[218, 218, 233], [10813, 582], [143, 582, 233]]
ODD_TEXT = (b"\x80\x80\x8f" + b"\xf0\x9f one" + b"\xc4 one\x8f").decode("utf-8", errors="replace")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_3_invalid_bytes_end_normally_and_leave_other_streams_alone(sim: Client, path: str) -> None:
    probe = sim.ask(COMPLETIONS, False, sim={"runs": [QUOTED[:4]]}).text[0]
    normal = {"runs": fixed_runs(QUOTED, 1), "step_ms": 5}
    odd = {"runs": ODD_RUNS, "step_ms": 5}
    calls = [lambda: sim.ask(path, True, sim=normal, return_token_ids=True)] * 3
    calls += [lambda s=streamed: sim.ask(path, s, sim=odd, return_token_ids=True) for streamed in (True, False)] * 3
    answers = together(calls, width=len(calls))
    for answer in answers[:3]:
        assert answer.text[0] == "".join(WORDS[token] for token in QUOTED)
        assert answer.finish[0] == "stop"
    for answer in answers[3:]:
        assert answer.text[0] == ODD_TEXT
        assert answer.finish[0] == "stop"
        assert answer.token_ids[0] == [token for run in ODD_RUNS for token in run]
    assert sim.get("/health").status_code == 200
    assert sim.ask(COMPLETIONS, False, sim={"runs": [QUOTED[:4]]}).text[0] == probe


@FORMS
def test_text_3_any_bytes_at_all_are_decoded_with_replacement_in_any_split(
    sim: Client, path: str, streamed: bool
) -> None:
    chooser = random.Random(SEED)
    print(f"seed={SEED}")
    table = {10813: b"\xf0\x9f", 232: b"\x8e", 227: b"\x89", 242: b"\x98", 218: b"\x80", 321: b"\xe2\x80", 178: b"\xe7",
             143: b"\xc4", 7906: b"\xe4\xb8", 582: b" one", 233: b"\x8f"}  # fmt: skip
    scripts = [[chooser.choice(list(table)) for _ in range(chooser.randint(1, 14))] for _ in range(40)]
    splits = [random_runs(ids, chooser) for ids in scripts]
    answers = together(lambda runs=runs: sim.ask(path, streamed, sim={"runs": runs}, max_tokens=64) for runs in splits)
    for ids, answer in zip(scripts, answers):
        assert answer.text[0] == b"".join(table[token] for token in ids).decode("utf-8", errors="replace"), ids


# ---- A-TEXT-4, ggml-org/llama.cpp#14937 ----


@FORMS
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stop": ["zzz"]}, {"logprobs": 1}], ids=["plain", "holding", "logprobs"])
def test_text_4_a_character_cut_by_max_tokens_becomes_one_replacement(
    sim: Client, path: str, streamed: bool, width: int, max_tokens: int, options: dict[str, Any]
) -> None:
    asked = {"max_tokens": max_tokens, "return_token_ids": True, **options}
    answer = sim.ask(path, streamed, sim={"runs": fixed_runs(PARTY, width)}, **asked)
    assert answer.text[0] == "�"
    assert answer.finish[0] == "length"
    assert answer.token_ids[0] == PARTY[:max_tokens]
    assert answer.usage is not None and answer.usage["completion_tokens"] == max_tokens


@FORMS
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("ids", "options", "reason"),
    [
        ([10813, 232, 582, 827], {"stop": [" one"]}, " one"),
        ([10813, 232, 36588, 827], {"stop_token_ids": [36588]}, 36588),
        ([10813, 232, 2, 827], {}, None),
    ],
    ids=["stop string", "stop token", "EOS"],
)
def test_text_4_a_character_cut_by_a_stop_becomes_one_replacement(
    sim: Client, path: str, streamed: bool, width: int, ids: list[int], options: dict[str, Any], reason: object
) -> None:
    asked = {"max_tokens": 20, "return_token_ids": True, **options}
    answer = sim.ask(path, streamed, sim={"runs": fixed_runs(ids, width)}, **asked)
    assert answer.text[0] == "�"
    assert (answer.finish[0], answer.stop_reason[0]) == ("stop", reason)
    assert answer.token_ids[0] == ids[:3]
