"""`--speculator mtp`: from options and files to a drafter that is checked, then built.

Owns where the modules are looked for (the target's own files, unless --draft-model names others), and what is checked of
them before any weight is read. Called by the registry.
"""

from math import prod

import torch

from engine.kv.pool import KVPool, KVShape
from engine.speculation.draft_options import read_draft_options
from engine.speculation.drafter_log import DrafterSummary, log_drafter
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.eagle_drafter import EaglePlan, EagleSpeculator
from engine.speculation.eagle_passes import EaglePasses
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.mtp_head import MtpModule, TargetNorm
from engine.speculation.mtp_layout import MtpFacts, recognise
from engine.speculation.mtp_modules import MtpModulesSpeculator
from engine.speculation.mtp_weights import check_tensors, load_modules
from engine.speculation.recipe import Progress, Recipe, SpeculationSettings, Target, TargetFacts, draft_model_files
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFiles, ModelFilesError

NAME = "mtp"
DEFAULT_NUM_DRAFT_TOKENS = 3  # of one module that is fed with its own output


class MtpRecipe(Recipe):
    """Raises as `engine.speculation.registry.prepare` does."""

    def __init__(self, settings: SpeculationSettings, facts: TargetFacts) -> None:
        options = read_draft_options(settings, NAME, has_trees=False)
        files = _files(settings, facts)
        self._tensors = DrafterTensors(files.path)
        elsewhere = "" if settings.draft_model is not None else "; --draft-model DIR can name files that have them"
        self._facts = recognise(files.config, self._tensors, settings.mtp_zero_centred, elsewhere)
        _check_fit(self._tensors, self._facts, facts)
        expected = check_tensors(self._tensors, self._facts)
        arch, num_modules = self._facts.arch, self._facts.num_modules
        self._context_length = min(arch.context_length, facts.max_model_len)
        self.capabilities = Capabilities(
            max_draft_len=_draft_length(settings, num_modules),
            sources=(NAME,),
            gives_probs=options.is_sampled,
            taps=(facts.arch.num_layers,),
            lookahead=num_modules,
        )
        self.kv_shape = KVShape(num_modules, arch.num_kv_heads, arch.head_dim, facts.block_size, facts.dtype)
        self.weight_bytes = sum(
            prod(size) * (torch.float32 if len(size) == 1 else facts.dtype).itemsize for size in expected.values()
        )
        directory = self._tensors.directory
        summary = DrafterSummary(NAME, directory, str(self._facts), arch.context_length, self.weight_bytes)
        log_drafter(summary, facts.max_model_len)

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        model = target.model
        norm = TargetNorm(model.weights.final_norm, model.arch.norm_eps)
        modules = [
            MtpModule(self._facts.arch, weights, index, norm)
            for index, weights in enumerate(load_modules(self._tensors, self._facts, model))
        ]
        assert self.kv_shape is not None
        pool = KVPool(self.kv_shape, target.num_blocks, model.device)
        watch = FirstTokenWatch(NAME, f"--mtp-zero-centred, now {str(self._facts.zero_centred).lower()}")
        if len(modules) > 1:
            return MtpModulesSpeculator(modules, pool, self.capabilities, self._context_length, watch)
        plan = EaglePlan(None, self.capabilities.gives_probs, self._context_length, tap_order=(0,))
        return EagleSpeculator(EaglePasses(modules[0], pool), plan, self.capabilities, watch)


def _files(settings: SpeculationSettings, facts: TargetFacts) -> ModelFiles:
    files = facts.files if settings.draft_model is None else draft_model_files(settings.draft_model)
    if files is None:
        raise ValueError("--speculator mtp needs a target with files: its MTP modules are among them")
    if files.kind != "hf":
        whose = (
            "the target is one; --draft-model can name the directory" if settings.draft_model is None else "give one"
        )
        raise ModelFilesError(
            f"{files.path}: a GGUF file has no MTP modules, a Hugging Face directory can have them ({whose})"
        )
    return files


def _check_fit(tensors: DrafterTensors, modules: MtpFacts, facts: TargetFacts) -> None:
    """The modules read the target's states, and its embedding and head."""
    arch, target = modules.arch, facts.arch
    for what, own, wanted in (
        ("a width", arch.hidden_size, target.hidden_size),
        ("a vocabulary", arch.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise tensors.refusal(f"its MTP modules were made for {what} of {own}; the target has {wanted}")


def _draft_length(settings: SpeculationSettings, num_modules: int) -> int:
    asked = settings.num_draft_tokens
    if num_modules == 1:
        return asked or DEFAULT_NUM_DRAFT_TOKENS
    if asked is not None and asked > num_modules:
        raise ValueError(f"--num-draft-tokens {asked}: each of the {num_modules} MTP modules drafts one token")
    return asked or num_modules
