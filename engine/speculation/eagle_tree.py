"""Drafting a tree: all rows' trees grow by one level per pass of the head.

Owns the loop; which nodes live is `growing_tree`'s. Called by `eagle_drafter`. Source: EAGLE-2 (arXiv 2406.16858).
Drafts are deterministic: their shape depends on the drafter alone, so any law of the target survives it.
n = rows, h = drafter's width, k = children of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.speculation.draft import Draft
from engine.speculation.draft_step import DraftSpan
from engine.speculation.eagle_passes import EaglePasses, EagleRow
from engine.speculation.growing_tree import ROOT, GrowingTree


@dataclass(frozen=True)
class TreeShape:
    top_k: int  # children of a node, and nodes extended per level
    depth: int  # levels


class _Row:
    """A row and its tree. A node of depth d is the pair (output of its parent, its token) at position root - 1 + d."""

    def __init__(self, row: EagleRow, top_k: int, flat: int) -> None:
        self.tree = GrowingTree(row.budget, top_k)
        self.row = row
        self._outputs = {ROOT: flat}  # node -> where its output is in the newest pass

    def next_span(self, depth: int, flat: int, passes: EaglePasses) -> tuple[DraftSpan, list[int], list[int]]:
        """The nodes to extend, whose outputs will be at `flat` on; where their parents' outputs are; their tokens."""
        root_pair, blocks = self.row.root - 1, self.row.asked.block_ids
        placement, beams = self.tree.place(), self.tree.beams
        if placement.kept is not None:
            passes.pool.compact(blocks, root_pair, placement.kept)
        sources = [self._outputs[self.tree.parent(node)] for node in beams]
        self._outputs = {node: flat + index for index, node in enumerate(beams)}
        span = DraftSpan(
            start=root_pair + 1 + placement.first,
            num_tokens=len(beams),
            block_ids=blocks,
            positions=[root_pair + depth] * len(beams),
            parents=placement.parents,
            root=root_pair,
        )
        return span, sources, [self.tree.token(node) for node in beams]


def draft_trees(passes: EaglePasses, rows: Sequence[EagleRow], width: int, shape: TreeShape) -> Draft:
    """At most `budget` nodes for each of at least one row, `width` columns."""
    trees = [_Row(row, shape.top_k, flat) for flat, row in enumerate(rows)]
    hidden = passes.first(rows)
    _extend(passes, trees, hidden, shape.top_k)
    num_forwards = 1
    for depth in range(1, shape.depth):
        growing = [tree for tree in trees if tree.tree.beams]
        if not growing:
            break
        spans: list[DraftSpan] = []
        sources: list[int] = []
        tokens: list[int] = []
        for tree in growing:
            span, span_sources, span_tokens = tree.next_span(depth, len(tokens), passes)
            spans.append(span)
            sources += span_sources
            tokens += span_tokens
        uploaded = passes.pool.slots_tensor([*sources, *tokens])
        features = passes.head.fed_back(hidden)[uploaded[: len(sources)]]
        hidden = passes.run(spans, features, uploaded[len(sources) :], writes=True)
        _extend(passes, growing, hidden, shape.top_k)
        num_forwards += 1
    return _draft([tree.tree for tree in trees], width, passes.pool.device, num_forwards)


def _extend(passes: EaglePasses, growing: Sequence[_Row], hidden: torch.Tensor, top_k: int) -> None:
    """Give every beam its likeliest children, outputs in the order of the beams.

    The one copy to the host per level: what is extended next, and what it may see, depends on it.
    """
    log_probs = passes.head.logits(hidden).log_softmax(dim=1)
    values, drafted = log_probs.topk(min(top_k, log_probs.shape[1]), dim=1)
    on_host = torch.stack([values.to(torch.float64), passes.head.target_tokens(drafted).to(torch.float64)]).cpu()
    all_values = on_host[0].tolist()
    all_tokens = on_host[1].to(torch.int64).tolist()
    first = 0
    for tree in growing:
        end = first + len(tree.tree.beams)
        tree.tree.extend(all_tokens[first:end], all_values[first:end])
        first = end


def _draft(trees: Sequence[GrowingTree], width: int, device: torch.device, num_forwards: int) -> Draft:
    tokens = torch.zeros(len(trees), width, dtype=torch.int32)
    parents = torch.full((len(trees), width), ROOT, dtype=torch.int32)
    lengths = torch.zeros(len(trees), dtype=torch.int32)
    for index, tree in enumerate(trees):
        node_tokens, node_parents = tree.draft()
        lengths[index] = len(node_tokens)
        tokens[index, : len(node_tokens)] = torch.tensor(node_tokens, dtype=torch.int32)
        parents[index, : len(node_parents)] = torch.tensor(node_parents, dtype=torch.int32)
    return Draft(
        tokens=tokens.to(device),
        lengths=lengths.to(device),
        parents=parents.to(device),
        probs=None,
        roots=None,
        sources=torch.zeros(len(trees), dtype=torch.int8, device=device),
        num_forwards=num_forwards,
    )
