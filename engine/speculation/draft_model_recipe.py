"""`--speculator draft_model`: from options and files to a draft model that is checked, then loaded.

Owns what is read of the draft model before its weights: shape, vocabulary, context, the memory it takes. Called by the
registry.
"""

from math import prod

import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.arch import ArchConfig, read_arch
from engine.model.weights import expected_shapes, load_model
from engine.speculation.draft_model import DraftModelSpeculator
from engine.speculation.draft_options import read_draft_options
from engine.speculation.drafter_log import DrafterSummary, log_drafter
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts, draft_model_files
from engine.speculation.speculator import Capabilities, Speculator
from engine.speculation.vocabulary import TokenMap, share_vocabulary

SOURCE = "draft_model"
DEFAULT_NUM_DRAFT_TOKENS = 4


class DraftModelRecipe(Recipe):
    """Raises ValueError naming the option that cannot work, `ModelFilesError` for files that cannot be used."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts) -> None:
        options = read_draft_options(settings, SOURCE, has_trees=False)
        if settings.draft_model is None:
            raise ValueError(
                "--speculator draft_model needs --draft-model: a smaller model with the target's tokenizer"
            )
        if facts.files is None:
            raise ValueError("--speculator draft_model needs a target with files: tokens are compared by their strings")
        self._files = draft_model_files(settings.draft_model)
        arch = read_arch(self._files)
        self._vocabulary = share_vocabulary(facts.files, self._files, facts.vocab_size, arch.vocab_size)
        self._dtype = facts.dtype
        # The target as its own draft model proves that nothing is lost, and costs no memory for weights.
        self._is_target = self._files.path == facts.files.path
        self.capabilities = Capabilities(
            max_draft_len=settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
            sources=(SOURCE,),
            gives_probs=options.is_sampled,
        )
        self.kv_shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, facts.block_size, facts.dtype)
        self.weight_bytes = 0 if self._is_target else _weight_bytes(arch, facts.dtype)
        conventions = (
            f"layers={arch.num_layers} width={arch.hidden_size} kv_bytes_per_token={self.kv_bytes_per_token} "
            f"vocabulary={self._vocabulary}"
        )
        summary = DrafterSummary(SOURCE, self._files.path, conventions, arch.context_length, self.weight_bytes)
        log_drafter(summary, facts.max_model_len)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        device = target.model.device
        is_target = self._is_target
        model = target.model if is_target else load_model(self._files, self._dtype, device, on_progress)
        assert self.kv_shape is not None
        pool = KVPool(self.kv_shape, target.num_blocks, device)
        return DraftModelSpeculator(model, pool, TokenMap(self._vocabulary, device), self.capabilities)


def _weight_bytes(arch: ArchConfig, dtype: torch.dtype) -> int:
    """Of the model in memory: matrices and biases in `dtype`; norms and the rotation's frequencies in float32."""
    elements = {name: prod(shape) for name, shape in expected_shapes(arch).items()}
    in_float32 = sum(count for name, count in elements.items() if name.endswith("norm.weight"))
    rotation = arch.head_dim // 2
    return (sum(elements.values()) - in_float32) * dtype.itemsize + (in_float32 + rotation) * torch.float32.itemsize
