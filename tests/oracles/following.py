"""A drafter of ours that follows a text somebody else wrote, round by round, over a tiny target's true hidden states.

Owns telling it what was committed and asking it for drafts; judges nothing. Used by the comparisons with vLLM.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.speculation.recipe import Recipe, Target
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from tests.speculation.eagle_harness import BLOCK_SIZE, GREEDY
from tests.tiny_drafters import taps_of, target_model

NUM_BLOCKS = 40


class Follower:
    """One row. `logits` are those of its newest draft, float32 [1, V] per token, if `kept` wraps what computes them."""

    def __init__(self, recipe: Recipe, target: Path) -> None:
        self.logits: list[torch.Tensor] = []
        self._model = target_model(target)
        self.speculator: Speculator = recipe.build(Target(self._model, NUM_BLOCKS, BLOCK_SIZE))
        self._blocks = tuple(reversed(range(NUM_BLOCKS)))
        self._known = 0  # positions it was told of

    def kept(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def keeping(*arguments: object) -> torch.Tensor:
            self.logits.append(compute(*arguments))
            return self.logits[-1]

        return keeping

    @torch.inference_mode()
    def draft(self, history: Sequence[int], is_new: bool) -> list[int]:
        """W tokens behind `history`, which goes on where the last one ended unless it `is_new`."""
        if is_new:
            self.speculator.begin(SequenceStart(0, tuple(history), len(history)))
            self._known = 0
        capabilities, start, end = self.speculator.capabilities, self._known, len(history) - 1
        taps = taps_of(self._model, torch.tensor([list(history)]), capabilities.taps)[0, start:end]
        self.speculator.observe([CommittedSpan(0, start, tuple(history[start:end]), history[-1], self._blocks, taps)])
        self._known = end
        self.logits.clear()
        width = capabilities.max_draft_len
        draft = self.speculator.propose([DraftRow(0, tuple(history), width, 1, GREEDY, 0, self._blocks)])
        assert int(draft.lengths[0]) == width and draft.parents is None
        return draft.tokens[0].tolist()
