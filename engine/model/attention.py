"""Attention over paged keys and values: the seam, and the pure-torch reference that is every other one's oracle.

Owns how a step's queries read the pool; never decides what is in it. Chosen once at construction of an executor.
T = tokens of the step, H = query heads, K = KV heads, D = head dimension. The fast path is `engine.model.grouped`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

Layout = TypeVar("Layout")


class Pages(Protocol):
    """What attention needs of a KV pool (`engine.kv.pool.KVPool`). A slot is block id * block_size + offset."""

    keys: torch.Tensor  # [layers, num_blocks, block_size, K, D]
    values: torch.Tensor  # like keys

    @property
    def block_size(self) -> int: ...

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def slot(self, block_ids: Sequence[int], position: int) -> int: ...

    def slots_tensor(self, slots: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class SpanLayout:
    """One row's tokens of a step: queries at slots start, start + 1, ... that see all before them.

    `parents` makes the tokens behind a root a tree: slot root + 1 + i is node i, its parent is node parents[i] (-1: the
    root), and it sees what is before the root, the root, its ancestors and itself. None: a chain, plain causality. The
    root is the span's first token, or lies before it when the first nodes were computed in an earlier call.
    `sees_ahead`: every token sees the whole span (the block of a block drafter). `window`: it sees only slots less than
    so many away, before and behind (sliding-window attention). Neither goes with a tree.
    """

    start: int
    num_tokens: int
    block_ids: tuple[int, ...]  # cover slots 0 .. start + num_tokens - 1
    parents: tuple[int, ...] | None = None  # of every node up to the span's last
    root: int | None = None  # slot, at most `start`; None: `start`
    sees_ahead: bool = False
    window: int | None = None  # slots; None: all

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def tree_start(self) -> int:
        """The root's slot."""
        return self.start if self.root is None else self.root

    def tree_mask(self) -> torch.Tensor:
        """bool [num_tokens, end - tree_start]: what each token sees of the root and the nodes."""
        assert self.parents is not None
        return ancestor_mask(self.parents)[self.start - self.tree_start :]


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """bool [1 + N, 1 + N] for N nodes behind a root: entry (i, j) says that i sees j."""
    size = 1 + len(parents)
    visible = torch.eye(size, dtype=torch.bool)
    visible[:, 0] = True
    for node, parent in enumerate(parents):
        visible[1 + node] |= visible[1 + parent]
    return visible


class PagedAttention(ABC, Generic[Layout]):
    """Softmax attention of new tokens over their rows' pages, with grouped query heads."""

    def __init__(self, pool: Pages) -> None:
        self.pool = pool

    @abstractmethod
    def layout(self, spans: Sequence[SpanLayout]) -> Layout:
        """Everything that is the same in all layers, for spans that follow each other in the flat step of T tokens."""

    @abstractmethod
    def attend(self, layer: int, queries: torch.Tensor, layout: Layout) -> torch.Tensor:
        """[T, H, D] queries to [T, H * D], after this layer's keys and values were written to the pool."""


class ReferenceAttention(PagedAttention[tuple[SpanLayout, ...]]):
    """One sequence at a time and nothing clever: exact to read, slow to run."""

    def layout(self, spans: Sequence[SpanLayout]) -> tuple[SpanLayout, ...]:
        return tuple(spans)

    def attend(self, layer: int, queries: torch.Tensor, layout: tuple[SpanLayout, ...]) -> torch.Tensor:
        outputs, offset = [], 0
        for span in layout:
            outputs.append(self._span(layer, queries[offset : offset + span.num_tokens], span))
            offset += span.num_tokens
        return torch.cat(outputs)

    def _span(self, layer: int, queries: torch.Tensor, span: SpanLayout) -> torch.Tensor:
        slots = self.pool.slots_tensor([self.pool.slot(span.block_ids, position) for position in range(span.end)])
        repeats = queries.shape[1] // self.pool.keys.shape[3]
        keys = self.pool.keys[layer].flatten(0, 1)[slots].repeat_interleave(repeats, dim=1)  # [L, H, D]
        values = self.pool.values[layer].flatten(0, 1)[slots].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("thd,lhd->htl", queries, keys) / math.sqrt(queries.shape[-1])
        scores = scores.masked_fill(~self._visible(span).to(scores.device), -torch.inf)
        weights = torch.softmax(scores.float(), dim=-1).to(values.dtype)
        return torch.einsum("htl,lhd->thd", weights, values).flatten(1)

    @staticmethod
    def _visible(span: SpanLayout) -> torch.Tensor:
        """bool [num_tokens, end]."""
        visible = torch.ones(span.num_tokens, span.end, dtype=torch.bool)
        if not span.sees_ahead:
            visible = visible.tril(span.start)
        if span.window is not None:
            visible = visible.triu(span.start - span.window + 1).tril(span.start + span.window - 1)
        if span.parents is not None:
            visible[:, span.tree_start :] = span.tree_mask()
        return visible
