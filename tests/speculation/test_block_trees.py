"""A block drafter's tree holds the likeliest paths of all there are, by float64 straight lines that try every one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.speculation.draft import Draft
from engine.speculation.recipe import SpeculationSettings
from tests.block_reference import BlockOracle
from tests.speculation.block_harness import Asked, Bench
from tests.speculation.eagle_harness import texts
from tests.tiny import write_tiny_model
from tests.tiny_blocks import PublishedBlock

TOP_K, DEPTH = 3, 4
NO_MARKOV = PublishedBlock("deepspec", anchor="first", num_layers=1, confidence="hidden")
VARIANTS = {
    "z-lab": PublishedBlock("z-lab"),
    "deepspec": PublishedBlock("deepspec", anchor="first", has_head=True),
    "dspark": PublishedBlock("deepspec", anchor="first", markov="vanilla", confidence="markov"),
    "dspark-gated": PublishedBlock("specforge", markov="gated", confidence="hidden", num_layers=1),
    "dspark-rnn": PublishedBlock("speculators", anchor="first", markov="rnn", draft_vocab_size=64, has_head=True),
    "dspark-rnn-drop": PublishedBlock("speculators", anchor="drop", says_anchor=True, markov="rnn", num_layers=1),
}
with_confidence = pytest.mark.parametrize(
    "published", [VARIANTS["dspark"], VARIANTS["dspark-gated"], NO_MARKOV], ids=["token", "gated", "alone"]
)
PathTokens = tuple[int, ...]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def every_path(bench: Bench, oracle: BlockOracle, depth: int, threshold: float = 0.0) -> dict[PathTokens, float]:
    """Log-probability of each path of at most `depth` tokens, each of the `TOP_K` likeliest behind those before it."""
    found: dict[PathTokens, float] = {}
    level: dict[PathTokens, float] = {(): 0.0}
    for _ in range(depth):
        below: dict[PathTokens, float] = {}
        for path, value in level.items():
            if threshold and oracle.confidence(path) < threshold:
                continue
            best = oracle.logits(path).log_softmax(dim=0).topk(TOP_K)
            for log_prob, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                below[(*path, int(bench.token_ids[index]))] = value + log_prob
        found |= below
        level = below
    return found


def paths_of(draft: Draft, row: int) -> list[PathTokens]:
    assert draft.parents is not None
    paths: list[PathTokens] = []
    for node in range(int(draft.lengths[row])):
        parent, token = int(draft.parents[row, node]), int(draft.tokens[row, node])
        assert parent < node
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    return paths


def best_of(found: dict[PathTokens, float], count: int) -> list[PathTokens]:
    ranked = sorted(found, key=lambda path: -found[path])
    values = [found[path] for path in ranked[: count + 1]]
    assert all(before - after > 1e-6 for before, after in pairwise(values)), "too close to tell float32 from float64"
    return ranked[:count]


def tree_bench(target: Path, directory: Path, published: PublishedBlock, nodes: int, threshold: float = 0.0) -> Bench:
    settings = SpeculationSettings(nodes, tree_top_k=TOP_K, tree_depth=DEPTH, confidence_threshold=threshold)
    return Bench(target, directory, published, settings)


@pytest.mark.parametrize("name", VARIANTS)
def test_trees_are_the_likeliest_of_all_paths(target: Path, tmp_path: Path, name: str) -> None:
    """Budgets below a level's width, below the depth, and far above both; rows of a call do not disturb each other."""
    bench = tree_bench(target, tmp_path / "d", VARIANTS[name], nodes=40)
    asked = [Asked(text, budget) for text, budget in zip(texts(5, seed=21), (40, 2, 1, 9, 25), strict=True)]
    draft = bench.drafts(asked)
    assert draft.probs is None and draft.num_forwards == 1 and draft.tokens.shape == (5, 40)
    assert draft.lengths.tolist() == [one.budget for one in asked]
    for row, one in enumerate(asked):
        reach = min(DEPTH, one.budget)  # a small budget shortens the block, which its rows see
        found = every_path(bench, bench.oracle(one.history, reach), reach)
        assert sorted(paths_of(draft, row)) == sorted(best_of(found, one.budget)), f"row {row}"
    assert max(len(path) for row in range(5) for path in paths_of(draft, row)) == DEPTH


@with_confidence
def test_nothing_is_drafted_where_confidence_ends(target: Path, tmp_path: Path, published: PublishedBlock) -> None:
    """The likeliest of the paths whose every place is sure enough; a tree may end up with no node at all."""
    threshold = 0.4
    bench = tree_bench(target, tmp_path / "d", published, 12, threshold)
    asked = [Asked(text, 12) for text in texts(9, seed=4)]
    draft = bench.drafts(asked)
    for row, one in enumerate(asked):
        found = every_path(bench, bench.oracle(one.history, DEPTH), DEPTH, threshold)
        assert sorted(paths_of(draft, row)) == sorted(best_of(found, 12))
    depths = [max((len(path) for path in paths_of(draft, row)), default=0) for row in range(len(asked))]
    assert len(set(depths)) > 1, "all trees ended on the same level: it proved little"


@pytest.mark.parametrize(("name", "depths"), [("z-lab", [2, 1, 0]), ("deepspec", [3, 2, 0])])
def test_a_tree_ends_where_the_drafters_context_does(
    target: Path, tmp_path: Path, name: str, depths: list[int]
) -> None:
    bench = tree_bench(target, tmp_path / "d", replace(VARIANTS[name], context_length=12), nodes=12)
    draft = bench.drafts([Asked(texts(1, shortest=length, longest=length)[0], 12) for length in (10, 11, 13)])
    assert [max(map(len, paths_of(draft, row)), default=0) for row in range(3)] == depths
    assert bench.draft([]).tokens.shape == (0, 12)


def test_a_tree_of_one_child_per_node_is_the_chain(target: Path, tmp_path: Path) -> None:
    published = VARIANTS["dspark"]
    text = texts(1, shortest=12, longest=12)[0]
    chain = Bench(target, tmp_path / "d", published, SpeculationSettings()).drafts([Asked(text, 5)])
    settings = SpeculationSettings(tree_top_k=1)
    tree = Bench(target, tmp_path / "d", published, settings).drafts([Asked(text, 5)])
    assert tree.parents is not None and tree.parents[0].tolist() == [-1, 0, 1, 2, 3]
    assert tree.tokens[0].tolist() == chain.tokens[0].tolist()
