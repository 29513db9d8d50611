"""Where a completion's text ends does not depend on where its tokens or steps were cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.stop_strings import Piece, StopMatcher
from tests.frontend.embedded import embedded_tokenizer

NUMBERS = [582, 827, 36588, 1876, 2531]  # " one two END four five"


def matcher(*stops: str, include_stop: bool = False, min_tokens: int = 0) -> StopMatcher:
    return StopMatcher(embedded_tokenizer(), stops, include_stop=include_stop, min_tokens=min_tokens)


@pytest.mark.parametrize("run", [1, 2, 5])
@pytest.mark.parametrize(
    ("stop", "text", "included", "num_tokens"),
    [
        (" END", " one two", " one two END", 3),
        ("wo", " one t", " one two", 2),  # inside a token
        ("wo E", " one t", " one two E", 3),  # across two tokens
        (" one", "", " one", 1),
    ],
)
def test_tokens_and_text_end_at_the_stop(run: int, stop: str, text: str, included: str, num_tokens: int) -> None:
    for include_stop, expected in ((False, text), (True, included)):  # A-STOP-1
        subject = matcher(stop, include_stop=include_stop)
        pieces = [subject.feed(NUMBERS[start : start + run]) for start in range(0, len(NUMBERS), run)]
        assert "".join(piece.text for piece in pieces) == expected
        assert sum(piece.num_tokens for piece in pieces) == subject.num_tokens == num_tokens
        assert [piece.matched for piece in pieces if piece.matched] == [stop]
        assert (subject.matched, subject.finish()) == (stop, "")


@pytest.mark.parametrize("index", range(16))
def test_a_stop_anywhere_in_a_long_run_is_seen(index: int) -> None:  # A-STOP-2
    ids = [582] * 16
    ids[index] = 36588
    assert matcher(" END").feed(ids) == Piece(" one" * index, index + 1, " END")


def test_text_held_as_a_possible_stop_is_given_back_at_the_end() -> None:  # A-STOP-4
    subject = matcher("six\nQQQQQQ")
    assert subject.feed([2531, 2976]) == Piece(" five ", 2, None)
    assert subject.feed([2], ends_with_stop_token=True) == Piece("", 1, None)
    assert subject.finish() == "six"
    by_length = matcher("six\nQQQQQQ")
    assert by_length.feed([2531, 2976]).text + by_length.finish() == " five six"
    assert by_length.finish() == ""


def test_a_stop_tokens_text_is_hidden_but_the_token_counts() -> None:  # A-STOP-5
    assert matcher().feed([582, 36588], ends_with_stop_token=True) == Piece(" one", 2, None)
    assert matcher(include_stop=True).feed([582, 36588], ends_with_stop_token=True) == Piece(" one END", 2, None)


def test_an_empty_stop_string_is_refused() -> None:  # A-STOP-6
    with pytest.raises(ValueError, match="must not be empty"):
        matcher("x", "")


def test_without_a_possible_stop_the_whole_step_is_sent() -> None:
    assert matcher("zzz").feed(NUMBERS).text == " one two END four five"
    assert matcher().feed(NUMBERS).text == " one two END four five"


def test_only_the_longest_end_that_begins_a_stop_is_held() -> None:
    subject = matcher("eab", " one one!")
    assert subject.feed([582, 582, 582]).text == " one"  # " one one" may still become the second stop
    assert subject.feed([827]).text == " one one two"


def test_after_a_match_nothing_is_sent_or_counted() -> None:
    subject = matcher(" END")
    subject.feed(NUMBERS[:3])
    assert subject.feed(NUMBERS[3:]) == Piece("", 0, None)
    assert subject.num_tokens == 3
    assert subject.finish() == ""


def test_the_earliest_token_wins_then_the_earliest_start_then_the_longest() -> None:
    assert matcher("two END", "two").feed(NUMBERS) == Piece(" one ", 2, "two")
    assert matcher("wo", "two").feed(NUMBERS) == Piece(" one ", 2, "two")
    assert matcher("tw", "two").feed(NUMBERS) == Piece(" one ", 2, "two")
    assert matcher("o", "two", " one two E").feed([582]) == Piece(" ", 1, "o")


def test_stops_within_the_first_min_tokens_do_not_count() -> None:
    assert matcher(" one", min_tokens=2).feed([582, 582, 582, 827]) == Piece(" one one", 3, " one")
    assert matcher(" one two", min_tokens=1).feed([582, 827]) == Piece("", 2, " one two")
    assert matcher(" one", min_tokens=1).feed([582, 827]).text == " one two"


def test_a_stop_between_the_bytes_of_a_character_leaves_one_replacement_character() -> None:  # A-TEXT-4
    assert matcher(" END").feed([10813, 232, 36588]) == Piece("\ufffd", 3, " END")


def test_a_stop_spelled_with_characters_of_several_tokens_is_found() -> None:
    assert matcher("🎉").feed([582, 10813, 232, 227, 827]) == Piece(" one", 4, "🎉")


def test_feeding_after_the_end_is_a_broken_invariant() -> None:
    subject = matcher("x")
    subject.finish()
    with pytest.raises(RuntimeError, match="after finish"):
        subject.feed([582])


def by_hand(texts: list[str], stops: list[str]) -> tuple[str, int, str | None]:
    """The definition: grow the text token by token until some stop string is in it."""
    text = ""
    for count, added in enumerate(texts, start=1):
        text += added
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            return text[:start], count, stop
    return text, len(texts), None


LETTERS = dict.fromkeys("ab", embedded_tokenizer)


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.integers(1, 5),
)
@settings(max_examples=1000, deadline=None)
def test_any_text_ends_where_the_definition_says(texts: list[str], stops: list[str], run: int) -> None:
    tokenizer = embedded_tokenizer()
    ids = [token_id for text in texts for token_id in tokenizer.encode(text)]
    expected_text, expected_count, expected_stop = by_hand([tokenizer.token_text(token_id) for token_id in ids], stops)
    subject = matcher(*stops)
    sent = []
    for start in range(0, len(ids), run):
        piece = subject.feed(ids[start : start + run])
        sent.append(piece.text)
        # Nothing is held back that could not become a stop.
        whole = "".join(tokenizer.token_text(token_id) for token_id in ids[: start + run])
        held = whole[len("".join(sent)) :]
        if subject.matched is None:
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    assert ("".join(sent) + subject.finish(), subject.num_tokens, subject.matched) == (
        expected_text,
        expected_count,
        expected_stop,
    )
