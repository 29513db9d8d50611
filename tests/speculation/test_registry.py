"""Drafter settings that cannot work stop start-up with a sentence that names the option (A-FILES-3)."""

import pytest

from engine.speculation.registry import SpeculationSettings, build, names
from tests.speculation.reference import HOST


def test_known_names_are_built_with_their_defaults() -> None:
    assert names() == ("none", "ngram")
    assert build("none", SpeculationSettings(), HOST, 100).capabilities.max_draft_len == 0
    assert build("ngram", SpeculationSettings(), HOST, 100).capabilities.max_draft_len == 5
    assert build("ngram", SpeculationSettings(num_draft_tokens=64), HOST, 100).capabilities.max_draft_len == 64


def test_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--speculator 'eagle9' .*none, ngram"):
        build("eagle9", SpeculationSettings(), HOST, 100)


@pytest.mark.parametrize("num_draft_tokens", [0, -1, 65, 10_000])
def test_draft_lengths_that_cannot_work_are_refused(num_draft_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"--num-draft-tokens .*got {num_draft_tokens}$"):
        build("ngram", SpeculationSettings(num_draft_tokens=num_draft_tokens), HOST, 100)


def test_lookup_lengths_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="--lookup-max"):
        build("ngram", SpeculationSettings(lookup_min=3, lookup_max=2), HOST, 100)
    with pytest.raises(ValueError, match="--lookup-min"):
        build("ngram", SpeculationSettings(lookup_min=0), HOST, 100)
