"""One row's dynamic draft tree while it grows level by level: which nodes to extend, and which to propose in the end.

Owns the candidates of one tree and the slots of those that have keys; without tensors, never runs a model. Used by
`eagle_tree`. Source: EAGLE-2 (arXiv 2406.16858, section 4: expansion and reranking).

Every candidate ever seen stays in the running, and the best `limit` of all of them are the draft. A node's value is the
sum of the log-probabilities on its path, so it is never above its parent's; ties go to the older node. Hence the best of
any moment are closed under parents, and a candidate that is not among them now never will be: it is dropped at once,
which is exact, and which bounds the keys that must be kept to `limit` slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True)
class _Node:
    value: float  # log-probability of the path to it
    parent: int  # node number, ROOT for a child of the root
    token: int


@dataclass(frozen=True)
class Placement:
    """Where the keys of the nodes to extend go: slot i of a tree is the i-th behind its root."""

    kept: tuple[int, ...] | None  # slots whose keys move to the front first, ascending; None: nothing moves
    first: int  # slot of the first node to extend; the others follow
    parents: tuple[int, ...]  # slot of each slot's parent, -1 for the root; up to the last node to extend


class GrowingTree:
    """Nodes are numbered in the order of their generation."""

    def __init__(self, limit: int, top_k: int) -> None:
        self._limit = limit
        self._top_k = top_k
        self._nodes: list[_Node] = []
        self._best: list[int] = []  # at most `limit` nodes, best first
        self._slots: list[int] = []  # the node in each slot
        self._beams: tuple[int, ...] = (ROOT,)

    @property
    def beams(self) -> tuple[int, ...]:
        """The nodes to extend next, best first; empty when nothing below could be among the best."""
        return self._beams

    def token(self, node: int) -> int:
        return self._nodes[node].token

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def extend(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Children of each beam, in the order of `beams`. The `top_k` best new ones are the next beams."""
        first = len(self._nodes)
        for beam, beam_tokens, beam_log_probs in zip(self._beams, tokens, log_probs, strict=True):
            value = 0.0 if beam == ROOT else self._nodes[beam].value
            for token, log_prob in zip(beam_tokens, beam_log_probs, strict=True):
                self._nodes.append(_Node(value + log_prob, beam, token))
        pool = [*self._best, *range(first, len(self._nodes))]
        self._best = sorted(pool, key=lambda node: (-self._nodes[node].value, node))[: self._limit]
        self._beams = tuple(node for node in self._best if node >= first)[: self._top_k]

    def place(self) -> Placement:
        """Give every beam a slot. Slots of nodes that are out of the running are given up when there are too few."""
        kept = None
        if len(self._slots) + len(self._beams) > self._limit:
            best = set(self._best)
            kept = tuple(slot for slot, node in enumerate(self._slots) if node in best)
            self._slots = [self._slots[slot] for slot in kept]
        first = len(self._slots)
        self._slots += self._beams
        slot_of = {node: slot for slot, node in enumerate(self._slots)} | {ROOT: ROOT}
        return Placement(kept, first, tuple(slot_of[self._nodes[node].parent] for node in self._slots))

    def draft(self) -> tuple[list[int], list[int]]:
        """Tokens and parents (-1: the root) of the best nodes, parents before children."""
        chosen = sorted(self._best)
        index_of = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
        nodes = [self._nodes[node] for node in chosen]
        return [node.token for node in nodes], [index_of[node.parent] for node in nodes]
