"""No draft length policy changes an answer: the real engine with a table and with adaptive lengths, against plain decoding."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.speculation.batch_table import parse_batch_table
from engine.speculation.recipe import SpeculationSettings
from tests.inprocess import Drafter
from tests.lossless import SCENARIOS, Plain, Scenario, assert_equal, check, oracle_drafter
from tests.tiny import write_tiny_model

NGRAM = Drafter("ngram", "ngram", SpeculationSettings(lookup_min=1, lookup_max=3))
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "adaptive": {"adaptive_draft": True},
    "table": {"draft_len_by_batch": parse_batch_table("1:4,2:2,4:0")},
    "both": {"adaptive_draft": True, "draft_len_by_batch": parse_batch_table("1:4,3:1")},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama", seed=5)
    return directory, Plain(directory)


def drafter_of(name: str, scenario: Scenario, plain: Plain) -> Drafter:
    return NGRAM if name == "ngram" else oracle_drafter(scenario, plain, is_right=name == "right")


CASES = [
    *(("mixed", name, "adaptive") for name in ("ngram", "right", "wrong")),
    *(("cramped", name, "both") for name in ("ngram", "wrong")),
    ("cramped", "right", "adaptive"),
    ("mixed", "ngram", "table"),
]


@pytest.mark.parametrize(("scenario_name", "name", "policy"), CASES)
def test_answers_are_plain_decodings(target: tuple[Path, Plain], scenario_name: str, name: str, policy: str) -> None:
    """Greedy and seeded sampled requests, preempted and abandoned ones among them, token for token."""
    directory, plain = target
    scenario = SCENARIOS[scenario_name](plain)
    drafter = drafter_of(name, scenario, plain)
    counters = check(
        directory, replace(scenario, shape=replace(scenario.shape, **POLICIES[policy])), drafter, plain, assert_equal
    )
    assert counters.draft_rounds > 0, "nothing was drafted: the policy was not asked"


def test_the_policy_had_something_to_say(target: tuple[Path, Plain]) -> None:
    """The scenarios above prove nothing unless lengths differ: a wrong drafter is asked for far less."""
    directory, plain = target
    scenario = SCENARIOS["mixed"](plain)
    drafter = oracle_drafter(scenario, plain, is_right=False)
    fixed = check(directory, scenario, drafter, plain, assert_equal)
    shape = replace(scenario.shape, adaptive_draft=True)
    adaptive = check(directory, replace(scenario, shape=shape), drafter, plain, assert_equal)
    assert adaptive.draft_tokens < fixed.draft_tokens / 4
    assert adaptive.generation_tokens == fixed.generation_tokens
