"""`--speculator dflash` and `dspark`: from options and files to a block drafter that is checked, then built.

Owns what of a checkpoint is read before any weight: its layout, its shapes, what it shares with the target, the memory it
takes. Called by the registry.
"""

from collections.abc import Mapping
from math import prod

import torch

from engine.kv.pool import KVPool, KVShape
from engine.speculation.block_drafter import BlockPlan, BlockSpeculator
from engine.speculation.block_layout import BlockFacts
from engine.speculation.block_model import BlockConventions, BlockModel
from engine.speculation.block_passes import BlockPasses, BlockSight
from engine.speculation.block_shape import read_shape
from engine.speculation.block_tree import BlockTree
from engine.speculation.block_weights import BlockShape, expected_tensors, load_weights, read_map
from engine.speculation.draft_options import MAX_TREE_DEPTH, DraftOptions, read_draft_options
from engine.speculation.drafter_log import DrafterSummary, log_drafter, vocabulary_line
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.drafter_weights import MAPS
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.recipe import (
    Progress,
    Recipe,
    SpeculationSettings,
    Target,
    TargetFacts,
    draft_model_files,
)
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFilesError

DEFAULT_TREE_NODES = 16  # as EAGLE's trees have here


def prepare_dflash(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    return _BlockRecipe(settings, facts, "dflash")


def prepare_dspark(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    """DFlash with a Markov head, and with a confidence head or without."""
    return _BlockRecipe(settings, facts, "dspark")


class _BlockRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts, name: str) -> None:
        self._name = name
        options = read_draft_options(settings, name, has_trees=True)
        self._tensors, config = _open(settings, name)
        shape = read_shape(self._tensors, config, settings.block, facts)
        _check_name(self._tensors, shape, name)
        self._tensors.check(
            expected_tensors(shape), MAPS if shape.has_map else frozenset(), f"a {name} drafter of this config.json"
        )
        read_map(self._tensors, shape)  # refused now rather than after the target is loaded
        self._shape = shape
        taps = tuple(dict.fromkeys(shape.facts.taps))  # the target gives each once
        tree = _tree(shape, options)
        self._plan = BlockPlan(
            is_sampled=options.is_sampled,
            tree=tree,
            threshold=_threshold(self._tensors, shape, settings),
            context_length=min(shape.arch.context_length, facts.max_model_len),
            tap_order=tuple(taps.index(tap) for tap in shape.facts.taps),
        )
        self.capabilities = Capabilities(
            max_draft_len=_length(shape.facts, settings) if tree is None else _num_nodes(tree, settings),
            sources=(name,),
            tree=tree is not None,
            gives_probs=options.is_sampled,
            taps=taps,
        )
        arch = shape.arch
        self.kv_shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, facts.block_size, facts.dtype)
        self.weight_bytes = _weight_bytes(shape, facts.dtype)
        log_drafter(self._summary(), facts.max_model_len)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        weights = load_weights(self._tensors, self._shape, target.model)
        facts, target_arch = self._shape.facts, target.model.arch
        conventions = BlockConventions(
            last_layer=tuple(tap == target_arch.num_layers for tap in facts.taps),
            target_eps=target_arch.norm_eps,
            embedding_scale=facts.embedding_scale,
            output_multiplier=facts.output_multiplier,
            softcap=facts.softcap,
        )
        assert self.kv_shape is not None
        passes = BlockPasses(
            BlockModel(self._shape.arch, weights, conventions),
            KVPool(self.kv_shape, target.num_blocks, target.model.device),
            BlockSight(facts.windows, facts.causal),
            facts.mask_token_id,
            facts.anchor_rows,
        )
        watch = FirstTokenWatch(self._name, _suspects(facts))
        return BlockSpeculator(passes, self._plan, self.capabilities, watch)

    def _summary(self) -> DrafterSummary:
        shape = self._shape
        markov = "none" if shape.markov is None else f"{shape.markov.kind}/{shape.markov.rank}"
        vocabulary = vocabulary_line(
            shape.draft_vocab_size,
            shape.arch.vocab_size,
            has_embedding=shape.has_embedding,
            has_head=shape.has_head,
        )
        conventions = (
            f"{shape.facts} layers={shape.arch.num_layers} markov={markov} "
            f"confidence={str(shape.has_confidence).lower()} {vocabulary} tree={str(self.capabilities.tree).lower()}"
        )
        return DrafterSummary(
            self._name, self._tensors.directory, conventions, shape.arch.context_length, self.weight_bytes
        )


