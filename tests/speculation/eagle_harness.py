"""An EAGLE drafter on pages, driven by hand over a tiny target: commits with true hidden states, then drafts.

Owns the assembly and the cutting of a text into commits; judges nothing. The blocks of a row are scattered and given in no
order, as in a busy engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from engine.speculation.draft import Draft
from engine.speculation.eagle_drafter import EagleSpeculator
from engine.speculation.recipe import Recipe, SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.tiny_drafters import Published, random_weights, taps_of, target_model, write_eagle

BLOCK_SIZE, NUM_BLOCKS = 4, 120
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def facts_of(target: Path) -> TargetFacts:
    files = resolve(str(target))
    arch = target_model(target).arch
    return TargetFacts(arch, torch.float32, torch.device("cpu"), BLOCK_SIZE, arch.context_length, files)


def recipe_of(target: Path, drafter: Path, generation: int, settings: SpeculationSettings) -> Recipe:
    name = "eagle" if generation == 1 else "eagle3"
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
        self, target: Path, directory: Path, published: Published, settings: SpeculationSettings, seed: int = 0
    ) -> None:
        self.model = target_model(target)
        self.published = published
        write_eagle(directory, target, published, seed=seed)
        self.weights = random_weights(self.model, published, seed)
        recipe = recipe_of(target, directory, published.generation, settings)
        speculator = recipe.build(Target(self.model, NUM_BLOCKS, BLOCK_SIZE))
        assert isinstance(speculator, EagleSpeculator)
        self.speculator = speculator
        blocks = list(range(NUM_BLOCKS))
        random.Random(5).shuffle(blocks)
        self._free = blocks

    def taps(self, history: Sequence[int]) -> torch.Tensor:
        """[L, n, hidden], as the target gives them: each number once."""
        return taps_of(self.model, torch.tensor([list(history)]), self.speculator.capabilities.taps)[0]

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
        taps = self.taps(history)
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
        """All rows heard and then drafted in one call; every other one in chunks."""
        rows = []
        for row, one in enumerate(asked):
            cuts = [3, 4] if row % 2 and len(one.history) > 6 else []
            rows.append((row, one, self.hear(row, one.history, cuts, extra=one.budget + 1)))
        return self.draft(rows)

    def keys(self, block_ids: Sequence[int], end: int) -> torch.Tensor:
        """Keys and values [2, end, heads, head_dim] of positions 0 .. end - 1."""
        pool = self.speculator._passes.pool
        slots = pool.slots_tensor([pool.slot(block_ids, position) for position in range(end)])
        return torch.stack([part[0].flatten(0, 1)[slots] for part in (pool.keys, pool.values)])


def texts(count: int, vocab_size: int = 320, shortest: int = 2, longest: int = 21, seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(3, vocab_size) for _ in range(generator.randint(shortest, longest))] for _ in range(count)
    ]
