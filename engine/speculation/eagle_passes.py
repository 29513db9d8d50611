"""Runs a head of pairs over rows: keys of what was committed, and passes that draft.

Owns the head, its pages and their attention; never decides what is drafted. The head is an EAGLE head or an MTP module,
which both read (feature, token behind it). Called by `eagle_drafter`, `eagle_chain` and `eagle_tree`. T = pairs, n = rows,
h = drafter's width. The root is the last committed token, at position `root`; the newest pair of
a row (feature of root - 1, root) sits at slot root - 1, and what is drafted behind it in the slots from `root` on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.kv.pool import KVPool
from engine.model.arch import ArchConfig
from engine.model.attention import PagedAttention
from engine.model.grouped import GroupedAttention
from engine.speculation.draft_step import DraftSpan, DraftStep
from engine.speculation.speculator import CommittedSpan, DraftRow

Layout = TypeVar("Layout")


class PairHead(Protocol):
    """What reads pairs: `engine.speculation.eagle_head.EagleHead`, which says what the methods mean, or an MTP module."""

    arch: ArchConfig

    def features(self, taps: torch.Tensor) -> torch.Tensor: ...

    def write_keys(
        self,
        attention: PagedAttention[Layout],
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...

    def forward(
        self,
        attention: PagedAttention[Layout],
        layout: Layout,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def target_tokens(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class EagleRow:
    """One row that drafts: at most `budget` tokens, at least one."""

    asked: DraftRow
    budget: int
    feature: torch.Tensor  # [h], of the position before the root

    @property
    def root(self) -> int:
        return len(self.asked.token_ids) - 1

    @property
    def newest_pair(self) -> DraftSpan:
        return DraftSpan(self.root - 1, 1, self.asked.block_ids)


class EaglePasses:
    def __init__(self, head: PairHead, pool: KVPool) -> None:
        self.head = head
        self.pool = pool
        self._attention = GroupedAttention(pool, head.arch.num_heads)

    def ingest(self, spans: Sequence[CommittedSpan], taps: torch.Tensor) -> torch.Tensor:
        """Write the keys of committed pairs, taps [T, n, t] of all spans; the features [spans, h] of their last ones."""
        step = DraftStep.of([DraftSpan(span.start, len(span.token_ids), span.block_ids) for span in spans], self.pool)
        behind = [token for span in spans for token in (*span.token_ids[1:], span.next_token_id)]
        features = self.head.features(taps)
        tokens = self.pool.slots_tensor(behind)
        self.head.write_keys(self._attention, features, tokens, step.positions, step.slots)
        return features.index_select(0, step.last)

    def run(
        self, spans: Sequence[DraftSpan], features: torch.Tensor, token_ids: torch.Tensor, writes: bool
    ) -> torch.Tensor:
        """The layer's outputs [T, h] for the spans' pairs; without `writes` their keys are there already."""
        step = DraftStep.of(spans, self.pool)
        layout = self._attention.layout(step.layouts)
        slots = step.slots if writes else None
        return self.head.forward(self._attention, layout, features, token_ids, step.positions, slots)

    def first(self, rows: Sequence[EagleRow]) -> torch.Tensor:
        """Outputs [n, h] of each row's newest pair: they predict the token behind the root."""
        self._clear_ahead(rows)
        roots = self.pool.slots_tensor([row.asked.token_ids[-1] for row in rows])
        features = torch.stack([row.feature for row in rows])
        return self.run([row.newest_pair for row in rows], features, roots, writes=False)

    def _clear_ahead(self, rows: Sequence[EagleRow]) -> None:
        """Zero the slots from the root to the end of the last block a row drafts into.

        Whole blocks are read under a mask, and a block may have been somebody else's: 0 * NaN would be NaN.
        """
        slots: list[int] = []
        for row in rows:
            end = row.root + row.budget
            end += -end % self.pool.block_size
            slots += (self.pool.slot(row.asked.block_ids, position) for position in range(row.root, end))
        self.pool.clear(self.pool.slots_tensor(slots))
