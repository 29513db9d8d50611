"""What a frozen-KV assistant is, by its config.json and tensors; what this target cannot carry is refused by name.

Owns `FrozenKvFacts` and the check of everything against the target; never loads a matrix. Called by `frozen_kv_recipe`.
Source: Gemma 4's assistant models, as published. Their layers read the target's last layer of the same kind of
attention; Llama and Qwen targets have full attention alone, so every layer here reads their last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig, arch_of_config
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.recipe import TargetFacts

MODEL_TYPE = "gemma4_assistant"
TEXT_TYPE = "gemma4_text"
ACTIVATION = "gelu_pytorch_tanh"
FULL = "full_attention"
ORDERING = "masked_embedding.token_ordering"
CENTROIDS = "masked_embedding.centroids.weight"
_KV_PARTS = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")  # shipped by some, read by nobody
# Entries of text_config that change what a layer computes, and what they would be.
_VARIANTS = {
    "hidden_size_per_layer_input": "embeddings for each layer",
    "vocab_size_per_layer_input": "embeddings for each layer",
    "enable_moe_block": "a mixture of experts",
    "use_double_wide_mlp": "feed-forward layers of double width",
}


@dataclass(frozen=True)
class ClusterFacts:
    """An output that scores the tokens of the likeliest clusters only."""

    num_clusters: int
    num_scored: int


@dataclass(frozen=True)
class FrozenKvFacts:
    arch: ArchConfig  # of the assistant; head_dim and num_kv_heads are the target's
    kv_layers: tuple[int, ...]  # per layer, the target's layer whose keys and values it reads
    has_query_bias: bool
    has_out_bias: bool
    output: str  # name of the tensor
    clusters: ClusterFacts | None

    def __str__(self) -> str:
        clusters = "none" if self.clusters is None else f"{self.clusters.num_scored} of {self.clusters.num_clusters}"
        return f"layers={self.arch.num_layers} reads_target_layers={_listed(self.kv_layers)} clusters={clusters}"


def recognise(config: Mapping[str, object], tensors: DrafterTensors, target: TargetFacts) -> FrozenKvFacts:
    """Raises `ModelFilesError` for files that are no assistant, or none of this target, naming the entry or tensor."""
    if config.get("model_type") != MODEL_TYPE:
        raise tensors.refusal(f"model_type {config.get('model_type')!r:.60} is not supported ({MODEL_TYPE} is)")
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", TEXT_TYPE) != TEXT_TYPE:
        raise tensors.refusal(f"text_config of config.json is missing or not of the model_type {TEXT_TYPE}")
    _refuse_variants(tensors, text)
    arch = _arch(config, text, tensors, target)
    _check_fit(config, text, arch, tensors, target)
    output = "lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"
    return FrozenKvFacts(
        arch=arch,
        kv_layers=(target.arch.num_layers - 1,) * arch.num_layers,
        has_query_bias="layers.0.self_attn.q_proj.bias" in tensors,
        has_out_bias="layers.0.self_attn.o_proj.bias" in tensors,
        output=output,
        clusters=_clusters(config, tensors, arch.vocab_size),
    )


def check_tensors(tensors: DrafterTensors, facts: FrozenKvFacts, target: TargetFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the assistant and its shape. Raises `ModelFilesError` for a missing, misshapen or unknown one."""
    arch, width = facts.arch, target.arch.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (arch.hidden_size, 2 * width),
        "post_projection.weight": (width, arch.hidden_size),
        "norm.weight": (arch.hidden_size,),
        facts.output: (arch.vocab_size, arch.hidden_size),
    }
    for layer in range(arch.num_layers):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(facts).items()}
    if facts.clusters is not None:
        expected[CENTROIDS] = (facts.clusters.num_clusters, arch.hidden_size)
        expected[ORDERING] = (arch.vocab_size,)
    unread = {f"layers.{layer}.self_attn.{part}" for layer in range(arch.num_layers) for part in _KV_PARTS}
    if facts.output != "embed_tokens.weight":
        unread.add("embed_tokens.weight")  # the assistant embeds nothing: it reads the target's embedding
    tensors.check(expected, frozenset(unread), "a frozen-KV assistant")
    if facts.clusters is not None:
        _check_ordering(tensors, arch.vocab_size)
    return expected


def _layer_shapes(facts: FrozenKvFacts) -> dict[str, tuple[int, ...]]:
    arch = facts.arch
    width, query, ffn = arch.hidden_size, arch.query_size, arch.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.o_proj.weight": (width, query),
        "self_attn.q_norm.weight": (arch.head_dim,),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
        "layer_scalar": (1,),
    }
    for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shapes[f"{part}_layernorm.weight"] = (width,)
    if facts.has_query_bias:
        shapes["self_attn.q_proj.bias"] = (query,)
    if facts.has_out_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    return shapes


