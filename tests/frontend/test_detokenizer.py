"""Text never depends on how tokens are split into steps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.detokenizer import Detokenizer
from tests.frontend.embedded import embedded_tokenizer

PARTY = [10813, 232, 227]
FAMILY = [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]
QUOTES = [1137, 28, 476, 10407, 1002, 582, 1270, 827, 18, 10407, 18, 198]
INVALID = [218, 218, 233, 10813, 582, 143, 582, 233]
# Bytes that begin, continue or break characters, besides any other id.
IDS = st.one_of(st.sampled_from([*PARTY, *FAMILY, *INVALID, 0, 1, 2]), st.integers(0, 49151))


def in_steps(token_ids: list[int], lengths: list[int]) -> list[str]:
    """What each step sends, then what finishing sends."""
    detokenizer = Detokenizer(embedded_tokenizer())
    sent, start = [], 0
    for length in lengths:
        sent.append(detokenizer.push(token_ids[start : start + length]))
        start += length
    assert start == len(token_ids)
    return [*sent, detokenizer.finish()]


def whole(token_ids: list[int]) -> str:
    tokenizer = embedded_tokenizer()
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids if token_id > 16)
    return joined.decode("utf-8", "replace")


@given(st.lists(IDS, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_joined_text_is_all_bytes_decoded_at_once_however_steps_are_cut(ids: list[int], cuts: random.Random) -> None:
    lengths = []
    while sum(lengths) < len(ids):
        lengths.append(min(cuts.randint(1, 6), len(ids) - sum(lengths)))
    assert "".join(in_steps(ids, lengths)) == whole(ids) == embedded_tokenizer().decode(ids)


def test_words_next_to_quotes_are_the_same_in_64_random_splits() -> None:  # A-TEXT-1
    seed = 7
    print(f"seed={seed}")
    randomness = random.Random(seed)
    text = ' said, "yes", one." two"yes"\n'
    for _ in range(64):
        cuts = sorted(randomness.sample(range(1, len(QUOTES)), randomness.randint(0, len(QUOTES) - 1)))
        lengths = [end - start for start, end in zip([0, *cuts], [*cuts, len(QUOTES)], strict=True)]
        sent = in_steps(QUOTES, lengths)
        assert "".join(sent) == text
        assert all(sent[:-1])  # each step's text goes out in that step
        assert sent[-1] == ""


@pytest.mark.parametrize("run", [1, 2, 3, 5])
def test_emoji_are_never_torn(run: int) -> None:  # A-TEXT-2
    ids = PARTY + FAMILY
    assert len(FAMILY) == 13
    sent = in_steps(ids, [min(run, len(ids) - start) for start in range(0, len(ids), run)])
    assert "".join(sent) == "🎉👨\u200d👩\u200d👧"
    assert not any("\ufffd" in piece for piece in sent)
    assert all(piece == piece.encode("utf-8").decode("utf-8") for piece in sent)


def test_invalid_bytes_are_replaced_and_nothing_raises() -> None:  # A-TEXT-3
    sent = in_steps(INVALID, [3, 2, 3])
    expected = bytes([0x80, 0x80, 0x8F, 0xF0, 0x9F]).decode("utf-8", "replace")
    assert "".join(sent[:2]).startswith(expected)
    assert "".join(sent) == whole(INVALID)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_character_cut_by_max_tokens_becomes_one_replacement_character(kept: int) -> None:  # A-TEXT-4
    assert in_steps(PARTY[:kept], [kept]) == ["", "\ufffd"]
    assert in_steps(PARTY[:kept], [1] * kept) == [""] * kept + ["\ufffd"]


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    tokenizer = embedded_tokenizer()
    assert Detokenizer(tokenizer).push([1, 582, 2]) == " one"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([1, 582, 2]) == "<|im_start|> one<|im_end|>"


def test_a_special_token_inside_a_character_does_not_complete_or_break_it() -> None:
    assert in_steps([10813, 2, 232, 0, 227], [1] * 5) == ["", "", "", "", "🎉", ""]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 49152"):
        Detokenizer(embedded_tokenizer()).push([49152])
