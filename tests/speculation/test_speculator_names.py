"""What --speculator takes is told apart without torch, and refused with a sentence that says what it does take."""

import pytest

from engine.speculation.names import SPECULATORS, check_speculator, members_of


@pytest.mark.parametrize("name", SPECULATORS)
def test_a_known_name_is_its_own_only_member(name: str) -> None:
    check_speculator(name)
    assert members_of(name) == (name,)


@pytest.mark.parametrize(
    ("speculator", "sentence"),
    [
        ("", r"--speculator '' is not known; known speculators are none, ngram.* and first_of:A,B$"),
        ("eagle9", "'eagle9' is not known"),
        ("NGRAM", "'NGRAM' is not known"),
        ("first_of", "'first_of' is not known"),
        ("first_of:", "cannot ask ''"),
        ("first_of:ngram", "asks one drafter only: say --speculator ngram$"),
        ("first_of:ngram,", "cannot ask ''"),
        ("first_of:ngram, ngram", "cannot ask ' ngram'"),
        ("first_of:ngram,none", "cannot ask 'none'; first_of: takes any of ngram"),
        ("first_of:ngram,eagle9", "cannot ask 'eagle9'"),
        ("first_of:ngram,ngram", "names ngram twice"),
        ("first_of:first_of:ngram,ngram", "cannot ask 'first_of:ngram'"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(speculator: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_speculator(speculator)
