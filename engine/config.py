"""What an engine process can be told.

Owns the option names, defaults and limits of the engine; parsed once by `protocol.options`, then frozen. Never reads the
environment, never written back to. Defaults that depend on model or machine stay None here and are derived by the object
they belong to. Used by `engine.__main__`, which hands slices to the parts, and by `deploy.supervisor`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.speculation.batch_table import MAX_DRAFT_LEN, parse_batch_table
from engine.speculation.names import FIRST_OF, NONE, PREDICTION, SPECULATORS, SYNTHETIC, check_speculator, members_of
from engine.speculation.synthetic_rates import parse_synthetic_rates
from protocol.curve_keys import check_curve_options
from protocol.endpoints import DEFAULT_ENGINE_ADDRESS, check_address, stays_here
from protocol.served_name import check_served_model_name

LOOKUP_DRAFTERS = ("ngram", PREDICTION)
LOOKUP_OPTIONS = ("lookup_min", "lookup_max")
SUFFIX_OPTIONS = (
    "suffix_max_depth", "suffix_max_cached_requests", "suffix_max_cached_tokens", "suffix_factor",
    "suffix_min_probability", "suffix_mode", "suffix_share",
)  # fmt: skip
EAGLE_DRAFTERS = ("eagle", "eagle3")
BLOCK_DRAFTERS = ("dflash", "dspark")
TREE_DRAFTERS = (*EAGLE_DRAFTERS, "medusa", *BLOCK_DRAFTERS, "uno")
MODEL_DRAFTERS = (
    "draft_model",
    "mtp",
    "frozen_kv_mtp",
    *TREE_DRAFTERS,
)  # speculators that load weights of their own
MTP_OPTIONS = ("mtp_zero_centred",)
SYNTHETIC_OPTIONS = ("synthetic_acceptance",)
BLOCK_OPTIONS = ("block_taps", "block_final_norm", "block_anchor", "block_causal")
DSPARK_OPTIONS = ("confidence_threshold",)
DRAFTER_OPTIONS = ("draft_model", "draft_sampling")  # what only they read
TREE_OPTIONS = ("tree_top_k", "tree_depth")
EAGLE_OPTIONS = (
    "eagle_taps", "eagle_final_norm", "eagle_norm_before_residual", "eagle_norm_output",
    "eagle_feature_norm", "eagle_vocabulary_map",
)  # fmt: skip
SIM_DRAFT_TOKENS = 5  # as the n-gram drafter has
SIM_OPTIONS = ("sim_step_ms", "sim_prefill_ms", "sim_acceptance")
MODEL_OPTIONS = ("dtype", "device", "memory_share")  # say nothing about a simulated engine
DRAFT_LEN_OPTIONS = ("num_draft_tokens", "draft_len_by_batch", "adaptive_draft", "sim_acceptance")  # without a drafter


class SimConfig(msgspec.Struct, frozen=True):
    """How a simulated engine behaves: times in milliseconds, acceptance as a probability per draft token."""

    step_ms: float
    prefill_ms: float
    acceptance: float


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine process. Lengths and sizes in tokens unless named."""

    model: Annotated[
        str, Meta(description="embedded, a GGUF file, a Hugging Face directory, or org/name on the Hugging Face hub")
    ] = "embedded"
    served_model_name: Annotated[
        str | None, Meta(description="name clients use; default: the model's own name; must equal the frontend's")
    ] = None
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], Meta(description="arithmetic; auto: bf16 where the device is fast at it")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: CUDA where there is one")] = "auto"
    max_model_len: Annotated[
        int | None, Meta(ge=2, description="longest prompt plus answer; default: what model and KV cache allow")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="most sequences in one step")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=1 << 20, description="most tokens in one step; longer prompts run in chunks")
    ] = 512
    kv_cache_tokens: Annotated[
        int | None, Meta(ge=1, le=1 << 30, description="size of the KV cache; default: from the memory of the device")
    ] = None
    memory_share: Annotated[
        float,
        Meta(gt=0, le=1, description="part of the device's memory that is this engine's: 1/N for N engines on it"),
    ] = 1.0
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in one KV block")] = 16
    prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    speculator: Annotated[
        str, Meta(description=f"where drafts come from: {', '.join(SPECULATORS)} or {FIRST_OF}:A,B,...")
    ] = "ngram"
    num_draft_tokens: Annotated[
        int | None, Meta(ge=1, le=64, description="most draft tokens in one round; default: the drafter's own")
    ] = None
    draft_len_by_batch: Annotated[
        str | None,
        Meta(description="most draft tokens by how many sequences decode: 1:5,8:3,64:0; default: always the most"),
    ] = None
    adaptive_draft: Annotated[
        bool, Meta(description="draft lengths follow what each sequence had accepted, down to none")
    ] = False
    lookup_min: Annotated[
        int, Meta(ge=1, le=64, description="ngram, prediction: shortest suffix that is looked up")
    ] = 2
    lookup_max: Annotated[int, Meta(ge=1, le=64, description="ngram, prediction: longest suffix that is looked up")] = 4
    suffix_max_depth: Annotated[
        int, Meta(ge=2, le=256, description="suffix: longest match and draft behind it, together")
    ] = 24
    suffix_max_cached_requests: Annotated[
        int, Meta(ge=0, le=1_000_000, description="suffix: earlier answers that drafts may come from; 0: none")
    ] = 1000
    suffix_max_cached_tokens: Annotated[
        int, Meta(ge=1, le=1 << 30, description="suffix: tokens in those answers; the oldest answers go first")
    ] = 1_000_000
    suffix_factor: Annotated[float, Meta(gt=0, le=64, description="suffix: draft tokens per token of the match")] = 1.0
    suffix_min_probability: Annotated[
        float, Meta(gt=0, le=1, description="suffix: least share of the past a draft token must have")
    ] = 0.1
    suffix_mode: Annotated[
        Literal["path", "tree"], Meta(description="suffix: the likeliest continuation, or several at once")
    ] = "path"
    suffix_share: Annotated[
        bool, Meta(description="suffix: one client's answers may draft for another's; timing can then tell of them")
    ] = False
    draft_model: Annotated[
        str | None, Meta(description="a drafter's own weights, named as for --model; for speculators that have weights")
    ] = None
    draft_sampling: Annotated[
        Literal["greedy", "sampled"],
        Meta(
            description="drafters with weights: their likeliest tokens, or draws whose probabilities the verdict reads"
        ),
    ] = "greedy"
    tree_top_k: Annotated[
        int,
        Meta(
            ge=0,
            le=32,
            description="eagle, eagle3, medusa, dflash, dspark, uno: draft a tree of so many children per node; 0: a chain",
        ),
    ] = 0
    tree_depth: Annotated[
        int | None,
        Meta(
            ge=1,
            le=16,
            description="levels of the tree; default: 5, uno 8, one for each medusa head or token of a block",
        ),
    ] = None
    eagle_taps: Annotated[
        str | None,
        Meta(description="eagle, eagle3: hidden states of the target it reads (2,9,15; 0 is the embedding)"),
    ] = None
    eagle_final_norm: Annotated[
        bool | None, Meta(description="eagle, eagle3: the last hidden state is read after the target's final norm")
    ] = None
    eagle_norm_before_residual: Annotated[
        bool | None, Meta(description="eagle3: the residual stream begins behind the features' norm")
    ] = None
    eagle_norm_output: Annotated[bool | None, Meta(description="eagle3: what is fed back is normalised")] = None
    eagle_feature_norm: Annotated[
        Literal["none", "joint", "each"] | None,
        Meta(description="eagle3: the norm before fc: one over all hidden states, or one for each"),
    ] = None
    eagle_vocabulary_map: Annotated[
        Literal["offsets", "ids"] | None, Meta(description="eagle3: what the tensor d2t holds; default: offsets")
    ] = None
    mtp_zero_centred: Annotated[
        bool | None, Meta(description="mtp: its norms are stored as their distance from one; default: by the family")
    ] = None
    block_taps: Annotated[
        str | None,
        Meta(description="dflash, dspark: hidden states of the target it reads (2,10,18; 0 is the embedding)"),
    ] = None
    block_final_norm: Annotated[
        bool | None, Meta(description="dflash, dspark: the last hidden state is read after the target's final norm")
    ] = None
    block_anchor: Annotated[
        Literal["drop", "first"] | None,
        Meta(description="dflash, dspark: a block's rows draft the token at their own position, or the next"),
    ] = None
    block_causal: Annotated[
        Literal["none", "sliding", "all"] | None,
        Meta(description="dflash, dspark: layers in which a block's rows see only what is before them"),
    ] = None
    confidence_threshold: Annotated[
        float, Meta(ge=0, le=1, description="dspark: a draft ends before a token less likely to be accepted; 0: never")
    ] = 0.0
    synthetic_acceptance: Annotated[
        str | None,
        Meta(
            description="synthetic: how often draft tokens are accepted, by position (0.8,0.6,0.4), or how many on average "
            "(2.4); default: each with probability 0.7"
        ),
    ] = None
    executor: Annotated[Literal["model", "sim"], Meta(description="sim: a simulated engine without weights")] = "model"
    sim_step_ms: Annotated[float, Meta(ge=0, le=60_000, description="sim: duration of a step")] = 0.0
    sim_prefill_ms: Annotated[float, Meta(ge=0, le=60_000, description="sim: duration of 1000 prompt tokens")] = 0.0
    sim_acceptance: Annotated[
        float, Meta(ge=0, le=1, description="sim: probability that a draft token is accepted")
    ] = 0.7
    engine_id: Annotated[
        str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z", description="stable, unique name; label of its metrics")
    ] = "0"
    listen: Annotated[str, Meta(description="where frontends connect: tcp://HOST:PORT or ipc://PATH")] = (
        DEFAULT_ENGINE_ADDRESS
    )
    allow_plaintext_tcp: Annotated[
        bool, Meta(description="listen on an address other machines can reach, without encryption")
    ] = False
    max_num_queued_requests: Annotated[int, Meta(ge=0, description="most requests waiting; more are refused")] = 1024
    max_num_queued_tokens: Annotated[
        int | None, Meta(ge=0, description="most prompt tokens waiting; default: no limit of its own")
    ] = None
    queue_timeout_s: Annotated[
        float | None,
        Meta(
            gt=0, le=86_400, description="seconds a request may wait for its turn; more and it is refused; default: any"
        ),
    ] = None
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 8.0
    check_laws: Annotated[bool, Meta(description="debug: check the counters' laws after every step")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level logged")] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="text, or json: one object per line")] = "text"
    profile_dir: Annotated[
        str | None, Meta(description="directory for profiles of /start_profile; without one profiling is refused")
    ] = None
    curve_key_file: Annotated[
        str | None, Meta(description="this engine's secret key: encrypts tcp:// (see `drafthouse keys`)")
    ] = None
    curve_client_keys: Annotated[
        str | None, Meta(description="public keys of the frontends that may connect; with --curve-key-file")
    ] = None
    alive_file: Annotated[
        str | None, Meta(description="file that the step loop touches every 5 s while it turns, for health checks")
    ] = None

    def __post_init__(self) -> None:
        has_curve = check_curve_options(
            self.curve_key_file, self.curve_client_keys, "--curve-client-keys", [self.listen]
        )
        if has_curve and self.allow_plaintext_tcp:
            raise ValueError(
                "--allow-plaintext-tcp and --curve-key-file contradict each other: with keys nothing is plain"
            )
        check_listen_address(self.listen, allow_plaintext_tcp=self.allow_plaintext_tcp or has_curve)
        if self.served_model_name is not None:
            check_served_model_name(self.served_model_name)
        check_speculator(self.speculator)
        readers = [name for name in members_of(self.speculator) if name in MODEL_DRAFTERS]
        if len(readers) > 1:
            raise ValueError(
                f"--speculator {self.speculator}: {' and '.join(readers)} need a --draft-model each; it is one"
            )
        if self.draft_len_by_batch is not None:
            table = parse_batch_table(self.draft_len_by_batch)
            table.check(self.num_draft_tokens or MAX_DRAFT_LEN)
        if self.speculator == SYNTHETIC:
            parse_synthetic_rates(self.synthetic_acceptance, self.num_draft_tokens)
            if self.executor == "sim":
                raise ValueError("--speculator synthetic says nothing with --executor sim, which has --sim-acceptance")
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"--lookup-min {self.lookup_min} is greater than --lookup-max {self.lookup_max}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.block_size:
            raise ValueError(
                f"--kv-cache-tokens {self.kv_cache_tokens} is less than one --block-size {self.block_size}"
            )

    def check_given(self, given: frozenset[str]) -> None:
        """Refuse options that would be ignored. `given`: names that somebody set."""
        if self.executor != "sim":
            _refuse(given, SIM_OPTIONS, "works only with --executor sim")
        else:
            _refuse(given, MODEL_OPTIONS, "says nothing with --executor sim, which runs no model")
        if "kv_cache_tokens" in given:
            _refuse(given, ("memory_share",), "says nothing with --kv-cache-tokens, which is a size already")
        self._refuse_unread(given, LOOKUP_OPTIONS, LOOKUP_DRAFTERS)
        self._refuse_unread(given, SUFFIX_OPTIONS, ("suffix",))
        self._refuse_unread(given, DRAFTER_OPTIONS, MODEL_DRAFTERS)
        self._refuse_unread(given, TREE_OPTIONS, TREE_DRAFTERS)
        self._refuse_unread(given, EAGLE_OPTIONS, EAGLE_DRAFTERS)
        self._refuse_unread(given, MTP_OPTIONS, ("mtp",))
        self._refuse_unread(given, SYNTHETIC_OPTIONS, (SYNTHETIC,))
        self._refuse_unread(given, BLOCK_OPTIONS, BLOCK_DRAFTERS)
        self._refuse_unread(given, DSPARK_OPTIONS, ("dspark",))
        if not self.suffix_max_cached_requests:
            _refuse(
                given,
                ("suffix_max_cached_tokens", "suffix_share"),
                "says nothing with --suffix-max-cached-requests 0, which keeps no answers",
            )
        if self.executor == "sim":
            _refuse(given, LOOKUP_OPTIONS + SUFFIX_OPTIONS, "says nothing with --executor sim, which looks nothing up")
            _refuse(
                given,
                DRAFTER_OPTIONS + TREE_OPTIONS + EAGLE_OPTIONS + MTP_OPTIONS + BLOCK_OPTIONS + DSPARK_OPTIONS,
                "says nothing with --executor sim, which loads nothing",
            )
        if self.speculator == NONE:
            _refuse(given, DRAFT_LEN_OPTIONS, "says nothing with --speculator none")

    def _refuse_unread(self, given: frozenset[str], options: tuple[str, ...], readers: tuple[str, ...]) -> None:
        """Refuse options of drafters that the speculator does not ask."""
        if not set(readers).intersection(members_of(self.speculator)):
            _refuse(given, options, f"works only with --speculator {' or '.join(readers)}, not with {self.speculator}")

    @property
    def sim_draft_len(self) -> int:
        """W of a simulated engine, in tokens. A real one's is its drafter's."""
        return 0 if self.speculator == NONE else self.num_draft_tokens or SIM_DRAFT_TOKENS

    @property
    def sim(self) -> SimConfig:
        return SimConfig(self.sim_step_ms, self.sim_prefill_ms, self.sim_acceptance)


def check_listen_address(address: str, *, allow_plaintext_tcp: bool) -> None:
    """Raise ValueError for what is no address, and for one that others could read and write unencrypted."""
    if not stays_here(check_address(address)) and not allow_plaintext_tcp:
        raise ValueError(
            f"--listen {address} can be reached from other machines, and the wire is neither encrypted nor authenticated "
            "without keys: give --curve-key-file and --curve-client-keys (`drafthouse keys` makes them), use ipc:// or "
            "tcp://127.0.0.1, or say --allow-plaintext-tcp true"
        )


def _refuse(given: frozenset[str], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} {why}")