def _open(settings: SpeculationSettings, name: str) -> tuple[DrafterTensors, Mapping[str, object]]:
    """Tensors and config.json."""
    if settings.draft_model is None:
        raise ValueError(
            f"--speculator {name} needs --draft-model: the directory of the drafter's config.json and weights"
        )
    files = draft_model_files(settings.draft_model)
    if files.kind != "hf":
        raise ModelFilesError(f"{files.path}: a {name} drafter is a Hugging Face directory, not a GGUF file")
    return DrafterTensors(files.path), files.config


def _check_name(tensors: DrafterTensors, shape: BlockShape, name: str) -> None:
    is_dspark = shape.markov is not None or shape.has_confidence
    right = "dspark" if is_dspark else "dflash"
    if name != right:
        has = "has a Markov or confidence head" if is_dspark else "has no Markov head"
        raise ValueError(f"{tensors.directory} {has}: it is a {right} drafter, say --speculator {right}")


def _threshold(tensors: DrafterTensors, shape: BlockShape, settings: SpeculationSettings) -> float:
    threshold = settings.confidence_threshold
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"--confidence-threshold must be between 0 and 1, got {threshold}")
    if threshold and not shape.has_confidence:
        raise ValueError(f"--confidence-threshold says nothing: {tensors.directory} has no confidence head")
    return threshold


def _length(facts: BlockFacts, settings: SpeculationSettings) -> int:
    asked, most = settings.num_draft_tokens, facts.max_tokens
    if asked is not None and asked > most:
        raise ValueError(
            f"--num-draft-tokens {asked} is more than the {most} that a block of {facts.block_size} rows drafts, "
            "which is what the drafter was trained for"
        )
    return most if asked is None else asked


def _tree(shape: BlockShape, options: DraftOptions) -> BlockTree | None:
    """None: chains. A block's rows are a tree's levels."""
    if options.tree is None:
        return None
    deepest = min(shape.facts.max_tokens, MAX_TREE_DEPTH)
    depth = deepest if options.tree.depth is None else options.tree.depth
    if depth > deepest:
        raise ValueError(
            f"--tree-depth must be between 1 and {deepest}, one level per token that a block of "
            f"{shape.facts.block_size} rows drafts, got {depth}"
        )
    return BlockTree(min(options.tree.top_k, shape.draft_vocab_size), depth)


def _num_nodes(tree: BlockTree, settings: SpeculationSettings) -> int:
    asked = settings.num_draft_tokens
    if asked is not None and asked > tree.num_paths:
        raise ValueError(
            f"--num-draft-tokens {asked}: a tree of {tree.depth} levels with {tree.top_k} children per node has "
            f"{tree.num_paths}"
        )
    return min(DEFAULT_TREE_NODES, tree.num_paths) if asked is None else asked


def _weight_bytes(shape: BlockShape, dtype: torch.dtype) -> int:
    sizes = expected_tensors(shape).values()
    total = sum(prod(size) * (torch.float32 if len(size) == 1 else dtype).itemsize for size in sizes)
    if shape.has_map and not shape.has_head:  # the target's rows, copied
        total += shape.draft_vocab_size * shape.arch.hidden_size * dtype.itemsize
    return total


def _suspects(facts: BlockFacts) -> str:
    taps = ",".join(map(str, facts.taps))
    return (
        f"which rows of a block predict which tokens (--block-anchor, now {facts.anchor}), then the hidden states it "
        f"reads (--block-taps, now {taps}), what its rows see (--block-causal, now {facts.causal}) and "
        f"--block-final-norm (now {facts.final_norm})"
    )
