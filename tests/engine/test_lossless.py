"""Whatever drafts, the whole engine answers as without speculation, token for token (float32, real models, no sockets).

Every drafter of the registry is enrolled by being there; two oracles hold rollback and counters at both extremes.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.inprocess import Drafter, Logits
from tests.lossless import (
    SCENARIOS,
    Plain,
    Scenario,
    assert_equal,
    check,
    check_drafting,
    limited,
    oracle_drafter,
    registered_drafters,
    unused_parameters,
)
from tests.near_ties import FP32, NearTies
from tests.tiny import EOS_TOKEN_IDS, Family, write_tiny_model

DRAFTERS = {drafter.label: drafter for drafter in registered_drafters()}
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
MODEL_SEED = 5


class Models:
    """The tiny models, their plain answers and the scenarios, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019  # lives as long as the module's tests
    def directory(self, family: Family) -> Path:
        return write_tiny_model(self._root / family, family, seed=MODEL_SEED)

    @functools.cache  # noqa: B019
    def plain(self, family: Family) -> Plain:
        return Plain(self.directory(family))

    @functools.cache  # noqa: B019
    def scenario(self, family: Family, name: str) -> Scenario:
        return SCENARIOS[name](self.plain(family))

    def drafter(self, family: Family, name: str, label: str) -> Drafter:
        if label in DRAFTERS:
            return DRAFTERS[label]
        return oracle_drafter(self.scenario(family, name), self.plain(family), is_right=label == "right")

    def check(self, family: Family, name: str, label: str) -> None:
        scenario, drafter = self.scenario(family, name), self.drafter(family, name, label)
        plain, drawn_must_rise = self.plain(family), family == "llama"
        counters = check(self.directory(family), scenario, drafter, plain, assert_equal, drawn_must_rise)
        check_drafting(counters, drafter, scenario)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny matrix is multiplied faster than a second thread wakes up, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("lossless"))


@pytest.mark.parametrize("label", [*DRAFTERS, "right", "wrong"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_drafter_answers_as_without_speculation(models: Models, name: str, label: str) -> None:
    models.check("llama", name, label)


@pytest.mark.parametrize("label", [*DRAFTERS, "right", "wrong"])
def test_every_drafter_answers_as_without_speculation_up_to_the_end_of_the_context(models: Models, label: str) -> None:
    plain = models.plain("llama")
    scenario = limited(plain)
    drafter = DRAFTERS.get(label) or oracle_drafter(scenario, plain, is_right=label == "right")
    counters = check(models.directory("llama"), scenario, drafter, plain, assert_equal)
    check_drafting(counters, drafter, scenario, must_accept=False)


@pytest.mark.parametrize("label", [*DRAFTERS, "right", "wrong"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_every_family_answers_as_without_speculation(models: Models, family: Family, label: str) -> None:
    models.check(family, "cramped", label)


def test_plain_answers_are_the_models_own_choice(models: Models) -> None:
    """What everything above is compared with agrees with plain Python over one forward of the whole text."""
    compare = NearTies(Logits(models.directory("llama"), "cpu", "fp32"), EOS_TOKEN_IDS, FP32)
    for one in models.scenario("llama", "mixed").submits:
        answer = models.plain("llama").answer(one)
        misses = [compare.miss(one, answer.token_ids[:at], token) for at, token in enumerate(answer.token_ids)]
        assert max(misses) == 0.0, one.sampling


def test_the_traffic_sets_every_sampling_parameter() -> None:
    assert unused_parameters() == frozenset()
