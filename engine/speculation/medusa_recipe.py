"""`--speculator medusa`: from options and files to heads that are checked, then loaded.

Owns what of a checkpoint is read before any weight: its layout, its shapes, how long a draft its heads allow, the memory
they take. Called by the registry.
"""

import logging

import torch

from engine.speculation.draft_options import TreeOptions, read_draft_options
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.medusa import MedusaSpeculator
from engine.speculation.medusa_heads import load_heads, num_weight_bytes
from engine.speculation.medusa_layout import MedusaShape, read_shape
from engine.speculation.medusa_tree import FixedTree, best_tree
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts, draft_model_files
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFilesError

logger = logging.getLogger(__name__)

SOURCE = "medusa"
DEFAULT_TREE_NODES = 16


class MedusaRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts) -> None:
        options = read_draft_options(settings, SOURCE, has_trees=True)
        if settings.draft_model is None:
            raise ValueError(
                "--speculator medusa needs --draft-model: the directory of the heads' config.json and weights"
            )
        files = draft_model_files(settings.draft_model)
        if files.kind != "hf":
            raise ModelFilesError(f"{files.path}: Medusa heads are a Hugging Face directory, not a GGUF file")
        self._tensors = DrafterTensors(files.path)
        self._shape = read_shape(files.config, self._tensors, facts.arch.hidden_size, facts.vocab_size)
        self._tree = None if options.tree is None else _tree(settings, options.tree, self._shape)
        max_draft_len = _chain_len(settings, self._shape) if self._tree is None else len(self._tree)
        self._num_heads = max_draft_len if self._tree is None else 1 + max(self._tree.heads)
        self._base_model = files.config.get("base_model_name_or_path")
        self.capabilities = Capabilities(
            max_draft_len=max_draft_len,
            sources=(SOURCE,),
            tree=self._tree is not None,
            gives_probs=options.is_sampled,
            taps=(facts.arch.num_layers,),
        )
        self.weight_bytes = num_weight_bytes(self._shape, self._num_heads, facts.dtype)
        self._log(facts.dtype)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        heads = load_heads(self._tensors, self._shape, self._num_heads, target.model)
        made_for = f", which config.json says is {self._base_model!r:.80}" if self._base_model else ""
        watch = FirstTokenWatch(SOURCE, f"the model the heads were trained on{made_for}")
        return MedusaSpeculator(heads, self._tree, self.capabilities, watch)

    def _log(self, dtype: torch.dtype) -> None:
        logger.info(
            "drafter speculator=%s path=%s %s used_heads=%d draft_len=%d tree=%s weight_mib=%d dtype=%s",
            SOURCE, self._tensors.directory, self._shape, self._num_heads, self.capabilities.max_draft_len,
            str(self._tree is not None).lower(), self.weight_bytes >> 20, str(dtype).removeprefix("torch."),
        )  # fmt: skip


def _chain_len(settings: SpeculationSettings, shape: MedusaShape) -> int:
    asked = settings.num_draft_tokens
    if asked is not None and asked > shape.num_heads:
        raise ValueError(
            f"--num-draft-tokens {asked}: {shape.num_heads} heads draft a chain of {shape.num_heads} tokens at most; "
            "--tree-top-k makes a tree of more"
        )
    return asked or shape.num_heads


def _tree(settings: SpeculationSettings, asked: TreeOptions, shape: MedusaShape) -> FixedTree:
    depth = asked.depth or shape.num_heads
    if depth > shape.num_heads:
        raise ValueError(f"--tree-depth must be between 1 and {shape.num_heads}, one level per head, got {depth}")
    num_choices = min(asked.top_k, shape.draft_vocab_size)
    tree = best_tree(settings.num_draft_tokens or DEFAULT_TREE_NODES, depth, num_choices)
    if settings.num_draft_tokens is not None and len(tree) < settings.num_draft_tokens:
        raise ValueError(
            f"--num-draft-tokens {settings.num_draft_tokens}: a tree of {depth} levels with "
            f"{num_choices} children per node has {len(tree)}"
        )
    return tree
