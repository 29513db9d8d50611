"""Rows that an MTP drafter hears of, with the hidden states a real target has there.

Owns the executor's side of the seam for tests: spans, blocks, hidden states; never drafts. The target is computed anew
for every span, in one piece and without a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.kv.pool import KVPool
from engine.model.decoder import DecoderModel
from engine.model.layers import rms_norm
from engine.speculation.eagle_drafter import EagleSpeculator
from engine.speculation.mtp_modules import MtpModulesSpeculator
from engine.speculation.mtp_recipe import MtpRecipe
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.mtp_reference import DenseModule, Told, chained, recycled
from tests.tiny_drafters import taps_of, target_model
from tests.tiny_mtp import PublishedMtp, Weights, dense_modules, mtp_config, named, tiny_modules, write_modules

BLOCK_SIZE = 4
NUM_BLOCKS = 64
BLOCKS_PER_ROW = 16
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


def facts_of(directory: Path, model: DecoderModel, max_model_len: int = 60) -> TargetFacts:
    files = resolve(str(directory))
    return TargetFacts(model.arch, torch.float32, torch.device("cpu"), BLOCK_SIZE, max_model_len, files)


@dataclass(frozen=True)
class Drafting:
    """A drafter built from files, its pages, and the same modules in float64."""

    model: DecoderModel
    speculator: Speculator
    pool: KVPool
    dense: list[DenseModule]

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, h], behind the target's final norm."""
        taps = self.taps(token_ids)[:, 0]
        return rms_norm(taps, self.model.weights.final_norm, self.model.arch.norm_eps)

    def taps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, 1, h], as the executor hands them out."""
        return taps_of(self.model, torch.tensor([list(token_ids)]), (self.model.arch.num_layers,))[0]

    def reference(self, history: Sequence[int], count: int, drawn: Sequence[int] | None = None) -> Told:
        states = self.states(history[:-1])
        if len(self.dense) == 1:
            return recycled(self.dense[0], states, history, count, drawn)
        return chained(self.dense, states, history, count, drawn)


def drafting_of(
    target: Path,
    directory: Path,
    published: PublishedMtp,
    settings: SpeculationSettings,
    modules: list[Weights] | None = None,
) -> Drafting:
    """Writes the modules (without `modules`, random ones) to `directory` and reads them back."""
    model = target_model(target)
    modules = tiny_modules(model, published) if modules is None else modules
    write_modules(directory, mtp_config(model, published), named(modules, published, model.arch.num_layers))
    recipe = MtpRecipe(replace(settings, draft_model=str(directory)), facts_of(target, model))
    speculator = recipe.build(Target(model, NUM_BLOCKS, BLOCK_SIZE))
    return Drafting(model, speculator, pool_of(speculator), dense_modules(model, published, modules))


def pool_of(speculator: Speculator) -> KVPool:
    if isinstance(speculator, MtpModulesSpeculator):
        return speculator._pool
    assert isinstance(speculator, EagleSpeculator)
    return speculator._passes.pool


class Row:
    """One sequence and its blocks."""

    def __init__(
        self,
        number: int,
        history: Sequence[int],
        drafting: Drafting,
        *,
        block_ids: tuple[int, ...] | None = None,
        told: int = 0,
        params: SamplingParams = GREEDY,
    ) -> None:
        """`told`: positions that came from the prefix cache."""
        self.number, self.history, self.params = number, list(history), params
        self.drafting, self.told, self.num_prompt = drafting, told, len(history)
        own = tuple(range(number * BLOCKS_PER_ROW, (number + 1) * BLOCKS_PER_ROW))
        self.block_ids = own if block_ids is None else block_ids
        drafting.speculator.begin(SequenceStart(number, tuple(history), len(history)))

    def span(self, end: int) -> CommittedSpan:
        """What becomes permanent up to position `end`; the token there is known."""
        start, self.told = self.told, end
        return CommittedSpan(
            self.number,
            start,
            self.history[start:end],
            self.history[end],
            self.block_ids,
            self.drafting.taps(self.history[:end])[start:],
        )

    def commit(self, token_ids: Sequence[int]) -> CommittedSpan:
        """Everything before the last of `token_ids`, which is the new root."""
        self.history += token_ids
        return self.span(len(self.history) - 1)

    def asks(self, budget: int) -> DraftRow:
        seed = 100 + self.number
        return DraftRow(self.number, self.history, budget, self.num_prompt, self.params, seed, self.block_ids)

    def keys(self, module: int, num_positions: int) -> torch.Tensor:
        """[2, num_positions, heads, dim]: keys and values that the module has of the first positions."""
        pool = self.drafting.pool
        slots = [pool.slot(self.block_ids, position) for position in range(num_positions)]
        return torch.stack([pages[module].flatten(0, 1)[slots] for pages in (pool.keys, pool.values)])

    def dense_keys(self, module: int, num_positions: int) -> torch.Tensor:
        """The same, computed from scratch in float64."""
        states = self.drafting.states(self.history[:-1]).to(torch.float64)
        for number in range(module + 1):
            behind = self.history[1 + number :]
            states = states[: len(behind)]
            dense = self.drafting.dense[number]
            if number == module:
                keys, values = dense.keys_and_values(dense.entered(states, behind))
                return torch.stack([keys[:num_positions], values[:num_positions]])
            states = dense.outputs(states, behind)
        raise AssertionError
