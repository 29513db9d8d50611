"""Attention that sees ahead or through a window: the fast one, the reference and a mask written out agree."""

import math

import pytest
import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import ReferenceAttention, SpanLayout
from engine.model.grouped import GroupedAttention

HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 8, 4, 60


def spans(sees_ahead: bool, window: int | None) -> list[SpanLayout]:
    """Rows of many lengths, so that queries and contexts are padded; one whose block is a single token."""
    shapes = [(0, 5), (9, 3), (21, 1), (40, 6), (11, 6)]
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    made = []
    for start, count in shapes:
        needed = -(-(start + count) // BLOCK_SIZE)
        made.append(SpanLayout(start, count, tuple(blocks[:needed]), sees_ahead=sees_ahead, window=window))
        del blocks[:needed]
    return made


def dense(pool: KVPool, queries: torch.Tensor, span: SpanLayout, sees_ahead: bool, window: int | None) -> torch.Tensor:
    slots = [pool.slot(span.block_ids, position) for position in range(span.end)]
    keys, values = (part[0].flatten(0, 1)[slots] for part in (pool.keys, pool.values))
    out = []
    for index in range(span.num_tokens):
        at = span.start + index
        seen = [(sees_ahead or key <= at) and (window is None or abs(at - key) < window) for key in range(span.end)]
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = keys[:, group] @ queries[index, head] / math.sqrt(DIM)
            weights = scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(dim=0)
            heads.append(weights @ values[:, group])
        out.append(torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("sees_ahead", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_every_sight_is_that_of_a_mask_written_out(sees_ahead: bool, window: int | None, alone: bool) -> None:
    torch.manual_seed(0)
    pool = KVPool(KVShape(1, KV_HEADS, DIM, BLOCK_SIZE, torch.float64), NUM_BLOCKS, torch.device("cpu"))
    pool.keys.normal_(), pool.values.normal_()
    rows = spans(sees_ahead, window)
    for group in [[row] for row in rows] if alone else [rows]:
        queries = torch.randn(sum(row.num_tokens for row in group), HEADS, DIM, dtype=torch.float64)
        parts = queries.split([row.num_tokens for row in group])
        wanted = torch.cat([dense(pool, part, row, sees_ahead, window) for part, row in zip(parts, group, strict=True)])
        for attention in (ReferenceAttention(pool), GroupedAttention(pool, HEADS)):
            got = attention.attend(0, queries, attention.layout(group))  # type: ignore[arg-type]
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
