"""`--speculator frozen_kv_mtp`: from options and files to an assistant that is checked, then built.

Owns what is checked of the files before any weight is read, and the one log line of what was settled on. Called by the
registry.
"""

from math import prod

import torch

from engine.speculation.draft_options import read_draft_options
from engine.speculation.drafter_log import DrafterSummary, log_drafter
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.frozen_kv_head import FrozenKvHead
from engine.speculation.frozen_kv_layout import ORDERING, check_tensors, recognise
from engine.speculation.frozen_kv_mtp import FrozenKvSpeculator
from engine.speculation.frozen_kv_weights import load_assistant
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts, draft_model_files
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFilesError

NAME = "frozen_kv_mtp"
DEFAULT_NUM_DRAFT_TOKENS = 3


class FrozenKvRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does. It asks for no keys and values: those are the target's."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts) -> None:
        options = read_draft_options(settings, NAME, has_trees=False)
        if settings.draft_model is None:
            raise ValueError(
                f"--speculator {NAME} needs --draft-model: the directory of the assistant's config.json and weights"
            )
        files = draft_model_files(settings.draft_model)
        if files.kind != "hf":
            raise ModelFilesError(f"{files.path}: an assistant is a Hugging Face directory, not a GGUF file")
        self._tensors = DrafterTensors(files.path)
        self._facts = recognise(files.config, self._tensors, facts)
        expected = check_tensors(self._tensors, self._facts, facts)
        self._context_length = min(self._facts.arch.context_length, facts.max_model_len)
        self.capabilities = Capabilities(
            max_draft_len=settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
            sources=(NAME,),
            gives_probs=options.is_sampled,
            taps=(facts.arch.num_layers,),
        )
        self.weight_bytes = sum(prod(shape) * _dtype_of(name, facts.dtype).itemsize for name, shape in expected.items())
        arch, directory = self._facts.arch, self._tensors.directory
        summary = DrafterSummary(NAME, directory, str(self._facts), arch.context_length, self.weight_bytes)
        log_drafter(summary, facts.max_model_len)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        if target.pool is None:
            raise ValueError(f"--speculator {NAME} reads the target's keys, and was given none")
        weights = load_assistant(self._tensors, self._facts, target.model)
        arch = self._facts.arch
        head = FrozenKvHead(weights, arch.num_heads, arch.norm_eps, target.model)
        watch = FirstTokenWatch(NAME, "the target it was trained for: it reads that model's keys and states")
        return FrozenKvSpeculator(head, target.pool, self.capabilities, self._context_length, watch)


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """As it is kept: norms multiply in float32, token ids are whole numbers."""
    if name == ORDERING:
        return torch.int64
    return torch.float32 if name.endswith("norm.weight") else dtype
