"""One forward of a drafter's own model: rows laid out flat over pages that share the target's block ids.

Owns the layout only: positions, slots, what attention sees. Used by every drafter with keys and values of its own
(draft model, EAGLE, MTP). T = tokens of the forward, B = spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.kv.pool import KVPool
from engine.model.attention import SpanLayout


@dataclass(frozen=True)
class DraftSpan:
    """Tokens one row feeds, at slots start, start + 1, ... of its blocks."""

    start: int
    num_tokens: int
    block_ids: tuple[int, ...]  # cover the slots
    positions: Sequence[int] | None = None  # for the rotation; None: the slots (a tree's nodes: root + depth)
    parents: tuple[int, ...] | None = None  # of every tree node up to the span's last, see `SpanLayout`
    root: int | None = None  # slot of the tree's root; None: `start`


@dataclass(frozen=True)
class DraftStep:
    """Spans one behind the other, uploaded at once."""

    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]
    last: torch.Tensor  # int64 [B], flat index of each span's last token
    layouts: tuple[SpanLayout, ...]  # B, for `PagedAttention.layout`
    counts: tuple[int, ...]  # B, tokens of each span

    @classmethod
    def of(cls, spans: Sequence[DraftSpan], pool: KVPool) -> "DraftStep":
        """Every span has at least one token. Raises ValueError for one whose blocks do not cover its slots."""
        slots: list[int] = []
        positions: list[int] = []
        for span in spans:
            end = span.start + span.num_tokens
            if end > len(span.block_ids) * pool.block_size:
                raise ValueError(f"a draft needs slots up to {end}; {len(span.block_ids)} blocks cover it")
            slots += (pool.slot(span.block_ids, position) for position in range(span.start, end))
            positions += range(span.start, end) if span.positions is None else span.positions
        counts = tuple(span.num_tokens for span in spans)
        last = [end - 1 for end in accumulate(counts)]
        uploaded = pool.slots_tensor([*positions, *slots, *last])
        sizes = [len(positions), len(slots), len(last)]
        flat_positions, flat_slots, flat_last = torch.split_with_sizes(uploaded, sizes)
        layouts = tuple(
            SpanLayout(span.start, span.num_tokens, span.block_ids, span.parents, span.root) for span in spans
        )
        return cls(flat_positions, flat_slots, flat_last, layouts, counts)
