"""`--speculator uno`: from options and an adapter's files to a drafter that is checked, then loaded.

Owns what is read before any weight: the adapter's shape against the target, how long a draft is, the memory the adapter
takes. Called by the registry.
"""

import logging

from engine.speculation.draft_options import TreeOptions, read_draft_options
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts
from engine.speculation.speculator import Capabilities, Speculator
from engine.speculation.uno import UnoSpeculator
from engine.speculation.uno_layout import load_adapter, num_weight_bytes, read_shape
from protocol.model_files import resolve_adapter

logger = logging.getLogger(__name__)

SOURCE = "uno"
DEFAULT_NUM_DRAFT_TOKENS = 8  # the root and seven guesses: forwards of eight rows, as published
DEFAULT_TREE_DEPTH = 8  # as published
# The root is drawn while drafting, where the verdict's transforms and log-probabilities are not.
UNSUPPORTED_SAMPLING = frozenset(
    {
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "logprobs",
    }
)


class UnoRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts) -> None:
        options = read_draft_options(settings, SOURCE, has_trees=True)
        if settings.draft_model is None:
            raise ValueError(
                "--speculator uno needs --draft-model: the directory of the adapter's adapter_config.json and weights"
            )
        width = settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
        if width < 2:
            raise ValueError(
                f"--num-draft-tokens must be at least 2 with --speculator uno, got {width}: the first of them is the "
                "target's own"
            )
        self._depth = None if options.tree is None else _depth(options.tree, width)
        self._top_k = 0 if options.tree is None else min(options.tree.top_k, facts.vocab_size)
        files = resolve_adapter(settings.draft_model)
        self._tensors = DrafterTensors(files.path)
        self._arch, self._dtype = facts.arch, facts.dtype
        self._shape = read_shape(files.adapter_config, self._tensors, facts.arch)
        self.capabilities = Capabilities(
            max_draft_len=width,
            sources=(SOURCE,),
            tree=options.tree is not None,
            gives_probs=options.is_sampled,
            unsupported_sampling=UNSUPPORTED_SAMPLING,
        )
        self.weight_bytes = num_weight_bytes(self._shape, facts.arch, facts.dtype)
        logger.info(
            "drafter speculator=%s path=%s %s draft_len=%d tree=%s weight_mib=%d dtype=%s",
            SOURCE, self._tensors.directory, self._shape, width, str(options.tree is not None).lower(),
            self.weight_bytes >> 20, str(facts.dtype).removeprefix("torch."),
        )  # fmt: skip

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        if target.pool is None:
            raise ValueError("--speculator uno drafts with the target itself and needs its keys and values")
        adapter = load_adapter(self._tensors, self._shape, self._arch, self._dtype, target.model.device)
        made_for = (
            f", which adapter_config.json says is {self._shape.base_model!r:.80}" if self._shape.base_model else ""
        )
        watch = FirstTokenWatch(
            SOURCE, f"the model the adapter was trained on{made_for}, and whether it is a UNO adapter"
        )
        tree = None if self._depth is None else (self._depth, self._top_k)
        return UnoSpeculator(target.model, target.pool, adapter, self.capabilities, tree, watch)


def _depth(tree: TreeOptions, width: int) -> int:
    """Levels below the root: a row of noise each, and no more than there are nodes."""
    if tree.depth is not None and tree.depth > width - 1:
        raise ValueError(
            f"--tree-depth {tree.depth}: of --num-draft-tokens {width} one is the target's own, which leaves a tree of "
            f"{width - 1} nodes and at most as many levels"
        )
    return tree.depth or min(DEFAULT_TREE_DEPTH, width - 1)
