"""Which tokens a block drafter proposes, from left to right over the rows of one pass.

Owns the loop and where a draft is cut; what a place says is `block_levels`', the choice of a token `choice`'s. Called by
`block_drafter`. n = rows, K = most tokens a row drafts in the call, W = max_draft_len, D = drafter's vocabulary, V = target's.
Sources: DFlash (arXiv 2602.06036), whose rows do not see each other's tokens; DSpark, whose Markov head tells each row
the token chosen before it, so that what a token is drawn from is conditional on the draft so far, which is what
rejection sampling needs to know.

The cut by confidence is the law-keeping one (DSpark, appendix A): whether token j is kept depends on the confidences of
tokens 1 to j, each a function of the committed text and of drafted tokens before its own; never on token j or a later one.
"""

from collections.abc import Sequence

import torch

from engine.speculation.block_levels import BlockLevels
from engine.speculation.block_passes import BlockPasses, BlockRow
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft


class BlockDrafting:
    """Drafts chains; `threshold`: least confidence of a token that is kept, 0 keeps all."""

    def __init__(self, passes: BlockPasses, width: int, is_sampled: bool, threshold: float) -> None:
        self._passes = passes
        self._width = width
        self._is_sampled = is_sampled
        self._threshold = threshold

    def draft(self, rows: Sequence[BlockRow]) -> Draft:
        """`budget` tokens for each of at least one row, fewer where confidence ends."""
        device, model = self._passes.pool.device, self._passes.model
        levels = BlockLevels(self._passes, rows, self._passes.run(rows))
        tokens = torch.zeros(len(rows), self._width, dtype=torch.int32, device=device)
        probs = None
        if self._is_sampled:
            probs = torch.zeros(len(rows), self._width, model.arch.vocab_size, device=device)
        walk = _Walk(self._passes, rows, levels, self._is_sampled)
        for index in range(levels.num_places):
            tokens[:, index], drawn_from = walk.next(index)
            if probs is not None and drawn_from is not None:
                probs[:, index] = drawn_from
        return Draft(
            tokens=tokens,
            lengths=self._lengths(rows, walk.confidences),
            parents=None,
            probs=probs,
            roots=None,
            sources=torch.zeros(len(rows), dtype=torch.int8),
            num_forwards=1,
        )

    def _lengths(self, rows: Sequence[BlockRow], confidences: Sequence[torch.Tensor]) -> torch.Tensor:
        """Int32 [n] on the host, which knows budgets already; confidences are the one copy it waits for."""
        budgets = torch.tensor([row.budget for row in rows], dtype=torch.int32)
        if not self._threshold or not confidences:
            return budgets
        sure = torch.stack(list(confidences), dim=1) >= self._threshold
        return torch.minimum(budgets, sure.to(torch.int32).cumprod(dim=1, dtype=torch.int32).sum(dim=1).cpu().int())


class _Walk:
    """One call's rows, token by token."""

    def __init__(self, passes: BlockPasses, rows: Sequence[BlockRow], levels: BlockLevels, is_sampled: bool) -> None:
        model, device = passes.model, passes.pool.device
        self._model, self._levels = model, levels
        self._chooser = Chooser([row.asked for row in rows], model.arch.vocab_size, device) if is_sampled else None
        self._positions = passes.pool.slots_tensor([row.root + 1 for row in rows])
        self._previous, self._state = levels.anchors, levels.start
        self.confidences: list[torch.Tensor] = []  # float32 [n] each

    def next(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token `index` of every row, int64 [n] of the target's, and float32 [n, V] when it was drawn from that."""
        said = self._levels.at(index, self._previous, self._state)
        self._state = said.state
        if said.confidence is not None:
            self.confidences.append(said.confidence)
        drawn_from = None
        if self._chooser is None:
            chosen = self._model.target_tokens(said.logits.argmax(dim=1))
        else:
            chosen, drawn_from = self._chooser.choose(self._model.target_logits(said.logits), self._positions + index)
        self._previous = chosen
        return chosen, drawn_from
