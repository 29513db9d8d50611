"""What a drafter is made from: the user's settings, the target, and the steps from one to the other.

Owns the values that pass between the registry, the executor's construction and a drafter; makes nothing itself. A recipe
is written before any weights are loaded, so that options and files that cannot work are refused at once and the memory a
drafter needs is known while the KV cache is sized.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.speculation.speculator import Capabilities, Speculator
from protocol.model_files import ModelFiles, ModelFilesError, resolve

Progress = Callable[[int, int], None]  # (bytes of the files done, bytes in total)


@dataclass(frozen=True)
class EagleOverrides:
    """What a user knows better than an EAGLE checkpoint's own files, one field per convention. None: as the files say."""

    taps: str | None = None  # numbers of hidden states of the target, "2,9,15"
    final_norm: bool | None = None  # a tap behind the last layer is read after the target's final norm
    norm_before_residual: bool | None = None  # the residual stream starts from the normalised features
    norm_output: bool | None = None  # what is fed back is normalised
    feature_norm: str | None = None  # before fc: "none", "joint" (one over all taps) or "each" (one per tap)
    vocabulary_map: str | None = None  # d2t holds "offsets" or token "ids"


@dataclass(frozen=True)
class BlockOverrides:
    """What a user knows better than a block drafter's own files, one field per convention. None: as the files say."""

    taps: str | None = None  # numbers of hidden states of the target, "2,10,18"
    final_norm: bool | None = None  # a tap behind the last layer is read after the target's final norm
    anchor: str | None = None  # rows of a block draft the token at their own position ("drop") or the next ("first")
    causal: str | None = None  # rows see only what is before them: in "none" of the layers, in "sliding" ones, in "all"


@dataclass(frozen=True)
class SuffixSettings:
    """What only suffix decoding reads. Lengths in tokens."""

    max_depth: int = 24  # a match and the draft behind it
    max_cached_requests: int = 1000  # answers kept, in all scopes together; 0: drafts from the sequence itself only
    max_cached_tokens: int = 1_000_000  # in those answers
    factor: float = 1.0  # draft tokens per matched token
    min_probability: float = 0.1  # of a draft token
    mode: str = "path"  # or "tree"
    share: bool = False  # one scope for everybody


@dataclass(frozen=True)
class SpeculationSettings:
    """What a user may say about drafting, whichever drafter reads it. None: the drafter's own default."""

    num_draft_tokens: int | None = None
    lookup_min: int = 2
    lookup_max: int = 4
    draft_model: str | None = None  # files of the drafter itself, named as for --model
    draft_sampling: str | None = None  # "greedy" or "sampled"
    tree_depth: int | None = None
    tree_top_k: int | None = None
    suffix: SuffixSettings = SuffixSettings()
    eagle: EagleOverrides = EagleOverrides()
    block: BlockOverrides = BlockOverrides()
    confidence_threshold: float = 0.0  # of a DSpark's drafted token, 0..1; 0 keeps all
    mtp_zero_centred: bool | None = None  # an MTP module's norms are stored as their distance from one
    synthetic_acceptance: str | None = None  # rates by position, or a mean number of tokens (`synthetic_rates`)


@dataclass(frozen=True)
class TargetFacts:
    """What is known of the target before its weights are loaded."""

    arch: ArchConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int  # tokens
    max_model_len: int  # tokens; the longest sequence that can be asked for
    files: ModelFiles | None = None  # None in tests of drafters that read no files

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size


@dataclass(frozen=True)
class Target:
    """The loaded target as drafters use it: read-only weights, and how many KV blocks there are."""

    model: DecoderModel
    num_blocks: int
    block_size: int  # tokens
    pool: KVPool | None = None  # the target's own keys and values; None in tests of drafters that look at none


def draft_model_files(draft_model: str) -> ModelFiles:
    """The files that `--draft-model` names. Raises `ModelFilesError` naming the option: --model is resolved the same way."""
    try:
        return resolve(draft_model)
    except ModelFilesError as error:
        raise ModelFilesError(f"--draft-model: {error}") from error


class Recipe(ABC):
    """A drafter that can be built: everything about it was checked."""

    capabilities: Capabilities
    kv_shape: KVShape | None = None  # of the drafter's own keys and values, which live under the target's block ids
    weight_bytes: int = 0  # of the drafter's own weights

    @property
    def kv_bytes_per_token(self) -> int:
        return 0 if self.kv_shape is None else self.kv_shape.bytes_per_token

    @abstractmethod
    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        """Load weights, allocate keys and values. Raises `ModelFilesError` for files that cannot be used."""


class Ready(Recipe):
    """A drafter without weights or keys: it exists already."""

    def __init__(self, speculator: Speculator) -> None:
        self.capabilities = speculator.capabilities
        self._speculator = speculator

    def build(self, target: Target, on_progress: Progress | None = None) -> Speculator:
        return self._speculator
