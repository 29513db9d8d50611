"""Drafters of the registry that need no model: built for a toy target of a given vocabulary."""

import torch

from engine.model.arch import ArchConfig
from engine.model.rope import RopeConfig
from engine.speculation.recipe import Recipe, SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import Speculator


def toy_facts(vocab_size: int) -> TargetFacts:
    arch = ArchConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        ffn_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        context_length=10_000,
        norm_eps=1e-5,
        rope=RopeConfig(base=10_000.0, scaling=None),
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        qk_norm=False,
        tied=True,
    )
    return TargetFacts(arch, torch.float32, torch.device("cpu"), block_size=16, max_model_len=10_000)


def recipe_of(name: str, settings: SpeculationSettings, vocab_size: int) -> Recipe:
    return prepare(name, settings, toy_facts(vocab_size))


def speculator_on_host(name: str, settings: SpeculationSettings, vocab_size: int) -> Speculator:
    """Raises as `prepare` does. Only for drafters without a model."""
    return recipe_of(name, settings, vocab_size).build(_NO_TARGET)


_NO_TARGET: Target = None  # type: ignore[assignment]  # a drafter without a model never looks at it
