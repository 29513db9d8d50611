"""The one tree that Medusa heads fill: which ranks of which heads are worth a node, decided before anything is drafted.

Owns the choice of nodes and the table of expectations behind it; without tensors, never sees a text. Used by
`medusa_recipe` and `medusa`. Source: Medusa (arXiv 2401.10774, section 2.3.1 and its appendix on sparse trees): of all
paths of (head, rank) those are drafted whose product of the heads' accuracies is largest. The table of accuracies is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

ROOT = -1

# Expected, not measured: published heads are right three times in five about the first token, less the further ahead
# they look, and what they rank lower is right by an inverse square. All ranks of a head then add up to just below 1. Only
# the order of the products matters, so an error here costs a few nodes at the tree's edge and never a token of the answer.
FIRST_ACCURACY = 0.6
DECAY_PER_HEAD = 0.7


def expected_accuracy(head: int, rank: int) -> float:
    """How often the token that head `head` ranks `rank` (both from 0) is right, given that the path before it was."""
    return FIRST_ACCURACY * DECAY_PER_HEAD**head / (rank + 1) ** 2


@dataclass(frozen=True)
class FixedTree:
    """Nodes, the most promising first; a parent comes before its children, so the first k nodes are the best k."""

    heads: tuple[int, ...]  # of each node, the head whose choice it is: its depth less 1
    ranks: tuple[int, ...]  # which choice of that head, 0 is the likeliest
    parents: tuple[int, ...]  # node, ROOT for a child of the root

    def __len__(self) -> int:
        return len(self.heads)


def best_tree(num_nodes: int, num_heads: int, top_k: int) -> FixedTree:
    """The `num_nodes` best paths that `num_heads` heads with `top_k` choices each can form; fewer where there are fewer."""
    nodes: list[_Node] = []
    # Only the best member of each family that is no node yet waits: a sibling is never better than the one before it.
    waiting = [_offer(nodes, ROOT, 0, 0)]
    while waiting and len(nodes) < num_nodes:
        *_, chosen = heappop(waiting)
        nodes.append(chosen)
        if chosen.rank + 1 < top_k:
            heappush(waiting, _offer(nodes, chosen.parent, chosen.head, chosen.rank + 1))
        if chosen.head + 1 < num_heads:
            heappush(waiting, _offer(nodes, len(nodes) - 1, chosen.head + 1, 0))
    return FixedTree(
        heads=tuple(node.head for node in nodes),
        ranks=tuple(node.rank for node in nodes),
        parents=tuple(node.parent for node in nodes),
    )


@dataclass(frozen=True)
class _Node:
    value: float  # expected to be right: the product of the accuracies on its path
    parent: int
    head: int
    rank: int


def _offer(nodes: Sequence[_Node], parent: int, head: int, rank: int) -> tuple[float, int, int, int, _Node]:
    """What a heap sorts: the best first, then the shallowest, then the older parent's, then the likelier choice."""
    before = 1.0 if parent == ROOT else nodes[parent].value
    node = _Node(before * expected_accuracy(head, rank), parent, head, rank)
    return (-node.value, head, parent, rank, node)
