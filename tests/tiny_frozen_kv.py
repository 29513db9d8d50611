"""Tiny frozen-KV assistants as Gemma 4's are published, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and config.json; never touches a network. Fitting is least squares over text the target wrote: a random
assistant would be right once in the vocabulary, and equal answers would prove little.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.decoder import DecoderModel
from engine.model.layers import rms_norm
from tests.frozen_kv_reference import DenseAssistant
from tests.tiny_drafters import FAVOUR, FAVOURED_TOKEN_IDS, ridge, taps_of, target_model, target_texts

Weights = dict[str, torch.Tensor]  # without a leading `model.`


@dataclass(frozen=True)
class PublishedAssistant:
    """What a publisher decided."""

    width: int = 48
    num_layers: int = 2
    num_heads: int = 4
    ffn: int = 96
    clusters: tuple[int, int] | None = None  # how many there are, and how many are scored
    attention_bias: bool = False
    has_head: bool = False  # of its own; else the embedding is the output
    context_length: int = 512


PLAIN = PublishedAssistant()


def fitted_frozen_kv(directory: Path, target: Path) -> Path:
    model = target_model(target)
    published = PublishedAssistant(width=model.arch.hidden_size, num_layers=1)
    return publish(directory, model, published, _fitted(model, published))


def write_frozen_kv(directory: Path, target: Path, published: PublishedAssistant = PLAIN, *, seed: int = 0) -> Path:
    """Random weights for the Hugging Face directory `target`."""
    model = target_model(target)
    return publish(directory, model, published, random_assistant(model, published, seed))


def publish(directory: Path, model: DecoderModel, published: PublishedAssistant, weights: Weights) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(assistant_config(model, published)))
    inside = ("layers.", "norm.", "embed_tokens.")
    stored = {f"model.{name}" if name.startswith(inside) else name: tensor for name, tensor in weights.items()}
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def dense_assistant(weights: Weights, published: PublishedAssistant) -> DenseAssistant:
    num_scored = None if published.clusters is None else published.clusters[1]
    return DenseAssistant(weights, published.num_layers, num_scored)


def assistant_config(model: DecoderModel, published: PublishedAssistant) -> dict[str, Any]:
    arch = model.arch
    text = {
        "model_type": "gemma4_text",
        "vocab_size": arch.vocab_size,
        "hidden_size": published.width,
        "intermediate_size": published.ffn,
        "num_hidden_layers": published.num_layers,
        "num_attention_heads": published.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "layer_types": ["full_attention"] * published.num_layers,
        "num_kv_shared_layers": published.num_layers,
        "max_position_embeddings": published.context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "attention_bias": published.attention_bias,
    }
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": arch.hidden_size,
        "use_ordered_embeddings": published.clusters is not None,
        "text_config": text,
    }
    if published.clusters is not None:
        config |= {"num_centroids": published.clusters[0], "centroid_intermediate_top_k": published.clusters[1]}
    return config


def random_assistant(model: DecoderModel, published: PublishedAssistant, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab_size, width = model.arch.hidden_size, model.arch.vocab_size, published.width
    query, head_dim = published.num_heads * model.arch.head_dim, model.arch.head_dim

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    matrices = {"pre_projection": (width, 2 * hidden), "post_projection": (hidden, width)}
    norms = {"norm": width}
    for layer in range(published.num_layers):
        prefix = f"layers.{layer}."
        matrices |= {f"{prefix}self_attn.q_proj": (query, width), f"{prefix}self_attn.o_proj": (width, query)}
        matrices |= {f"{prefix}mlp.{name}_proj": (published.ffn, width) for name in ("gate", "up")}
        matrices |= {f"{prefix}mlp.down_proj": (width, published.ffn)}
        norms |= {f"{prefix}{name}_layernorm": width for name in ("input", "post_attention")}
        norms |= {f"{prefix}{name}_feedforward_layernorm": width for name in ("pre", "post")}
        norms |= {f"{prefix}self_attn.q_norm": head_dim}
    weights = {f"{name}.weight": draw(*size, scale=1.5 / math.sqrt(size[1])) for name, size in matrices.items()}
    weights |= {f"{name}.weight": 1.0 + draw(size, scale=0.2) for name, size in norms.items()}
    for layer in range(published.num_layers):
        weights[f"layers.{layer}.layer_scalar"] = 0.8 + draw(1, scale=0.1)
        if published.attention_bias:
            weights[f"layers.{layer}.self_attn.q_proj.bias"] = draw(query, scale=0.3)
            weights[f"layers.{layer}.self_attn.o_proj.bias"] = draw(width, scale=0.3)
    weights["lm_head.weight" if published.has_head else "embed_tokens.weight"] = draw(vocab_size, width, scale=0.4)
    if published.clusters is not None:
        weights["masked_embedding.centroids.weight"] = draw(published.clusters[0], width, scale=1.0)
        weights["masked_embedding.token_ordering"] = torch.randperm(vocab_size, generator=generator)
    return weights


def _fitted(model: DecoderModel, published: PublishedAssistant) -> Weights:
    """The projection before the layer is to give the target's next state; what the layer adds to that is little.

    Behind it are the target's own norm and head, so what is fed back is a state of the target as it should be.
    """
    weights = random_assistant(model, published)
    tokens = target_texts(model, 60, 44)
    states = taps_of(model, tokens, (model.arch.num_layers,))[:, :, 0]
    normed = rms_norm(states, model.weights.final_norm, model.arch.norm_eps)
    embedded = model.weights.embedding[tokens]
    read = torch.cat([embedded[:, 1:], normed[:, :-1]], dim=2).flatten(0, 1).to(torch.float64)
    weights["pre_projection.weight"] = ridge(read, states[:, 1:].flatten(0, 1).to(torch.float64)).T.float()
    weights["post_projection.weight"] = torch.eye(published.width)
    weights["norm.weight"] = model.weights.final_norm.clone()
    output = model.weights.output.clone()
    output[list(FAVOURED_TOKEN_IDS)] *= FAVOUR
    weights["embed_tokens.weight"] = output
    weights["layers.0.layer_scalar"] = torch.ones(1)
    for name in ("post_attention", "post_feedforward"):
        weights[f"layers.0.{name}_layernorm.weight"] *= 0.05
    return weights
