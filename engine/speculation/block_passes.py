"""Runs a block drafter's layers over rows: keys of what was committed, and blocks that draft.

Owns the model, its pages and their attention; never decides what is drafted. Called by `block_drafter`.
n = rows, T = tokens, K = farthest reach of a row in the call, h = drafter's width. The root, a block's anchor, is the
last committed token, at position `root`; the block's rows have the slots from there on, which are overwritten later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv.pool import KVPool
from engine.model.attention import SpanLayout
from engine.model.grouped import GroupedAttention, GroupedLayout
from engine.speculation.block_model import BlockModel
from engine.speculation.draft_step import DraftSpan, DraftStep
from engine.speculation.speculator import CommittedSpan, DraftRow


@dataclass(frozen=True)
class BlockRow:
    """One row that drafts."""

    asked: DraftRow
    budget: int  # most tokens of the draft, at least one; a tree's nodes
    reach: int  # places behind the root that its block predicts, 1 .. budget; a chain's tokens, a tree's levels

    @property
    def root(self) -> int:
        return len(self.asked.token_ids) - 1


@dataclass(frozen=True)
class BlockSight:
    """What the rows of a block see, per layer."""

    windows: tuple[int | None, ...]  # tokens; None: all
    causal: tuple[bool, ...]  # only what is before them, else the whole block


@dataclass(frozen=True)
class BlockOutput:
    """What a pass says. Entries of rows that reach less far than K repeat their last one."""

    drafting: torch.Tensor  # [n, K, h], of the rows that predict the tokens behind the root
    anchors: torch.Tensor  # [n, h], of the anchors


class BlockPasses:
    def __init__(
        self, model: BlockModel, pool: KVPool, sight: BlockSight, mask_token_id: int, anchor_rows: int
    ) -> None:
        """`anchor_rows`: rows at a block's beginning that draft nothing, 0 or 1."""
        self.model = model
        self.pool = pool
        self.anchor_rows = anchor_rows
        self._sight = sight
        self._mask_token_id = mask_token_id
        self._attention = GroupedAttention(pool, model.arch.num_heads)

    def ingest(self, spans: Sequence[CommittedSpan], taps: torch.Tensor) -> None:
        """Write the keys of committed positions, taps [T, n, t] of all spans."""
        step = DraftStep.of([DraftSpan(span.start, len(span.token_ids), span.block_ids) for span in spans], self.pool)
        self.model.write_context(self._attention, self.model.features(taps), step.positions, step.slots)

    def run(self, rows: Sequence[BlockRow]) -> BlockOutput:
        """One pass over the blocks of at least one row."""
        self._clear_ahead(rows)
        sizes = [row.reach + self.anchor_rows for row in rows]
        spans = [DraftSpan(row.root, size, row.asked.block_ids) for row, size in zip(rows, sizes, strict=True)]
        step = DraftStep.of(spans, self.pool)
        tokens: list[int] = []
        drafting: list[int] = []
        anchors: list[int] = []
        longest = max(row.reach for row in rows)
        for row, size in zip(rows, sizes, strict=True):
            first = len(tokens)
            tokens += [row.asked.token_ids[-1], *[self._mask_token_id] * (size - 1)]
            anchors.append(first)
            drafting += (first + min(self.anchor_rows + index, size - 1) for index in range(longest))
        uploaded = self.pool.slots_tensor([*tokens, *drafting, *anchors])
        flat, wanted, roots = torch.split_with_sizes(uploaded, [len(tokens), len(drafting), len(anchors)])
        layouts = self._layouts(step.layouts)
        hidden = self.model.forward(self._attention, layouts, flat, step.positions, step.slots)
        by_row = hidden.index_select(0, wanted).view(len(rows), longest, -1)
        return BlockOutput(by_row, hidden.index_select(0, roots))

    def _layouts(self, spans: Sequence[SpanLayout]) -> dict[int, GroupedLayout]:
        """By layer; layers that see the same share one."""
        made: dict[tuple[int | None, bool], GroupedLayout] = {}
        by_layer: dict[int, GroupedLayout] = {}
        for layer, sees in enumerate(zip(self._sight.windows, self._sight.causal, strict=True)):
            if sees not in made:
                window, is_causal = sees
                made[sees] = self._attention.layout(
                    [
                        SpanLayout(span.start, span.num_tokens, span.block_ids, sees_ahead=not is_causal, window=window)
                        for span in spans
                    ]
                )
            by_layer[layer] = made[sees]
        return by_layer

    def _clear_ahead(self, rows: Sequence[BlockRow]) -> None:
        """Zero the slots from the root to the end of the last block a row drafts into.

        Whole blocks are read under a mask, and a block may have been somebody else's: 0 * NaN would be NaN.
        """
        slots: list[int] = []
        for row in rows:
            end = row.root + row.reach + self.anchor_rows
            end += -end % self.pool.block_size
            slots += (self.pool.slot(row.asked.block_ids, position) for position in range(row.root, end))
        self.pool.clear(self.pool.slots_tensor(slots))
