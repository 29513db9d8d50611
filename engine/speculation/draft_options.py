"""How a drafter with weights was asked to choose its tokens: the likeliest or drawn ones, in a chain or in a tree.

Owns the checks of `--draft-sampling`, `--tree-top-k` and `--tree-depth` that hold for every such drafter, and their wording;
how deep a tree of one drafter can be is that drafter's matter. Never knows a drafter. Called by their recipes.
"""

from dataclasses import dataclass

from engine.speculation.choice import DraftSampling
from engine.speculation.recipe import SpeculationSettings

MAX_TREE_TOP_K = 32
MAX_TREE_DEPTH = 16


@dataclass(frozen=True)
class TreeOptions:
    """A tree that was asked for."""

    top_k: int  # children of a node, 1..MAX_TREE_TOP_K
    depth: int | None  # levels below the root, 1..MAX_TREE_DEPTH; None: the drafter's own default


@dataclass(frozen=True)
class DraftOptions:
    """What was asked for. Trees are never drawn."""

    is_sampled: bool
    tree: TreeOptions | None  # None: a chain


def read_draft_options(settings: SpeculationSettings, speculator: str, *, has_trees: bool) -> DraftOptions:
    """Raises ValueError naming the option that cannot work; `has_trees`: whether the drafter can draft trees at all."""
    tree = _tree(settings)
    if tree is not None and not has_trees:
        raise ValueError(f"--tree-top-k says nothing with --speculator {speculator}, which drafts chains, not trees")
    asked = settings.draft_sampling
    if asked is not None and asked not in tuple(DraftSampling):
        raise ValueError(f"--draft-sampling must be one of {', '.join(DraftSampling)}, got {asked!r:.40}")
    is_sampled = asked == DraftSampling.SAMPLED
    if is_sampled and tree is not None:
        raise ValueError("--draft-sampling sampled cannot be had with --tree-top-k: a tree holds the likeliest tokens")
    return DraftOptions(is_sampled, tree)


def _tree(settings: SpeculationSettings) -> TreeOptions | None:
    top_k, depth = settings.tree_top_k or 0, settings.tree_depth
    if not 0 <= top_k <= MAX_TREE_TOP_K:
        raise ValueError(f"--tree-top-k must be between 0 and {MAX_TREE_TOP_K}, got {top_k}")
    if depth is not None and not 1 <= depth <= MAX_TREE_DEPTH:
        raise ValueError(f"--tree-depth must be between 1 and {MAX_TREE_DEPTH}, got {depth}")
    if top_k == 0:
        if depth is not None:
            raise ValueError("--tree-depth says nothing without --tree-top-k: a chain is as deep as it is long")
        return None
    return TreeOptions(top_k, depth)
