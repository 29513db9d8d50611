"""What a model looks like: the numbers of a dense Llama, Qwen2 or Qwen3 decoder, read from its files and checked.

Owns `ArchConfig` and the refusal, by name, of everything this decoder does not compute. Never touches weights and
allocates nothing. Called by `engine.model.weights`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.model.rope import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from protocol.model_files import ModelFiles, ModelFilesError, read_context_length

FAMILIES = ("llama", "qwen2", "qwen3")
_MAX_DIMENSION = 1 << 24  # of any width: larger numbers are damage, and products of them would overflow
_MAX_LAYERS = 4096


@dataclass(frozen=True)
class ArchConfig:
    """A dense decoder's shape. Widths in elements."""

    family: str  # llama, qwen2 or qwen3
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # positions the model was made for
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    qk_norm: bool  # RMS norm of each query and key head before the rotation
    tied: bool  # the output projection is the embedding

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_arch(files: ModelFiles) -> ArchConfig:
    """The architecture of `files`. Raises `ModelFilesError` naming what is missing, wrong or not supported."""
    return _from_gguf(files) if files.kind == "gguf" else _from_hf(files)


class _Fields:
    """Typed access to an untrusted mapping; every refusal names the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def refusal(self, reason: str) -> ModelFilesError:
        return ModelFilesError(f"{self._path}: {reason}")

    def get(self, key: str) -> object:
        return self._values.get(self._prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_DIMENSION:
            raise self.refusal(
                f"{self._prefix}{key} must be a whole number from 1 to {_MAX_DIMENSION}, got {value!r:.40}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise self.refusal(f"{self._prefix}{key} must be a positive number, got {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(f"{self._prefix}{key} must be true or false, got {value!r:.40}")
        return value


def _checked(arch: ArchConfig, fields: _Fields) -> ArchConfig:
    if arch.num_layers > _MAX_LAYERS:
        raise fields.refusal(f"it claims {arch.num_layers} layers; the limit is {_MAX_LAYERS}")
    if arch.num_heads % arch.num_kv_heads:
        raise fields.refusal(
            f"{arch.num_heads} attention heads cannot share {arch.num_kv_heads} key-value heads evenly"
        )
    if arch.head_dim % 2:
        raise fields.refusal(f"a head dimension of {arch.head_dim} is odd, so it cannot be rotated")
    return arch


# ---- Hugging Face config.json ----


def _from_hf(files: ModelFiles) -> ArchConfig:
    return arch_of_config(files.path / "config.json", files.config, read_context_length(files))


def arch_of_config(path: Path, config: Mapping[str, object], context_length: int) -> ArchConfig:
    """The architecture that one JSON object describes: a model's config.json, or a drafter's part of it (`path` says where).

    Raises `ModelFilesError` as `read_arch` does.
    """
    fields = _Fields(path, config)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.refusal(f"model_type {family!r:.60} is not supported ({', '.join(FAMILIES)} are)")
    _refuse_hf_variants(fields)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.refusal(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    default_head_dim = 128 if family == "qwen3" else max(1, hidden_size // num_heads)
    attention_bias = fields.flag("attention_bias")
    arch = ArchConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", default=num_heads),
        head_dim=fields.size("head_dim", default=default_head_dim),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_hf_rope(fields, context_length),
        qkv_bias=True if family == "qwen2" else attention_bias,
        out_bias=attention_bias and family != "qwen2",
        ffn_bias=fields.flag("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        tied=fields.flag("tie_word_embeddings"),
    )
    return _checked(arch, fields)


def _refuse_hf_variants(fields: _Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise fields.refusal(
            f"it is a quantised checkpoint ({method!r:.40}), which is not supported; use the original weights or a GGUF file"
        )
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise fields.refusal(f"hidden_act {activation!r:.40} is not supported (silu is)")
    if fields.flag("use_sliding_window"):
        raise fields.refusal("use_sliding_window is true; sliding-window attention is not supported")
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        raise fields.refusal("layer_types holds more than full_attention, which is all that is supported")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.refusal("partial_rotary_factor differs from 1, which is not supported")
    if fields.get("num_experts") or fields.get("num_local_experts"):
        raise fields.refusal("mixtures of experts are not supported")


def _hf_rope(fields: _Fields, context_length: int) -> RopeConfig:
    """Transformers 5 writes everything into rope_parameters; earlier versions rope_theta and rope_scaling."""
    parameters = fields.get("rope_parameters")
    parameters = fields.get("rope_scaling") if parameters is None else parameters
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise fields.refusal(f"rope_scaling must be an object, got {parameters!r:.40}")
    scaling_fields = _Fields(fields._path, parameters)
    top_level = fields.get("rope_theta")
    base = scaling_fields.number("rope_theta", default=10000.0) if top_level is None else fields.number("rope_theta")
    if scaling_fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.refusal("partial_rotary_factor differs from 1, which is not supported")
    return RopeConfig(base=base, scaling=_hf_scaling(scaling_fields, context_length))


def _hf_scaling(fields: _Fields, context_length: int) -> RopeScaling:
    kind = fields.get("rope_type")
    kind = fields.get("type") if kind is None else kind
    original = fields.size("original_max_position_embeddings", default=context_length)
    match kind:
        case None | "default":
            return None
        case "linear":
            return LinearScaling(factor=fields.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_context_length=original,
            )
        case "yarn":
            return _hf_yarn(fields, original, context_length)
        case _:
            raise fields.refusal(f"rope scaling {kind!r:.40} is not supported (linear, llama3 and yarn are)")


def _hf_yarn(fields: _Fields, original: int, context_length: int) -> YarnScaling:
    factor = fields.number("factor", default=context_length / original)
    if fields.get("attention_factor") is not None:
        attention_factor = fields.number("attention_factor")
    elif fields.get("mscale") and fields.get("mscale_all_dim"):
        numerator = yarn_magnitude(factor, fields.number("mscale"))
        attention_factor = numerator / yarn_magnitude(factor, fields.number("mscale_all_dim"))
    else:
        attention_factor = yarn_magnitude(factor)
    return YarnScaling(
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
        original_context_length=original,
        truncate=fields.flag("truncate", default=True),
    )


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What cos and sin are multiplied by. Source: arXiv 2309.00071, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


# ---- GGUF metadata ----


def _from_gguf(files: ModelFiles) -> ArchConfig:
    metadata = files.header.metadata
    family = metadata.get("general.architecture")
    fields = _Fields(files.path, metadata, prefix=f"{family}.")
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.refusal(f"general.architecture {family!r:.60} is not supported ({', '.join(FAMILIES)} are)")
    if fields.get("expert_count"):
        raise fields.refusal("mixtures of experts are not supported")
    tensors = files.header.tensors_by_name
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fields.refusal("the tensor token_embd.weight is missing or is no matrix")
    hidden_size, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", default=max(1, hidden_size // num_heads))
    if fields.size("attention.value_length", default=head_dim) != head_dim:
        raise fields.refusal("keys and values of different widths are not supported")
    if fields.size("rope.dimension_count", default=head_dim) != head_dim:
        raise fields.refusal("rotating only a part of each head is not supported")
    arch = ArchConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        ffn_size=fields.size("feed_forward_length"),
        num_layers=fields.size("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        context_length=read_context_length(files),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(base=fields.number("rope.freq_base", default=10000.0), scaling=_gguf_scaling(fields)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family == "qwen3",
        tied="output.weight" not in tensors,
    )
    return _checked(arch, fields)


def _gguf_scaling(fields: _Fields) -> RopeScaling:
    """Llama 3's scaling is not here: converters store it as the tensor rope_freqs.weight, which the loader applies."""
    kind = fields.get("rope.scaling.type")
    if kind is None and fields.get("rope.scale_linear") is not None:
        return LinearScaling(factor=fields.number("rope.scale_linear"))
    match kind:
        case None | "none":
            return None
        case "linear":
            return LinearScaling(factor=fields.number("rope.scaling.factor"))
        case "yarn":
            factor = fields.number("rope.scaling.factor")
            return YarnScaling(
                factor=factor,
                attention_factor=yarn_magnitude(factor) * fields.number("rope.scaling.attn_factor", default=1.0),
                beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
                beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
                original_context_length=fields.size("rope.scaling.original_context_length"),
                truncate=True,
            )
        case _:
            raise fields.refusal(f"rope scaling {kind!r:.40} is not supported (linear and yarn are)")
