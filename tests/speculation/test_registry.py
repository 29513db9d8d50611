"""Drafter settings that cannot work stop start-up with a sentence that names the option (A-FILES-3)."""

import pytest

from engine.speculation.names import SPECULATORS
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.registry import names
from tests.speculation.on_host import speculator_on_host


def test_every_name_that_can_be_asked_for_has_a_recipe() -> None:
    assert names() == SPECULATORS


def test_known_names_are_built_with_their_defaults() -> None:
    assert speculator_on_host("none", SpeculationSettings(), 100).capabilities.max_draft_len == 0
    assert speculator_on_host("ngram", SpeculationSettings(), 100).capabilities.max_draft_len == 5
    assert speculator_on_host("ngram", SpeculationSettings(num_draft_tokens=64), 100).capabilities.max_draft_len == 64


def test_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--speculator 'eagle9' .*none, (?:\w+, )*ngram"):
        speculator_on_host("eagle9", SpeculationSettings(), 100)


@pytest.mark.parametrize("num_draft_tokens", [0, -1, 65, 10_000])
def test_draft_lengths_that_cannot_work_are_refused(num_draft_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"--num-draft-tokens .*got {num_draft_tokens}$"):
        speculator_on_host("ngram", SpeculationSettings(num_draft_tokens=num_draft_tokens), 100)


def test_lookup_lengths_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="--lookup-max"):
        speculator_on_host("ngram", SpeculationSettings(lookup_min=3, lookup_max=2), 100)
    with pytest.raises(ValueError, match="--lookup-min"):
        speculator_on_host("ngram", SpeculationSettings(lookup_min=0), 100)
