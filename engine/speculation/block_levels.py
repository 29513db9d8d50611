"""What one pass of a block drafter says of each place behind the root, given the tokens chosen before it.

Owns the step from hidden states to logits and confidence, with the Markov head's state; chooses no token. Used by
`block_chain` and `block_tree`. n = rows of the pass, m = drafts being followed (a chain's row, a beam of a tree), K = most
places of a row, r = rank of the Markov head, h = drafter's width, D = drafter's vocabulary.
Source: DSpark (DeepSeek and Peking University, 2026): a place's logits gain a bias from the token before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.speculation.block_passes import BlockOutput, BlockPasses, BlockRow


@dataclass(frozen=True)
class Said:
    """Of one place."""

    logits: torch.Tensor  # float32 [m, D]
    state: torch.Tensor | None  # [m, r], the Markov head's behind this place; None without one
    confidence: torch.Tensor | None  # float32 [m], that its token is accepted if those before were


class BlockLevels:
    """One call's rows."""

    def __init__(self, passes: BlockPasses, rows: Sequence[BlockRow], output: BlockOutput) -> None:
        model = passes.model
        self._markov, self._confidence = model.weights.markov, model.weights.confidence
        self._hidden = output.drafting
        self._logits = model.logits(output.drafting.flatten(0, 1)).view(*output.drafting.shape[:2], -1)
        self.anchors = passes.pool.slots_tensor([row.asked.token_ids[-1] for row in rows])  # int64 [n]
        self.start: torch.Tensor | None = None  # [n, r], the Markov head's state before the first place
        if self._markov is not None:
            self.start = self._markov.start(len(rows))
            if passes.anchor_rows:  # the anchor's row is a step of the RNN, though nothing is drafted from it
                _, self.start = self._markov.step(output.anchors, self._markov.embed(self.anchors), self.start)

    @property
    def is_independent(self) -> bool:
        """No place is told what was chosen before it."""
        return self._markov is None

    @property
    def num_places(self) -> int:
        return self._hidden.shape[1]

    def at(
        self, place: int, previous: torch.Tensor, state: torch.Tensor | None, rows: torch.Tensor | None = None
    ) -> Said:
        """Behind the tokens `previous` int64 [m] of the target's; `rows` int64 [m]: whose they are, None: each row's."""
        hidden, logits = self._hidden[:, place], self._logits[:, place]
        if rows is not None:
            hidden, logits = hidden.index_select(0, rows), logits.index_select(0, rows)
        embedded = None
        if self._markov is not None and state is not None:
            embedded = self._markov.embed(previous)
            bias, state = self._markov.step(hidden, embedded, state)
            logits = (logits + bias).nan_to_num(nan=0.0)
        sure = None if self._confidence is None else self._confidence.probability(hidden, embedded)
        return Said(logits, state, sure)
