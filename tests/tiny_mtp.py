"""Tiny MTP checkpoints in every published layout, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and config.json; never touches a network. `write_mtp` writes the modules alone, `add_mtp` puts them
among a target's own files, as they are published. Fitting is least squares over text the target wrote: a random module
would be right once in the vocabulary, and equal answers would prove little.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from engine.model.decoder import DecoderModel
from engine.model.layers import rms_norm
from tests.mtp_reference import DenseModule, ModuleShape
from tests.tiny_drafters import ridge, taps_of, target_model, target_texts

Layout = Literal["qwen", "deepseek", "speculators"]
Weights = dict[str, torch.Tensor]  # of one module, under the names of `tests.mtp_reference`

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN = 4, 2, 16, 128  # as `tests.tiny` has them
_SHARED = ("fc.weight", "enorm.weight", "hnorm.weight", "norm.weight")  # by all modules of the qwen layout


@dataclass(frozen=True)
class PublishedMtp:
    """What a publisher decided."""

    layout: Layout
    num_modules: int = 1
    model_type: str = "qwen3"
    is_gated: bool = False
    rotary_share: float = 1.0
    qk_norm: bool = True
    attention_bias: bool = False
    has_embedding: bool = False  # deepseek only: modules bring an embedding and a head
    context_length: int = 512

    @property
    def zero_centred(self) -> bool:
        return self.model_type.startswith("qwen3_")

    @property
    def shape(self) -> ModuleShape:
        rotary_dim = int(HEAD_DIM * self.rotary_share)
        return ModuleShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, rotary_dim, self.is_gated, self.zero_centred)


QWEN = PublishedMtp("qwen", model_type="qwen3_5_text", is_gated=True, rotary_share=0.5)
DEEPSEEK = PublishedMtp("deepseek", num_modules=3, model_type="llama", qk_norm=False)
FITTED = DEEPSEEK


def fitted_mtp(directory: Path, target: Path) -> Path:
    return write_mtp(directory, target, FITTED, fitted=True)


def write_mtp(directory: Path, target: Path, published: PublishedMtp, *, seed: int = 0, fitted: bool = False) -> Path:
    """Modules for the Hugging Face directory `target`, in a directory of their own."""
    model = target_model(target)
    modules = tiny_modules(model, published, seed, fitted=fitted)
    return write_modules(directory, mtp_config(model, published), named(modules, published, model.arch.num_layers))


def write_modules(directory: Path, config: dict[str, Any], stored: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def add_mtp(target: Path, published: PublishedMtp, *, seed: int = 0, fitted: bool = False) -> list[Weights]:
    """Put modules among the one weight file of `target`, whose decoder layers have these numbers of heads."""
    model = target_model(target)
    modules = tiny_modules(model, published, seed, fitted=fitted)
    path = target / "model.safetensors"
    weights = load_file(path) | named(modules, published, model.arch.num_layers, prefix="model.")
    save_file(weights, str(path), metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | _count_entry(published)
    (target / "config.json").write_text(json.dumps(config))
    return modules


def tiny_modules(model: DecoderModel, published: PublishedMtp, seed: int = 0, *, fitted: bool = False) -> list[Weights]:
    generator = torch.Generator().manual_seed(seed)
    modules = [_random_module(model, published, generator) for _ in range(published.num_modules)]
    if published.layout == "qwen":
        for module in modules[1:]:
            module.update({name: modules[0][name] for name in _SHARED})
    if fitted:
        _fit(model, published, modules)
    return modules


def dense_modules(model: DecoderModel, published: PublishedMtp, modules: list[Weights]) -> list[DenseModule]:
    """The modules in float64, with the target's embedding and head where they have none."""
    own = {"embed_tokens.weight": model.weights.embedding, "head.weight": model.weights.output}
    return [DenseModule({**own, **module}, published.shape) for module in modules]


