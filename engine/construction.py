"""An executor put together from its options: device, drafter, model, keys and values, in the order their sizes are known.

Owns that order and the derivation of the KV cache's size; nothing after it. Called by `engine.assembly`.
"""

from dataclasses import dataclass, field

import torch

from engine.clock import DeviceClock, HostClock
from engine.kv.pool import KVPool, KVShape
from engine.model.arch import ArchConfig, read_arch
from engine.model.device import choose_device, choose_dtype, default_kv_tokens
from engine.model.grouped import GroupedAttention
from engine.model.weights import Progress, load_model
from engine.model_executor import ModelExecutor
from engine.runner import Runner
from engine.sampling import SamplingModel
from engine.speculation.recipe import Recipe, SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import Capabilities
from engine.speculation.step_cost import StartUpCosts
from engine.start_up_profile import ProfileLimits, measure_costs
from protocol.model_files import ModelFiles, read_eos_token_ids


@dataclass(frozen=True)
class ExecutorSettings:
    """A slice of the engine's options; names and `auto` as there."""

    dtype: str = "auto"
    device: str = "auto"
    kv_cache_tokens: int | None = None
    memory_share: float = 1.0
    block_size: int = 16
    max_num_seqs: int = 64
    max_model_len: int | None = None
    speculator: str = "none"
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    profile_tokens: int = 0  # most tokens of a step whose cost is measured at the start; 0: none is


@dataclass(frozen=True)
class BuiltExecutor:
    """An executor that is ready, and what was decided on the way: the engine's capacity comes from here."""

    executor: "ModelExecutor"
    arch: ArchConfig
    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    capabilities: Capabilities
    weight_bytes: int
    kv_bytes: int
    start_up_costs: StartUpCosts | None  # None: not measured


def build_executor(files: ModelFiles, settings: ExecutorSettings, on_progress: Progress | None = None) -> BuiltExecutor:
    """Load the model and make everything a step needs.

    Raises `ModelFilesError` for files that cannot be used, ValueError naming the option that cannot work.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    eos_token_ids = read_eos_token_ids(files)
    arch = read_arch(files)
    _refuse_long_context(settings, arch)
    longest = settings.max_model_len or arch.context_length
    facts = TargetFacts(arch, dtype, device, settings.block_size, longest, files)
    recipe = prepare(settings.speculator, settings.speculation, facts)
    model = load_model(files, dtype, device, on_progress)
    shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, settings.block_size, dtype)
    num_blocks = _num_blocks(settings, arch, shape, device, recipe)
    max_model_len = _max_model_len(settings, arch, num_blocks)
    pool = KVPool(shape, num_blocks, device)
    speculator = recipe.build(Target(model, num_blocks, settings.block_size, pool), on_progress)
    runner = Runner(model, pool, GroupedAttention(pool, arch.num_heads), speculator.capabilities.taps)
    sampling = SamplingModel(arch.vocab_size, eos_token_ids, device)
    clock = DeviceClock() if device.type == "cuda" else HostClock()
    costs = None
    if settings.profile_tokens and speculator.capabilities.max_draft_len:
        limits = ProfileLimits(settings.max_num_seqs, settings.profile_tokens, num_blocks, max_model_len)
        costs = measure_costs(runner, speculator, sampling, clock, limits)
    return BuiltExecutor(
        executor=ModelExecutor(runner, speculator, sampling, clock),
        arch=arch,
        device=device,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        capabilities=speculator.capabilities,
        weight_bytes=model.weights.num_bytes + recipe.weight_bytes,
        kv_bytes=(shape.bytes_per_token + recipe.kv_bytes_per_token) * num_blocks * settings.block_size,
        start_up_costs=costs,
    )


def _num_blocks(
    settings: ExecutorSettings, arch: ArchConfig, shape: KVShape, device: torch.device, recipe: Recipe
) -> int:
    tokens = settings.kv_cache_tokens
    if tokens is None:
        longest = settings.max_model_len or arch.context_length
        # float32 logits, their transformed copy and a float64 distribution of every verify row; where drafts are drawn
        # also what they were drawn from, float32, and its copy for the rows of the step.
        entry_bytes = 24 if recipe.capabilities.gives_probs else 16
        step_bytes = entry_bytes * settings.max_num_seqs * (1 + recipe.capabilities.max_draft_len) * arch.vocab_size
        most_tokens = settings.max_num_seqs * (longest + settings.block_size)
        token_bytes = shape.bytes_per_token + recipe.kv_bytes_per_token
        reserved_bytes = step_bytes + recipe.weight_bytes  # the drafter's weights come after this
        tokens = default_kv_tokens(
            device, token_bytes, settings.max_model_len or 0, most_tokens, reserved_bytes, settings.memory_share
        )
        tokens += -tokens % settings.block_size if device.type == "cpu" else 0
    if tokens < settings.block_size:
        raise ValueError(f"--kv-cache-tokens {tokens} is less than one --block-size {settings.block_size}")
    return tokens // settings.block_size


def _refuse_long_context(settings: ExecutorSettings, arch: ArchConfig) -> None:
    """Said before the weights are loaded, which takes seconds and most of the memory."""
    asked, most = settings.max_model_len, settings.kv_cache_tokens
    if asked is not None and asked > arch.context_length:
        raise ValueError(f"--max-model-len {asked} exceeds the model's context of {arch.context_length} tokens")
    if asked is not None and most is not None and asked > most:
        raise ValueError(f"--max-model-len {asked} exceeds the KV cache of {most} tokens (--kv-cache-tokens)")


def _max_model_len(settings: ExecutorSettings, arch: ArchConfig, num_blocks: int) -> int:
    kv_tokens = num_blocks * settings.block_size
    asked = settings.max_model_len
    if asked is None:
        return min(arch.context_length, kv_tokens)
    if asked > kv_tokens:
        raise ValueError(f"--max-model-len {asked} exceeds the KV cache of {kv_tokens} tokens (--kv-cache-tokens)")
    return asked
