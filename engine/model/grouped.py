"""The fast attention of CPU and CUDA: spans of similar length share one padded call of torch's fused attention.

Owns the grouping; knows the pool only through its tensors. T = tokens of the step, B = spans of a group, Q = its most
queries per span, L = its longest context in slots, H = query heads, K = KV heads, G = H / K, D = head dimension.

Query heads that share a KV head become extra queries of it, so keys are never repeated: at B = 16, L = 512 on two AVX2
cores that is 9 ms for 30 layers' worth of one layer against 29 ms with repeated keys. Contexts are padded to at most
twice their length. A long prompt chunk is cut into tiles of queries, which bounds the mask to G * TILE * L elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.attention import PagedAttention, Pages, SpanLayout

MAX_GROUPED_TOKENS = 32  # spans longer than this run alone: padding others to them would waste more than calls cost
TILE_TOKENS = 256


@dataclass(frozen=True)
class _Piece:
    """Queries of one span: `first` is their offset in the span, `flat` in the step."""

    span: SpanLayout
    flat: int
    first: int
    num_tokens: int

    @property
    def context(self) -> int:
        return self.span.end if self.span.sees_ahead else self.span.start + self.first + self.num_tokens


@dataclass(frozen=True)
class _Group:
    size: int  # B
    num_queries: int  # Q
    flat_start: int  # where the queries begin in the step, when they are contiguous and unpadded
    query_index: torch.Tensor | None  # int64 [B * Q] into the step; None: contiguous and unpadded
    output_index: torch.Tensor | None  # int64 [real queries] into B * Q; with query_index
    target_index: torch.Tensor | None  # int64 [real queries] into the step; with query_index
    first_block: int | None  # B = 1 with consecutive blocks: a view instead of a gather
    blocks: torch.Tensor  # int64 [B * blocks per span]
    num_blocks: int  # per span
    context: int  # L actually read
    mask: torch.Tensor | None  # pool dtype [B, 1, G * Q, L], 0 or -inf; None: everything is visible


@dataclass(frozen=True)
class GroupedLayout:
    groups: tuple[_Group, ...]


class GroupedAttention(PagedAttention[GroupedLayout]):
    def __init__(self, pool: Pages, num_heads: int) -> None:
        super().__init__(pool)
        self._repeats = num_heads // pool.keys.shape[3]

    def layout(self, spans: Sequence[SpanLayout]) -> GroupedLayout:
        short, pieces, flat = [], [], 0
        for span in spans:
            if span.num_tokens <= MAX_GROUPED_TOKENS:
                short.append(_Piece(span, flat, 0, span.num_tokens))
            else:
                pieces += _tiles(span, flat)
            flat += span.num_tokens
        groups = [self._group([piece]) for piece in pieces]
        groups += [self._group(group) for group in _similar_contexts(short)]
        return GroupedLayout(tuple(groups))

    def attend(self, layer: int, queries: torch.Tensor, layout: GroupedLayout) -> torch.Tensor:
        if len(layout.groups) == 1 and layout.groups[0].query_index is None:
            return self._attend_group(layer, queries, layout.groups[0]).reshape(queries.shape[0], -1)
        output = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        for group in layout.groups:
            if group.query_index is None:
                chosen = queries[group.flat_start : group.flat_start + group.size * group.num_queries]
                attended = self._attend_group(layer, chosen, group)
                output[group.flat_start : group.flat_start + chosen.shape[0]] = attended.reshape(chosen.shape[0], -1)
            else:
                assert group.output_index is not None and group.target_index is not None
                attended = self._attend_group(layer, queries.index_select(0, group.query_index), group)
                rows = attended.reshape(group.size * group.num_queries, -1).index_select(0, group.output_index)
                output.index_copy_(0, group.target_index, rows)
        return output

    def _attend_group(self, layer: int, queries: torch.Tensor, group: _Group) -> torch.Tensor:
        """[B * Q, H, D] to [B, Q, H, D]."""
        _, num_heads, head_dim = queries.shape
        num_kv_heads = num_heads // self._repeats
        folded = queries.view(group.size, group.num_queries, num_kv_heads, self._repeats, head_dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(group.size, num_kv_heads, -1, head_dim)  # [B, K, G * Q, D]
        keys, values = self._read(self.pool.keys[layer], group), self._read(self.pool.values[layer], group)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
        unfolded = attended.view(group.size, num_kv_heads, self._repeats, group.num_queries, head_dim)
        return unfolded.permute(0, 3, 1, 2, 4)

    def _read(self, pages: torch.Tensor, group: _Group) -> torch.Tensor:
        """[num_blocks, block_size, K, D] pages of one layer to [B, K, L, D]."""
        if group.first_block is not None:
            chosen = pages[group.first_block : group.first_block + group.num_blocks]
        else:
            chosen = pages.index_select(0, group.blocks)
        by_span = chosen.view(group.size, -1, *pages.shape[2:])[:, : group.context]
        return by_span.transpose(1, 2)

    def _group(self, pieces: Sequence[_Piece]) -> _Group:
        num_queries = max(piece.num_tokens for piece in pieces)
        context = max(piece.context for piece in pieces)
        num_blocks = -(-context // self.pool.block_size)
        table = [_padded(piece, self.pool.block_size, num_blocks) for piece in pieces]
        first_block = table[0][0]
        is_view = len(pieces) == 1 and table[0] == list(range(first_block, first_block + num_blocks))
        is_plain = all(
            piece.num_tokens == num_queries and piece.flat == pieces[0].flat + index * num_queries
            for index, piece in enumerate(pieces)
        )
        index = None if is_plain else self._indices(pieces, num_queries)
        return _Group(
            size=len(pieces),
            num_queries=num_queries,
            flat_start=pieces[0].flat,
            query_index=None if index is None else index[0],
            output_index=None if index is None else index[1],
            target_index=None if index is None else index[2],
            first_block=first_block if is_view else None,
            blocks=self.pool.slots_tensor([block for row in table for block in row]),
            num_blocks=num_blocks,
            context=context,
            mask=self._mask(pieces, num_queries, context),
        )

    def _indices(self, pieces: Sequence[_Piece], num_queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each padded query comes from (padding repeats the last), and where the real ones go."""
        query_index: list[int] = []
        output_index: list[int] = []
        target_index: list[int] = []
        for row, piece in enumerate(pieces):
            real = range(piece.flat, piece.flat + piece.num_tokens)
            query_index += [*real, *[real[-1]] * (num_queries - piece.num_tokens)]
            output_index += range(row * num_queries, row * num_queries + piece.num_tokens)
            target_index += real
        as_tensor = self.pool.slots_tensor
        return as_tensor(query_index), as_tensor(output_index), as_tensor(target_index)

    def _mask(self, pieces: Sequence[_Piece], num_queries: int, context: int) -> torch.Tensor | None:
        if len(pieces) == 1 and num_queries == 1 and pieces[0].span.window is None:
            return None  # the one query is the newest token: it sees all that is read
        first_query = torch.tensor([piece.span.start + piece.first for piece in pieces])
        last_visible = first_query[:, None] + torch.arange(num_queries)  # [B, Q]
        visible = torch.arange(context) <= last_visible[:, :, None]  # [B, Q, L]
        for row, piece in enumerate(pieces):
            if piece.span.sees_ahead:
                visible[row] = torch.arange(context) < piece.context
            if piece.span.window is not None:
                distance = torch.arange(context) - last_visible[row, :, None]
                visible[row] &= distance.abs() < piece.span.window
            if piece.span.parents is not None:
                tree = piece.span.tree_mask()[piece.first : piece.first + piece.num_tokens]
                width = piece.context - piece.span.tree_start
                visible[row, : piece.num_tokens, piece.span.tree_start : piece.context] = tree[:, :width]
        mask = torch.zeros(visible.shape, dtype=self.pool.keys.dtype).masked_fill_(~visible, -torch.inf)
        return mask.to(self.pool.keys.device, non_blocking=True).repeat(1, self._repeats, 1).unsqueeze(1)


def _tiles(span: SpanLayout, flat: int) -> list[_Piece]:
    return [
        _Piece(span, flat + first, first, min(TILE_TOKENS, span.num_tokens - first))
        for first in range(0, span.num_tokens, TILE_TOKENS)
    ]


def _similar_contexts(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Groups in which the longest context is at most twice the shortest (short ones count as 64 slots)."""
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.context):
        if groups and groups[-1][0].context <= 2 * max(piece.context, 64):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [sorted(group, key=lambda piece: piece.flat) for group in groups]


def _padded(piece: _Piece, block_size: int, num_blocks: int) -> list[int]:
    """The blocks of the piece's context, then its own first block: never a block whose contents it does not own."""
    used = piece.span.block_ids[: -(-piece.context // block_size)]
    return [*used, *[used[0]] * (num_blocks - len(used))]
