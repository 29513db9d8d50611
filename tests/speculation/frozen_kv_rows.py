"""Rows that a frozen-KV drafter hears of, over pages that a real target writes: prompts, verifies and rejected drafts.

Owns the executor's side of the seam for tests; never drafts. The reference reads keys that the target computed anew, in
one piece and in float64's own memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import SpanLayout
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.model.layers import rms_norm
from engine.speculation.frozen_kv_recipe import FrozenKvRecipe
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.frozen_kv_reference import DenseAssistant, TargetSide, ToldByAssistant
from tests.tiny_drafters import target_model
from tests.tiny_frozen_kv import PublishedAssistant, dense_assistant, publish, random_assistant

BLOCK_SIZE = 4
NUM_BLOCKS = 64
BLOCKS_PER_ROW = 16
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


def facts_of(directory: Path, model: DecoderModel, max_model_len: int = 60) -> TargetFacts:
    files = resolve(str(directory))
    return TargetFacts(model.arch, torch.float32, torch.device("cpu"), BLOCK_SIZE, max_model_len, files)


def new_pool(model: DecoderModel, num_blocks: int, block_size: int) -> KVPool:
    arch = model.arch
    shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, block_size, model.dtype)
    return KVPool(shape, num_blocks, model.device)


def run(
    model: DecoderModel, pool: KVPool, start: int, token_ids: Sequence[int], block_ids: tuple[int, ...]
) -> torch.Tensor:
    """The target over tokens at `start`; [T, 1, h], its last hidden states."""
    positions = torch.arange(start, start + len(token_ids))
    slots = pool.slots_tensor([pool.slot(block_ids, position) for position in positions.tolist()])
    attention = GroupedAttention(pool, model.arch.num_heads)
    layout = attention.layout([SpanLayout(start, len(token_ids), block_ids)])
    step = ForwardInput(torch.tensor(list(token_ids)), positions, slots)
    _, taps = model.forward(step, attention, layout, (model.arch.num_layers,))
    assert taps is not None
    return taps


@dataclass(frozen=True)
class Rig:
    """A drafter built from files over the target's pages, and the same assistant in float64."""

    model: DecoderModel
    speculator: Speculator
    pool: KVPool
    dense: DenseAssistant

    def reference(self, history: Sequence[int], count: int, drawn: Sequence[int] | None = None) -> ToldByAssistant:
        before = len(history) - 1
        pool = new_pool(self.model, 1, before)
        state = run(self.model, pool, 0, history[:-1], (0,))[-1, 0]
        norm, eps = self.model.weights.final_norm, self.model.arch.norm_eps
        side = TargetSide(
            embedding=self.model.weights.embedding.to(torch.float64),
            keys=pool.keys[-1, 0].to(torch.float64),
            values=pool.values[-1, 0].to(torch.float64),
            state=rms_norm(state, norm, eps).to(torch.float64),
        )
        return self.dense.draft(side, history[-1], count, drawn)


def rig_of(target: Path, directory: Path, published: PublishedAssistant, settings: SpeculationSettings) -> Rig:
    """Writes a random assistant to `directory` and reads it back."""
    model = target_model(target)
    weights = random_assistant(model, published)
    publish(directory, model, published, weights)
    recipe = FrozenKvRecipe(replace(settings, draft_model=str(directory)), facts_of(target, model))
    pool = new_pool(model, NUM_BLOCKS, BLOCK_SIZE)
    speculator = recipe.build(Target(model, NUM_BLOCKS, BLOCK_SIZE, pool))
    return Rig(model, speculator, pool, dense_assistant(weights, published))


class Row:
    """One sequence and its blocks. `history` ends with the root, which the target has not run."""

    def __init__(self, number: int, history: Sequence[int], rig: Rig, params: SamplingParams = GREEDY) -> None:
        self.number, self.history, self.rig, self.params = number, list(history), rig, params
        self.num_prompt, self.told = len(history), 0
        self.block_ids = tuple(range(number * BLOCKS_PER_ROW, (number + 1) * BLOCKS_PER_ROW))
        rig.speculator.begin(SequenceStart(number, tuple(history), len(history)))

    def chunk(self, end: int) -> CommittedSpan:
        """The target computes the text up to position `end`, where a token is known."""
        start, self.told = self.told, end
        tokens = self.history[start:end]
        taps = run(self.rig.model, self.rig.pool, start, tokens, self.block_ids)
        return CommittedSpan(self.number, start, tokens, self.history[end], self.block_ids, taps)

    def verify(self, draft: Sequence[int], kept: int, next_token: int) -> CommittedSpan:
        """The target computes the root and a draft of which `kept` tokens stay; the others' keys stay in their slots."""
        root, verified = len(self.history) - 1, [self.history[-1], *draft]
        taps = run(self.rig.model, self.rig.pool, root, verified, self.block_ids)
        self.history += [*draft[:kept], next_token]
        self.told = root + 1 + kept
        return CommittedSpan(self.number, root, verified[: 1 + kept], next_token, self.block_ids, taps[: 1 + kept])

    def asks(self, budget: int) -> DraftRow:
        seed = 100 + self.number
        return DraftRow(self.number, self.history, budget, self.num_prompt, self.params, seed, self.block_ids)
