"""Which field of the engine's totals, load and description is which Prometheus series.

Owns the mapping as data, and nothing else: a test holds its keys equal to the fields of `Counters`, `Load`, `Hello` and
`Capacity`, so that a new field cannot be forgotten. Names, labels and buckets are vLLM's where vLLM has them; everything
of ours starts with `drafthouse:`. Rendered by `frontend.metrics`.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a family. `per` spreads a list field over a label: draft position, or name of the draft source."""

    family: str  # without _total
    labels: tuple[tuple[str, str], ...] = ()
    per: Literal["position", "source"] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    kind: Kind
    help: str
    needs_speculator: bool = False  # absent when no drafter is configured


FAMILIES: dict[str, Family] = {
    # vLLM's
    "vllm:num_requests_running": Family("gauge", "Requests in the running batch."),
    "vllm:num_requests_waiting": Family("gauge", "Requests waiting to be run."),
    "vllm:kv_cache_usage_perc": Family("gauge", "Share of the KV cache in use, 0 to 1."),
    "vllm:cache_config_info": Family("gauge", "The KV cache's configuration, as labels; always 1."),
    "vllm:prefix_cache_queries": Family("counter", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": Family("counter", "Prompt tokens found in the prefix cache."),
    "vllm:num_preemptions": Family("counter", "Preemptions."),
    "vllm:prompt_tokens": Family("counter", "Prompt tokens, computed and cached, counted when a prompt is done."),
    "vllm:prompt_tokens_cached": Family("counter", "Prompt tokens taken from the prefix cache."),
    "vllm:generation_tokens": Family("counter", "Tokens generated and committed."),
    "vllm:iteration_tokens_total": Family("histogram", "Prompt and generated tokens per step."),
    "vllm:spec_decode_num_drafts": Family("counter", "Verified drafts of at least one token.", True),
    "vllm:spec_decode_num_draft_tokens": Family("counter", "Draft tokens verified.", True),
    "vllm:spec_decode_num_accepted_tokens": Family("counter", "Draft tokens accepted.", True),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Family("counter", "Draft tokens accepted, by position.", True),
    # ours
    "drafthouse:steps": Family("counter", "Engine steps by outcome."),
    "drafthouse:verify_rounds": Family("counter", "Verify rounds: with a draft, or plain decoding."),
    "drafthouse:first_tokens": Family("counter", "Tokens given by the last chunk of a prompt."),
    "drafthouse:spec_non_draft_tokens": Family("counter", "The target's own tokens in verify rounds."),
    "drafthouse:spec_cut_tokens": Family("counter", "Tokens of a round behind EOS, a stop token or max_tokens."),
    "drafthouse:stop_trimmed_tokens": Family("counter", "Committed tokens behind a stop string."),
    "drafthouse:spec_refused_tokens": Family("counter", "Draft tokens refused before verification, by reason."),
    "drafthouse:spec_aborted_rounds": Family("counter", "Rounds whose request was closed while they ran."),
    "drafthouse:spec_draft_depth": Family("counter", "Depth of verified drafts, summed."),
    "drafthouse:spec_draft_tokens_by_source": Family("counter", "Draft tokens verified, by draft source."),
    "drafthouse:spec_accepted_tokens_by_source": Family("counter", "Draft tokens accepted, by draft source."),
    "drafthouse:overshoot_rows": Family("counter", "Rows run for a request that had already ended."),
    "drafthouse:recomputed_tokens": Family("counter", "Tokens computed again after a preemption."),
    "drafthouse:target_forwards": Family("counter", "Forwards of the target model."),
    "drafthouse:draft_forwards": Family("counter", "Forwards of a draft model."),
    "drafthouse:refused_messages": Family("counter", "Malformed, oversized or foreign messages the engine refused."),
    "drafthouse:frontends_cut_off": Family("counter", "Frontends cut off for being silent or behind."),
    "drafthouse:step_seconds": Family("histogram", "Wall time of one engine step."),
    "drafthouse:observe_seconds": Family("histogram", "Time drafters take to learn what was committed, per step."),
    "drafthouse:draft_seconds": Family("histogram", "Time to propose drafts, per step."),
    "drafthouse:verify_seconds": Family("histogram", "Time of the target's forward, per step."),
    "drafthouse:accept_seconds": Family("histogram", "Time to accept and sample, per step."),
    "drafthouse:waiting_tokens": Family("gauge", "Prompt tokens of waiting requests."),
    "drafthouse:kv_blocks_used": Family("gauge", "KV blocks held by live sequences."),
    "drafthouse:kv_blocks": Family("gauge", "KV blocks in all."),
    "drafthouse:frontends_attached": Family("gauge", "Frontends attached to the engine."),
    "drafthouse:paused_rows": Family("gauge", "Rows held back because their frontend is behind."),
    "drafthouse:engine_draining": Family("gauge", "1 while the engine finishes its last requests."),
    "drafthouse:engine_epoch_start_time_seconds": Family("gauge", "When this engine process started (unix time)."),
    "drafthouse:engine_info": Family("gauge", "What the engine is, as labels; always 1."),
    "drafthouse:engine_step": Family("gauge", "Number of the last published step this frontend has seen."),
    "drafthouse:engine_up": Family("gauge", "1 while this frontend is attached to the engine."),
}

COUNTER_SERIES: dict[str, tuple[Series, ...]] = {
    "steps_ok": (Series("drafthouse:steps", (("outcome", "ok"),)),),
    "steps_empty": (Series("drafthouse:steps", (("outcome", "empty"),)),),
    "steps_failed": (Series("drafthouse:steps", (("outcome", "failed"),)),),
    "prompt_tokens": (Series("vllm:prompt_tokens"),),
    "prompt_tokens_cached": (Series("vllm:prompt_tokens_cached"),),
    "prefix_cache_queries": (Series("vllm:prefix_cache_queries"),),
    "prefix_cache_hits": (Series("vllm:prefix_cache_hits"),),
    "recomputed_tokens": (Series("drafthouse:recomputed_tokens"),),
    "num_preemptions": (Series("vllm:num_preemptions"),),
    "generation_tokens": (Series("vllm:generation_tokens"),),
    "first_tokens": (Series("drafthouse:first_tokens"),),
    "non_draft_tokens": (Series("drafthouse:spec_non_draft_tokens"),),
    "cut_tokens": (Series("drafthouse:spec_cut_tokens"),),
    "trimmed_tokens": (Series("drafthouse:stop_trimmed_tokens"),),
    "draft_rounds": (
        Series("vllm:spec_decode_num_drafts"),
        Series("drafthouse:verify_rounds", (("kind", "draft"),)),
    ),
    "plain_rounds": (Series("drafthouse:verify_rounds", (("kind", "plain"),)),),
    "draft_tokens": (Series("vllm:spec_decode_num_draft_tokens"),),
    "accepted_tokens": (Series("vllm:spec_decode_num_accepted_tokens"),),
    "accepted_per_pos": (Series("vllm:spec_decode_num_accepted_tokens_per_pos", per="position"),),
    "draft_depth": (Series("drafthouse:spec_draft_depth"),),
    "aborted_rounds": (Series("drafthouse:spec_aborted_rounds"),),
    "refused_by_grammar": (Series("drafthouse:spec_refused_tokens", (("reason", "grammar"),)),),
    "overshoot_rows": (Series("drafthouse:overshoot_rows"),),
    "draft_tokens_by_source": (Series("drafthouse:spec_draft_tokens_by_source", per="source"),),
    "accepted_tokens_by_source": (Series("drafthouse:spec_accepted_tokens_by_source", per="source"),),
    "target_forwards": (Series("drafthouse:target_forwards"),),
    "draft_forwards": (Series("drafthouse:draft_forwards"),),
    "refused_messages": (Series("drafthouse:refused_messages"),),
    "frontends_cut_off": (Series("drafthouse:frontends_cut_off"),),
    "iteration_tokens": (Series("vllm:iteration_tokens_total"),),
    "step_seconds": (Series("drafthouse:step_seconds", (("clock", "host"),)),),
    # The clock of the phases is the device's where there is one; `frontend.metrics` fills it in.
    "observe_seconds": (Series("drafthouse:observe_seconds", (("clock", ""),)),),
    "draft_seconds": (Series("drafthouse:draft_seconds", (("clock", ""),)),),
    "verify_seconds": (Series("drafthouse:verify_seconds", (("clock", ""),)),),
    "accept_seconds": (Series("drafthouse:accept_seconds", (("clock", ""),)),),
}

LOAD_SERIES: dict[str, tuple[Series, ...]] = {
    "running": (Series("vllm:num_requests_running"),),
    "waiting": (Series("vllm:num_requests_waiting"),),
    "waiting_tokens": (Series("drafthouse:waiting_tokens"),),
    "blocks_used": (Series("drafthouse:kv_blocks_used"),),
    "blocks_total": (Series("drafthouse:kv_blocks"),),
    "frontends": (Series("drafthouse:frontends_attached"),),
    "paused": (Series("drafthouse:paused_rows"),),
    "draining": (Series("drafthouse:engine_draining"),),
}

LOAD_NOT_EXPORTED: dict[str, str] = {
    "reporter": "the id of a connection, new with each: which frontend exports the engine by OTLP",
}

# Labels of the info families, by field.
ENGINE_INFO_LABELS = ("speculator", "max_draft_len", "executor", "dtype", "device", "synthetic")
CACHE_INFO_LABELS: dict[str, str] = {  # field of Capacity -> vLLM's label
    "block_size": "block_size",
    "num_blocks": "num_gpu_blocks",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_queued_requests": "max_num_queued_reqs",
    "max_num_queued_tokens": "max_num_queued_tokens",
}

HELLO_NOT_EXPORTED: dict[str, str] = {
    "engine_id": "the label engine of every series",
    "model_name": "the label model_name of every series",
    "schema": "equal to the frontend's own, else there is no attachment",
    "vocab_size": "a property of the model, not of the running engine",
    "vocabulary_hash": "equal to the frontend's own, else the engine is refused",
    "sources": "the label source",
    "counters": "exported field by field",
    "load": "exported field by field",
    "monotonic_ns": "a clock anchor",
    "wall_ns": "a clock anchor",
}
HELLO_EXPORTED: dict[str, str] = {
    "epoch": "drafthouse:engine_epoch_start_time_seconds",
    "step_id": "drafthouse:engine_step",
    "capacity": "vllm:cache_config_info",
    **dict.fromkeys(ENGINE_INFO_LABELS, "drafthouse:engine_info"),
}
