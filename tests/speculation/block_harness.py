"""A block drafter on pages, driven by hand over a tiny target: commits with true hidden states, then drafts.

Owns the assembly and the cutting of a text into commits; judges nothing. The blocks of a row are scattered and given in no
order, as in a busy engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from engine.speculation.block_drafter import BlockSpeculator
from engine.speculation.draft import Draft
from engine.speculation.recipe import Recipe, SpeculationSettings, Target
from engine.speculation.registry import prepare
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart
from protocol.sampling import SamplingParams
from tests.block_reference import BlockOracle
from tests.speculation.eagle_harness import BLOCK_SIZE, NUM_BLOCKS, facts_of
from tests.tiny_blocks import PublishedBlock, dense_block, random_block_weights, write_block
from tests.tiny_drafters import draft_token_ids, taps_of, target_model

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def recipe_of(target: Path, drafter: Path, name: str, settings: SpeculationSettings) -> Recipe:
    return prepare(name, replace(settings, draft_model=str(drafter)), facts_of(target))


@dataclass(frozen=True)
class Asked:
    """A row that wants a draft behind `history`."""

    history: Sequence[int]
    budget: int
    sampling: SamplingParams = GREEDY
    seed: int = 77


class Bench:
    """One target, one random drafter for it, and the drafter running."""

    def __init__(
        self, target: Path, directory: Path, published: PublishedBlock, settings: SpeculationSettings, seed: int = 0
    ) -> None:
        self.model = target_model(target)
        self.published = published
        if not directory.exists():
            write_block(directory, target, published, seed=seed)
        self.weights = random_block_weights(self.model, published, seed)
        self.token_ids = draft_token_ids(self.model, self.weights)
        recipe = recipe_of(target, directory, published.name, settings)
        speculator = recipe.build(Target(self.model, NUM_BLOCKS, BLOCK_SIZE))
        assert isinstance(speculator, BlockSpeculator)
        self.speculator = speculator
        self._free = list(range(NUM_BLOCKS))
        random.Random(5).shuffle(self._free)

    @torch.inference_mode()
    def oracle(self, history: Sequence[int], num_tokens: int) -> BlockOracle:
        """The float64 drafter behind `history`, over the target's hidden states in the publisher's order."""
        taps = taps_of(self.model, torch.tensor([list(history)]), tuple(range(self.model.arch.num_layers + 1)))[0]
        ordered = taps[:-1, list(self.published.taps)]
        return BlockOracle(dense_block(self.model, self.weights, self.published), ordered, history, num_tokens)

    @torch.inference_mode()
    def hear(self, row: int, history: Sequence[int], cuts: Sequence[int] = (), extra: int = 20) -> tuple[int, ...]:
        """Begin the row and commit all but the last token, in spans that end at `cuts`; the row's blocks."""
        needed = -(-(len(history) + extra) // BLOCK_SIZE)
        block_ids = tuple(self._free[:needed])
        del self._free[:needed]
        self.speculator.begin(SequenceStart(row, tuple(history), len(history)))
        self.commit(row, history, [0, *cuts, len(history) - 1], block_ids)
        return block_ids

    @torch.inference_mode()
    def commit(self, row: int, history: Sequence[int], bounds: Sequence[int], block_ids: tuple[int, ...]) -> None:
        taps = taps_of(self.model, torch.tensor([list(history)]), self.speculator.capabilities.taps)[0]
        for start, end in pairwise(bounds):
            span = CommittedSpan(row, start, history[start:end], history[end], block_ids, taps[start:end])
            self.speculator.observe([span])

    @torch.inference_mode()
    def draft(self, rows: Sequence[tuple[int, Asked, tuple[int, ...]]]) -> Draft:
        return self.speculator.propose(
            [
                DraftRow(row, tuple(asked.history), asked.budget, 1, asked.sampling, asked.seed, block_ids)
                for row, asked, block_ids in rows
            ]
        )

    def drafts(self, asked: Sequence[Asked]) -> Draft:
        """All rows heard and then drafted in one call; every other one in chunks. Blocks end where the budget does."""
        rows = []
        for row, one in enumerate(asked):
            cuts = [3, 4] if row % 2 and len(one.history) > 6 else []
            rows.append((row, one, self.hear(row, one.history, cuts, extra=one.budget)))
        return self.draft(rows)

    def keys(self, block_ids: Sequence[int], end: int) -> torch.Tensor:
        """Keys and values [2, layers, end, heads, head_dim] of positions 0 .. end - 1."""
        pool = self.speculator._passes.pool
        slots = pool.slots_tensor([pool.slot(block_ids, position) for position in range(end)])
        return torch.stack([part.flatten(1, 2)[:, slots] for part in (pool.keys, pool.values)])
