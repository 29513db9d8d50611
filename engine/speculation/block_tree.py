"""Drafting a tree from one pass of a block drafter: the likeliest paths through what its rows say, best first.

Owns which places are read for which beams; which nodes live is `growing_tree`'s. Called by `block_drafter`.
Rows without a Markov head do not see each other's tokens, so one copy to the host tells all of a tree: its paths are
products of the rows' marginals. With one, what a place says depends on the token before it (DSpark), so a tree grows level by
level, still without another pass: a level costs the Markov head's small product for its beams, and a copy.

Every node that is among the best `budget` so far is extended, so the draft is exactly the `budget` likeliest paths of at
most `depth` tokens, each among the `top_k` likeliest behind its parent. Deterministic: where confidence ends a path depends on
the drafter alone, so any law of the target survives it. n = rows, m = beams of a level, k = children of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.speculation.block_levels import BlockLevels, Said
from engine.speculation.block_passes import BlockPasses, BlockRow
from engine.speculation.draft import Draft
from engine.speculation.growing_tree import ROOT, GrowingTree


@dataclass(frozen=True)
class BlockTree:
    """A tree's shape."""

    top_k: int  # children of a node
    depth: int  # levels

    @property
    def num_paths(self) -> int:
        """Nodes of the full tree."""
        return sum(self.top_k**level for level in range(1, self.depth + 1))


class _Children(NamedTuple):
    """Of one node, best first; none where confidence ends."""

    tokens: list[int]
    log_probs: list[float]


class _Beam(NamedTuple):
    row: int
    token: int  # of the node, or the root's
    parent: int  # which of the beams of the level before its parent was; at the first level the row


class BlockTreeDrafting:
    """`threshold`: least confidence at a place for anything to be drafted there, 0 drafts everywhere."""

    def __init__(self, passes: BlockPasses, width: int, top_k: int, threshold: float) -> None:
        self._passes = passes
        self._width = width
        self._top_k = top_k
        self._threshold = threshold

    def draft(self, rows: Sequence[BlockRow]) -> Draft:
        """At most `budget` nodes on `reach` levels for each of at least one row."""
        levels = BlockLevels(self._passes, rows, self._passes.run(rows))
        trees = [GrowingTree(row.budget, row.budget) for row in rows]
        if levels.is_independent:
            self._grow_apart(trees, rows, levels)
        else:
            self._grow_together(trees, rows, levels)
        return _draft(trees, self._width, self._passes.pool.device)

    def _grow_apart(self, trees: Sequence[GrowingTree], rows: Sequence[BlockRow], levels: BlockLevels) -> None:
        said = [levels.at(place, levels.anchors, None) for place in range(levels.num_places)]
        by_place = self._children(said)
        for index, (tree, row) in enumerate(zip(trees, rows, strict=True)):
            for place in range(row.reach):
                children = by_place[place][index]
                tree.extend([children.tokens] * len(tree.beams), [children.log_probs] * len(tree.beams))

    def _grow_together(self, trees: Sequence[GrowingTree], rows: Sequence[BlockRow], levels: BlockLevels) -> None:
        beams = [_Beam(index, row.asked.token_ids[-1], index) for index, row in enumerate(rows)]
        state = levels.start
        for place in range(levels.num_places):
            beams = [beam for beam in beams if place < rows[beam.row].reach]
            if not beams:
                return
            uploaded = self._passes.pool.slots_tensor([value for beam in beams for value in beam]).view(-1, 3)
            before = None if state is None else state.index_select(0, uploaded[:, 2])
            said = levels.at(place, uploaded[:, 1], before, rows=uploaded[:, 0])
            state = said.state
            (children,) = self._children([said])
            beams = _extend(trees, beams, children)

    def _children(self, said: Sequence[Said]) -> list[list[_Children]]:
        """For each of the places the children of its beams; as many beams at each. The one copy to the host."""
        parts = []
        for one in said:
            values, drafted = one.logits.log_softmax(dim=1).topk(min(self._top_k, one.logits.shape[1]), dim=1)
            tokens = self._passes.model.target_tokens(drafted)
            sure = torch.ones_like(values[:, :1]) if one.confidence is None else one.confidence[:, None]
            parts.append(torch.cat([part.to(torch.float64) for part in (sure, values, tokens)], dim=1))
        found: list[list[list[float]]] = torch.stack(parts).cpu().tolist()
        return [[self._read(*beam) for beam in place] for place in found]

    def _read(self, confidence: float, *numbers: float) -> _Children:
        if confidence < self._threshold:
            return _Children([], [])
        half = len(numbers) // 2
        return _Children([int(number) for number in numbers[half:]], list(numbers[:half]))


def _extend(trees: Sequence[GrowingTree], beams: Sequence[_Beam], children: Sequence[_Children]) -> list[_Beam]:
    """The next level's beams. `beams` are grouped by row, each row's in its tree's order."""
    following: list[_Beam] = []
    first = 0
    while first < len(beams):
        row = beams[first].row
        tree = trees[row]
        index_of = {node: first + index for index, node in enumerate(tree.beams)}
        end = first + len(index_of)
        tree.extend([one.tokens for one in children[first:end]], [one.log_probs for one in children[first:end]])
        following += (_Beam(row, tree.token(node), index_of[tree.parent(node)]) for node in tree.beams)
        first = end
    return following


def _draft(trees: Sequence[GrowingTree], width: int, device: torch.device) -> Draft:
    """Lengths, sources and the trees' shape stay on the host, which knows them already."""
    tokens = torch.zeros(len(trees), width, dtype=torch.int32)
    parents = torch.full((len(trees), width), ROOT, dtype=torch.int32)
    lengths = []
    for index, tree in enumerate(trees):
        node_tokens, node_parents = tree.draft()
        lengths.append(len(node_tokens))
        tokens[index, : len(node_tokens)] = torch.tensor(node_tokens, dtype=torch.int32)
        parents[index, : len(node_parents)] = torch.tensor(node_parents, dtype=torch.int32)
    return Draft(
        tokens=tokens.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        parents=parents,
        probs=None,
        roots=None,
        sources=torch.zeros(len(trees), dtype=torch.int8),
        num_forwards=1,
    )
