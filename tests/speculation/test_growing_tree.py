"""A dynamic tree is what EAGLE-2 draws up with every candidate kept, and its keys never need more slots than it has nodes."""

import random
from collections.abc import Sequence

import pytest

from engine.speculation.growing_tree import ROOT, GrowingTree

Path = tuple[int, ...]


class RandomModel:
    """Log-probabilities of a path's children, best first; ties and certainties happen."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self._seed, self._num_tokens = seed, num_tokens

    def children(self, path: Path, count: int) -> tuple[list[int], list[float]]:
        generator = random.Random(f"{self._seed} {path}")
        scored = [(generator.choice((0.0, -0.5, -1.0, -generator.random() * 3)), t) for t in range(self._num_tokens)]
        best = sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:count]
        return [token for _, token in best], [value for value, _ in best]


def by_the_paper(model: RandomModel, limit: int, top_k: int, depth: int) -> tuple[list[int], list[int]]:
    """arXiv 2406.16858, section 4, without any economy: all candidates of all levels, the best of them in the end."""
    nodes: list[tuple[float, int, int, Path]] = []  # value, parent, token, path
    beams: list[tuple[float, int, Path]] = [(0.0, ROOT, ())]
    for _ in range(depth):
        level = []
        for value, number, path in beams:
            for token, log_prob in zip(*model.children(path, top_k), strict=True):
                level.append(len(nodes))
                nodes.append((value + log_prob, number, token, (*path, token)))
        best = sorted(level, key=lambda node: (-nodes[node][0], node))[:top_k]
        beams = [(nodes[node][0], node, nodes[node][3]) for node in best]
    chosen = sorted(sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))[:limit])
    index_of = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
    return [nodes[node][2] for node in chosen], [index_of[nodes[node][1]] for node in chosen]


def grow(model: RandomModel, limit: int, top_k: int, depth: int) -> tuple[list[int], list[int]]:
    """As a drafter does it, with a memory of slots that holds each node's path as if it were its keys."""
    tree = GrowingTree(limit, top_k)
    memory: dict[int, Path] = {ROOT: ()}
    paths: dict[int, Path] = {ROOT: ()}
    for level in range(depth):
        if not tree.beams:
            break
        if level:
            placement = tree.place()
            if placement.kept is not None:
                kept = [memory[slot] for slot in placement.kept]
                memory = {ROOT: (), **dict(enumerate(kept))}
            for offset, node in enumerate(tree.beams):
                slot = placement.first + offset
                assert slot < limit, "a node was given a slot behind the budget"
                parent = placement.parents[slot]
                assert memory[parent] == paths[tree.parent(node)], "the parent's keys are not where they are looked for"
                memory[slot] = paths[node] = (*memory[parent], tree.token(node))
            ancestors_are_in_place(placement.parents, memory)
        extended = [model.children(paths[node], top_k) for node in tree.beams]
        tree.extend([tokens for tokens, _ in extended], [values for _, values in extended])
    return tree.draft()


def ancestors_are_in_place(parents: Sequence[int], memory: dict[int, Path]) -> None:
    for slot, parent in enumerate(parents):
        assert memory[slot][:-1] == memory[parent]


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 2, 4, 7, 20, 64])
def test_the_draft_is_the_papers_whatever_is_dropped_on_the_way(limit: int, top_k: int) -> None:
    for seed in range(8):
        for depth in (1, 2, 3, 6):
            model = RandomModel(seed, num_tokens=6)
            wanted = by_the_paper(model, limit, top_k, depth)
            assert grow(model, limit, top_k, depth) == wanted, f"seed {seed}, depth {depth}"
            tokens, parents = wanted
            assert len(tokens) <= limit
            assert all(parent < node for node, parent in enumerate(parents))


def test_slots_are_given_up_when_deeper_nodes_push_older_ones_out() -> None:
    """Without that, four nodes would need keys in three slots."""
    tree = GrowingTree(limit=3, top_k=3)
    tree.extend([[1, 2, 3]], [[-1.0, -1.1, -1.2]])
    assert tree.place().first == 0
    tree.extend([[4, 5, 6], [4, 5, 6], [4, 5, 6]], [[-0.01, -5, -6], [-7, -8, -9], [-7, -8, -9]])
    placement = tree.place()
    assert placement.kept == (0, 1) and placement.parents == (ROOT, ROOT, 0)
    assert tree.draft() == ([1, 2, 4], [ROOT, ROOT, 0])


def test_growing_ends_when_nothing_below_could_be_chosen() -> None:
    tree = GrowingTree(limit=2, top_k=2)
    tree.extend([[1, 2]], [[-0.1, -0.2]])
    tree.extend([[3, 4], [3, 4]], [[-1.0, -2.0], [-1.0, -2.0]])
    assert tree.beams == ()