def _refuse_variants(tensors: DrafterTensors, text: Mapping[str, object]) -> None:
    for key, what in _VARIANTS.items():
        if text.get(key):
            raise tensors.refusal(f"{key} of text_config means {what}, which an assistant cannot have here")
    num_layers = text.get("num_hidden_layers")
    if text.get("num_kv_shared_layers") not in (None, 0, num_layers):
        raise tensors.refusal(
            f"num_kv_shared_layers of text_config is {text['num_kv_shared_layers']!r:.40} of {num_layers!r:.40} layers: "
            "an assistant has no keys of its own in any layer"
        )
    activation = text.get("hidden_activation", ACTIVATION)
    if activation != ACTIVATION:
        raise tensors.refusal(f"hidden_activation {activation!r:.40} is not supported ({ACTIVATION} is)")
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise tensors.refusal("layer_types of text_config must name the attention of every layer")
    other = next((kind for kind in kinds if kind != FULL), None)
    if other is not None:
        raise tensors.refusal(
            f"layer_types of text_config has {other!r:.40}, a layer that reads the target's last layer of that kind; "
            f"this target has {FULL} only"
        )


def _arch(
    config: Mapping[str, object], text: Mapping[str, object], tensors: DrafterTensors, target: TargetFacts
) -> ArchConfig:
    """The assistant's shape; heads are as wide as the target's, whose keys they meet, and `_check_fit` holds it to that."""
    context = text.get("max_position_embeddings")
    if type(context) is not int or context < 1:
        raise tensors.refusal(f"max_position_embeddings of text_config must be a whole number, got {context!r:.40}")
    ropes = text.get("rope_parameters")
    rope = ropes.get(FULL) if isinstance(ropes, Mapping) else None
    if not isinstance(rope, Mapping):
        raise tensors.refusal(f"rope_parameters of text_config must have an entry {FULL}")
    described = {
        "model_type": "qwen3",  # queries are normed before their rotation, as there
        "rope_parameters": rope,
        "head_dim": target.arch.head_dim,
        "quantization_config": config.get("quantization_config", text.get("quantization_config")),
        **{key: text[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps") if key in text},
        **{key: text[key] for key in ("num_hidden_layers", "num_attention_heads") if key in text},
        "num_key_value_heads": target.arch.num_kv_heads,
    }
    return arch_of_config(tensors.directory / "config.json", described, context)


def _check_fit(
    config: Mapping[str, object],
    text: Mapping[str, object],
    arch: ArchConfig,
    tensors: DrafterTensors,
    facts: TargetFacts,
) -> None:
    """It reads the target's states, its embedding and its keys, and its tokens are the target's."""
    target, head_dim = facts.arch, tensors.shape("layers.0.self_attn.q_norm.weight")
    for what, own, wanted in (
        ("states of a width (backbone_hidden_size)", config.get("backbone_hidden_size"), target.hidden_size),
        ("a vocabulary", arch.vocab_size, target.vocab_size),
        ("heads of a width", target.head_dim if head_dim is None else head_dim[0], target.head_dim),
        ("a number of key-value heads", _stated_kv_heads(text), target.num_kv_heads),
    ):
        if own != wanted:
            raise tensors.refusal(f"the assistant was made for {what} of {own!r:.40}; the target has {wanted}")
    # A GGUF file may keep the scaling as a tensor, which is applied when the target is loaded.
    knows_scaling = facts.files is None or facts.files.kind != "gguf"
    if arch.rope.base != target.rope.base or (knows_scaling and arch.rope.scaling != target.rope.scaling):
        raise tensors.refusal(
            f"rope_parameters of text_config are {arch.rope}; the target's keys are rotated by {target.rope}"
        )


def _stated_kv_heads(text: Mapping[str, object]) -> object:
    """Of full attention, which Gemma 4 may give another number than its sliding layers."""
    layers = text.get("per_layer_config")
    first = layers.get("0") if isinstance(layers, Mapping) else None
    if isinstance(first, Mapping) and "num_key_value_heads" in first:
        return first["num_key_value_heads"]
    shared = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return text.get("num_key_value_heads") if shared is None else shared


def _clusters(config: Mapping[str, object], tensors: DrafterTensors, vocab_size: int) -> ClusterFacts | None:
    asked = config.get("use_ordered_embeddings", False)
    if not isinstance(asked, bool):
        raise tensors.refusal(f"use_ordered_embeddings of config.json must be true or false, got {asked!r:.40}")
    if not asked:
        return None
    number, scored = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    if type(number) is not int or not 1 <= number <= vocab_size or vocab_size % number:
        raise tensors.refusal(
            f"num_centroids of config.json must divide the vocabulary of {vocab_size} tokens, got {number!r:.40}"
        )
    if type(scored) is not int or not 1 <= scored <= number:
        raise tensors.refusal(
            f"centroid_intermediate_top_k of config.json must be from 1 to {number}, got {scored!r:.40}"
        )
    return ClusterFacts(number, scored)


def _check_ordering(tensors: DrafterTensors, vocab_size: int) -> None:
    """Every token is in exactly one cluster: one that is not could never be drafted, and one outside would end a device."""
    ordering = tensors.read(ORDERING)
    if ordering.is_floating_point() or not torch.equal(
        ordering.to(torch.int64).sort().values, torch.arange(vocab_size)
    ):
        raise tensors.refusal(f"the tensor {ORDERING} does not name every token once")


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(str(layer) for layer in layers)
