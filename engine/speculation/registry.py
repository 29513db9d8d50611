"""The drafters by name. A new drafter is one line of `_RECIPES` (and of `names`), and the conformance tests find it there.

Owns the table and the start-up checks of its settings. Called once, while an engine is being built.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from engine.speculation.block_recipe import prepare_dflash, prepare_dspark
from engine.speculation.draft_model_recipe import DraftModelRecipe
from engine.speculation.eagle_recipe import prepare_eagle, prepare_eagle3
from engine.speculation.first_of_recipe import FirstOfRecipe
from engine.speculation.frozen_kv_recipe import FrozenKvRecipe
from engine.speculation.medusa_recipe import MedusaRecipe
from engine.speculation.mtp_recipe import MtpRecipe
from engine.speculation.names import check_speculator, members_of
from engine.speculation.ngram import DEFAULT_NUM_DRAFT_TOKENS, NgramSpeculator
from engine.speculation.prediction import PredictionSpeculator
from engine.speculation.recipe import Ready, Recipe, SpeculationSettings, TargetFacts
from engine.speculation.speculator import NoSpeculator
from engine.speculation.suffix import SuffixSpeculator
from engine.speculation.synthetic import prepare_synthetic
from engine.speculation.uno_recipe import UnoRecipe

MAX_NUM_DRAFT_TOKENS = 64
DEFAULT_NUM_SUFFIX_TOKENS = 16  # few rounds draft as many: a match of m tokens drafts m


def prepare(name: str, settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    """The named drafter for this target, checked but not built.

    Raises ValueError with a sentence naming the option that cannot work, `ModelFilesError` for files that cannot be used.
    """
    check_speculator(name)
    _check(settings)
    recipes = {member: _RECIPES[member](settings, facts) for member in members_of(name)}
    return FirstOfRecipe(recipes, facts.vocab_size) if len(recipes) > 1 else recipes[name]


def names() -> tuple[str, ...]:
    """Every registered name, in the order of the table."""
    return tuple(_RECIPES)


def _check(settings: SpeculationSettings) -> None:
    num = settings.num_draft_tokens
    if num is not None and not 1 <= num <= MAX_NUM_DRAFT_TOKENS:
        raise ValueError(f"--num-draft-tokens must be between 1 and {MAX_NUM_DRAFT_TOKENS}, got {num}")
    if settings.lookup_min < 1:
        raise ValueError(f"--lookup-min must be at least 1, got {settings.lookup_min}")
    if settings.lookup_max < settings.lookup_min:
        raise ValueError(
            f"--lookup-max ({settings.lookup_max}) must not be smaller than --lookup-min ({settings.lookup_min})"
        )


def _none(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    return Ready(NoSpeculator(torch.device("cpu")))


def _ngram(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    num_draft_tokens = settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
    return Ready(NgramSpeculator(num_draft_tokens, settings.lookup_min, settings.lookup_max, facts.vocab_size))


def _prediction(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    num_draft_tokens = settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
    return Ready(PredictionSpeculator(num_draft_tokens, settings.lookup_min, settings.lookup_max, facts.vocab_size))


def _suffix(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    return Ready(SuffixSpeculator(settings.num_draft_tokens or DEFAULT_NUM_SUFFIX_TOKENS, settings.suffix))


_RECIPES: Mapping[str, Callable[[SpeculationSettings, TargetFacts], Recipe]] = MappingProxyType(
    {
        "none": _none,
        "ngram": _ngram,
        "prediction": _prediction,
        "suffix": _suffix,
        "draft_model": DraftModelRecipe,
        "eagle": prepare_eagle,
        "eagle3": prepare_eagle3,
        "mtp": MtpRecipe,
        "medusa": MedusaRecipe,
        "dflash": prepare_dflash,
        "dspark": prepare_dspark,
        "frozen_kv_mtp": FrozenKvRecipe,
        "synthetic": prepare_synthetic,
        "uno": UnoRecipe,
    }
)