def mtp_config(model: DecoderModel, published: PublishedMtp) -> dict[str, Any]:
    """config.json as the layout's publishers write it."""
    arch = model.arch
    text = {
        "model_type": published.model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": FFN,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": published.context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": published.rotary_share,
        },
        "hidden_act": "silu",
    }
    if published.layout == "speculators":
        return {
            "speculators_model_type": "mtp",
            "transformer_layer_config": text,
            **_count_entry(published),
        }
    text |= _count_entry(published)
    if published.zero_centred:
        text["layer_types"] = ["linear_attention", "full_attention"]
        return {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return text


def named(
    modules: list[Weights], published: PublishedMtp, num_layers: int, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under the names of its layout; `prefix` for those of decoder layers."""
    stored: dict[str, torch.Tensor] = {}
    for number, module in enumerate(modules):
        layer = f"{prefix}layers.{num_layers + number}."
        for name, tensor in module.items():
            match published.layout:
                case "qwen":
                    full = _QWEN_NAMES.get(name, f"mtp.layers.{number}.{name}")
                case "deepseek":
                    full = layer + _DEEPSEEK_NAMES.get(name, name)
                case "speculators":
                    full = f"mtp_layers.{number}." + _SPECULATORS_NAMES.get(name, name)
            stored[full] = tensor.clone().contiguous()
    return stored


_QWEN_NAMES = {
    "fc.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "norm.weight": "mtp.norm.weight",
}
_DEEPSEEK_NAMES = {
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
    "head.weight": "shared_head.head.weight",
}
_SPECULATORS_NAMES = {
    "fc.weight": "input_proj.weight",
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
}


def _count_entry(published: PublishedMtp) -> dict[str, int]:
    key = "mtp_num_hidden_layers" if published.layout == "qwen" else "num_nextn_predict_layers"
    return {key: published.num_modules}


def _random_module(model: DecoderModel, published: PublishedMtp, generator: torch.Generator) -> Weights:
    hidden, vocab_size = model.arch.hidden_size, model.arch.vocab_size

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    query, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    matrices = {
        "fc": (hidden, 2 * hidden),
        "self_attn.q_proj": (query * (2 if published.is_gated else 1), hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (FFN, hidden),
        "mlp.up_proj": (FFN, hidden),
        "mlp.down_proj": (hidden, FFN),
    }
    weights = {f"{name}.weight": draw(*size, scale=1.5 / math.sqrt(size[1])) for name, size in matrices.items()}
    if published.attention_bias:
        for name in "qkv":
            weights[f"self_attn.{name}_proj.bias"] = draw(matrices[f"self_attn.{name}_proj"][0], scale=0.3)
    norms = {"enorm": hidden, "hnorm": hidden, "norm": hidden}
    norms |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if published.qk_norm:
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    centre = 0.0 if published.zero_centred else 1.0
    weights |= {f"{name}.weight": centre + draw(size, scale=0.2) for name, size in norms.items()}
    if published.has_embedding:
        weights["embed_tokens.weight"] = draw(vocab_size, hidden, scale=0.4)
        weights["head.weight"] = draw(vocab_size, hidden, scale=0.4)
    return weights


# ---- fitting ----


def _fit(model: DecoderModel, published: PublishedMtp, modules: list[Weights]) -> None:
    """Each module's fc, then o_proj, then down_proj, by ridge regression on what the target's next state lacks."""
    tokens = target_texts(model, 60, 44)
    states = taps_of(model, tokens, (model.arch.num_layers,))[:, :, 0]
    read = list(rms_norm(states, model.weights.final_norm, model.arch.norm_eps).to(torch.float64))
    for number, weights in enumerate(modules):
        ahead = 1 + number  # the module's output at position i is to be the target's state at i + ahead
        wanted = states[:, ahead:].flatten(0, 1).to(torch.float64)
        weights["norm.weight"] = model.weights.final_norm - (1.0 if published.zero_centred else 0.0)
        behind = [text[ahead:].tolist() for text in tokens]
        read = [known[: len(text)] for known, text in zip(read, behind, strict=True)]
        for part in ("fc", "self_attn.o_proj", "mlp.down_proj"):
            module = dense_modules(model, published, [weights])[0]
            inputs, missing = _parts(module, part, read, behind, wanted)
            weights[f"{part}.weight"] = ridge(inputs, missing).T.float()
        module = dense_modules(model, published, [weights])[0]
        read = [module.outputs(known, text) for known, text in zip(read, behind, strict=True)]


def _parts(
    module: DenseModule, part: str, read: list[torch.Tensor], behind: list[list[int]], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the matrix `part` reads, and what it is to add."""
    if part == "fc":
        return torch.cat([module.read(known, text) for known, text in zip(read, behind, strict=True)]), wanted
    entered = [module.entered(known, text) for known, text in zip(read, behind, strict=True)]
    attended = torch.cat([module.attention(hidden) for hidden in entered])
    hidden = torch.cat(entered)
    if part == "self_attn.o_proj":
        return attended, wanted - hidden
    hidden = hidden + module.linear("self_attn.o_proj", attended)
    return module.gated(hidden), wanted - hidden
