"""Rows laid out flat over shared pages: slots, positions, and a refusal instead of a foreign slot."""

import pytest
import torch

from engine.kv.pool import KVPool, KVShape
from engine.speculation.draft_step import DraftSpan, DraftStep

POOL = KVPool(KVShape(1, 1, 2, block_size=4, dtype=torch.float32), 8, torch.device("cpu"))


def test_spans_follow_each_other_at_their_own_slots() -> None:
    step = DraftStep.of([DraftSpan(3, 3, (5, 2)), DraftSpan(0, 1, (7,)), DraftSpan(6, 2, (0, 1))], POOL)
    assert step.positions.tolist() == [3, 4, 5, 0, 6, 7]
    assert step.slots.tolist() == [23, 8, 9, 28, 6, 7]
    assert step.last.tolist() == [2, 3, 5] and step.counts == (3, 1, 2)
    assert [(one.start, one.num_tokens) for one in step.layouts] == [(3, 3), (0, 1), (6, 2)]


def test_tree_nodes_rotate_by_depth_and_live_by_number() -> None:
    span = DraftSpan(4, 2, (5, 2), positions=(4, 4), parents=(-1, -1), root=3)
    step = DraftStep.of([span], POOL)
    assert step.positions.tolist() == [4, 4] and step.slots.tolist() == [8, 9]
    assert step.layouts[0].tree_mask().int().tolist() == [[1, 1, 0], [1, 0, 1]]


def test_slots_outside_the_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="needs slots up to 9; 2 blocks cover it"):
        DraftStep.of([DraftSpan(7, 2, (5, 2))], POOL)
