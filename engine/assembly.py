"""An engine put together from its options: executor, policy, books, wire.

Owns the order of construction and the derivation of capacity; nothing after that. Torch is imported only for a real
executor: a simulated engine starts in a moment. Called by engine.__main__.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.accounts import EngineIdentity
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.intake import PolicySettings
from engine.ledger import Ledger
from engine.profiler import NO_DIRECTORY, NO_MODEL, NoProfiles, ProfileDesk, Profiler, Profiles
from engine.recorder import Clocked, TorchRecorder, quiet_kineto
from engine.scheduler import Scheduler
from engine.simulate import SimExecutor, SimSettings
from engine.speculation.batch_table import NO_TABLE, parse_batch_table
from engine.speculation.names import PREDICTION
from engine.speculation.step_cost import StartUpCosts
from engine.wire import Wire
from protocol.curve_keys import load_server_keys
from protocol.messages import SCHEMA_VERSION, Capacity, Hello
from protocol.model_files import (
    ModelFiles,
    Vocabulary,
    read_context_length,
    read_eos_token_ids,
    read_vocabulary,
    resolve,
)
from protocol.served_name import check_served_model_name

if TYPE_CHECKING:  # torch is loaded only for a real executor
    from engine.speculation.recipe import SpeculationSettings

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in total)

SIM_KV_TOKENS = 262_144  # a simulated engine has no memory to fill; enough that nothing is preempted by default
_WORD = re.compile(r"[Ġ▁]?[A-Za-z]{1,16}")  # token strings that are plain text in byte-level and metaspace spelling


@dataclass(frozen=True)
class Mechanism:
    """An executor, and what was decided while building it."""

    executor: Executor
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    max_model_len: int
    max_draft_len: int
    sources: tuple[str, ...]
    unsupported_sampling: frozenset[str]
    lookahead: int
    drafts_trees: bool
    dtype: str
    device: str
    profiles: Profiles
    synthetic: str  # as Hello has it
    start_up_costs: StartUpCosts | None = None


@dataclass(frozen=True)
class Engine:
    """`core.run(profiles)` between `wire.start()` and `wire.close()`."""

    core: EngineCore
    wire: Wire
    hello: Hello
    profiles: ProfileDesk


def assemble(config: EngineConfig, on_progress: OnProgress, epoch: int) -> Engine:
    """Load and connect everything. `epoch`: wall-clock ns at which this process started.

    Raises `ModelFilesError` for a model that cannot be used, ValueError for options that cannot work together.
    """
    keys = load_server_keys(config.curve_key_file, config.curve_client_keys)
    files = resolve(config.model)
    vocabulary = read_vocabulary(files)
    mechanism = _simulated(config, files, vocabulary) if config.executor == "sim" else _real(config, files, on_progress)
    policy = PolicySettings(
        capacity=_capacity(config, mechanism),
        max_draft_len=mechanism.max_draft_len,
        vocab_size=vocabulary.size,
        eos_token_ids=frozenset(mechanism.eos_token_ids),
        unsupported_sampling=mechanism.unsupported_sampling,
        takes_scripts=config.executor == "sim",
        lookahead=mechanism.lookahead,
        takes_predictions=PREDICTION in mechanism.sources,
        queue_timeout_ns=None if config.queue_timeout_s is None else int(config.queue_timeout_s * 1e9),
        drafts_trees=mechanism.drafts_trees,
        draft_len_by_batch=NO_TABLE
        if config.draft_len_by_batch is None
        else parse_batch_table(config.draft_len_by_batch),
        adaptive_draft=config.adaptive_draft,
        start_up_costs=mechanism.start_up_costs,
    )
    ledger = Ledger(
        EngineIdentity(config.engine_id, epoch),
        mechanism.max_draft_len,
        len(mechanism.sources),
        time.monotonic_ns,
        check_laws=config.check_laws,
    )
    scheduler = Scheduler(policy, ledger, time.monotonic_ns, lambda: secrets.randbits(63))
    books = ledger.snapshot(scheduler.load(num_frontends=0))
    hello = Hello(
        engine_id=config.engine_id,
        epoch=epoch,
        schema=SCHEMA_VERSION,
        model_name=check_served_model_name(config.served_model_name or files.name),
        vocab_size=vocabulary.size,
        vocabulary_hash=vocabulary.hash,
        capacity=policy.capacity,
        speculator=config.speculator,
        max_draft_len=mechanism.max_draft_len,
        sources=mechanism.sources,
        executor=config.executor,
        dtype=mechanism.dtype,
        device=mechanism.device,
        step_id=books.step_id,
        counters=books.counters,
        load=books.load,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        synthetic=mechanism.synthetic,
    )
    wire = Wire(config.listen, hello, keys=keys)
    core = EngineCore(wire, wire, scheduler, ledger, mechanism.executor, time.monotonic_ns)
    return Engine(core, wire, hello, ProfileDesk(wire.profiles, mechanism.profiles, config.engine_id, epoch))


def _simulated(config: EngineConfig, files: ModelFiles, vocabulary: Vocabulary) -> Mechanism:
    if config.profile_dir is not None:
        raise ValueError("--profile-dir says nothing with --executor sim, which runs no model")
    kv_tokens = config.kv_cache_tokens or SIM_KV_TOKENS
    eos_token_ids = read_eos_token_ids(files)
    settings = SimSettings(
        max_draft_len=config.sim_draft_len,
        vocab_size=vocabulary.size,
        text_token_ids=tuple(
            token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token is not None and token_id not in eos_token_ids and _WORD.fullmatch(token)
        ),
        acceptance=config.sim_acceptance,
        step_ms=config.sim_step_ms,
        prefill_ms=config.sim_prefill_ms,
    )
    return Mechanism(
        executor=SimExecutor(settings),
        eos_token_ids=eos_token_ids,
        num_blocks=kv_tokens // config.block_size,
        max_model_len=_sim_max_model_len(config, read_context_length(files), kv_tokens),
        max_draft_len=config.sim_draft_len,
        sources=("sim",) if config.sim_draft_len else (),
        unsupported_sampling=frozenset(),
        lookahead=0,
        drafts_trees=False,
        dtype="none",
        device="none",
        profiles=NoProfiles(NO_MODEL),
        synthetic="",
    )


def _sim_max_model_len(config: EngineConfig, context: int, kv_tokens: int) -> int:
    asked = config.max_model_len
    if asked is not None and asked > context:
        raise ValueError(f"--max-model-len {asked} exceeds the model's context of {context} tokens")
    if asked is not None and asked > kv_tokens:
        raise ValueError(f"--max-model-len {asked} exceeds the KV cache of {kv_tokens} tokens (--kv-cache-tokens)")
    return asked or min(context, kv_tokens)


def _real(config: EngineConfig, files: ModelFiles, on_progress: OnProgress) -> Mechanism:
    # OpenMP reads this once, when torch loads. By default its threads spin at every barrier, and as soon as anything
    # else wants a core (a frontend, a client) they spin while the thread they wait for is not running: with two busy
    # neighbours on two cores, 121 matrix products of 6 rows took 2 600 ms, with passive waiting 400 ms.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.profile_dir is not None:
        quiet_kineto()
    from engine.construction import ExecutorSettings, build_executor

    settings = ExecutorSettings(
        dtype=config.dtype,
        device=config.device,
        kv_cache_tokens=config.kv_cache_tokens,
        memory_share=config.memory_share,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        speculator=config.speculator,
        speculation=_speculation(config),
        profile_tokens=config.max_num_batched_tokens if config.adaptive_draft else 0,
    )
    built = build_executor(files, settings, on_progress)
    logger.info(
        "model_loaded path=%s weight_mib=%d kv_mib=%d", files.path, built.weight_bytes >> 20, built.kv_bytes >> 20
    )
    return Mechanism(
        executor=built.executor,
        eos_token_ids=built.eos_token_ids,
        num_blocks=built.num_blocks,
        max_model_len=built.max_model_len,
        max_draft_len=built.capabilities.max_draft_len,
        sources=built.capabilities.sources,
        unsupported_sampling=built.capabilities.unsupported_sampling,
        lookahead=built.capabilities.lookahead,
        drafts_trees=built.capabilities.tree,
        dtype=str(built.dtype).removeprefix("torch."),
        device=str(built.device),
        profiles=_profiles(config, built.executor, on_cuda=built.device.type == "cuda"),
        synthetic=built.capabilities.synthetic,
        start_up_costs=built.start_up_costs,
    )


def _speculation(config: EngineConfig) -> "SpeculationSettings":
    from engine.speculation.recipe import BlockOverrides, EagleOverrides, SpeculationSettings, SuffixSettings

    return SpeculationSettings(
        num_draft_tokens=config.num_draft_tokens,
        lookup_min=config.lookup_min,
        lookup_max=config.lookup_max,
        draft_model=config.draft_model,
        draft_sampling=config.draft_sampling,
        tree_depth=config.tree_depth,
        tree_top_k=config.tree_top_k,
        suffix=SuffixSettings(
            max_depth=config.suffix_max_depth,
            max_cached_requests=config.suffix_max_cached_requests,
            max_cached_tokens=config.suffix_max_cached_tokens,
            factor=config.suffix_factor,
            min_probability=config.suffix_min_probability,
            mode=config.suffix_mode,
            share=config.suffix_share,
        ),
        eagle=EagleOverrides(
            taps=config.eagle_taps,
            final_norm=config.eagle_final_norm,
            norm_before_residual=config.eagle_norm_before_residual,
            norm_output=config.eagle_norm_output,
            feature_norm=config.eagle_feature_norm,
            vocabulary_map=config.eagle_vocabulary_map,
        ),
        block=BlockOverrides(
            taps=config.block_taps,
            final_norm=config.block_final_norm,
            anchor=config.block_anchor,
            causal=config.block_causal,
        ),
        confidence_threshold=config.confidence_threshold,
        mtp_zero_centred=config.mtp_zero_centred,
        synthetic_acceptance=config.synthetic_acceptance,
    )


def _profiles(config: EngineConfig, executor: Clocked, *, on_cuda: bool) -> Profiles:
    if config.profile_dir is None:
        return NoProfiles(NO_DIRECTORY)
    return Profiler(TorchRecorder(executor, on_cuda=on_cuda), Path(config.profile_dir), config.engine_id)


def _capacity(config: EngineConfig, mechanism: Mechanism) -> Capacity:
    queued_tokens = config.max_num_queued_tokens
    return Capacity(
        max_model_len=mechanism.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=mechanism.num_blocks,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=(
            queued_tokens if queued_tokens is not None else config.max_num_queued_requests * mechanism.max_model_len
        ),
        prefix_caching=config.prefix_caching,
    )
