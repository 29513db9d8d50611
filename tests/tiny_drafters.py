"""Tiny EAGLE checkpoints in every published layout, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and config.json; never touches a network. `write_eagle` is the entry; `fitted_eagle` and
`fitted_eagle3` are what tests of the whole engine draft with. Fitting is least squares over text the target wrote: a
random head would be right once in the vocabulary, and equal answers would prove little.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import SpanLayout
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.model.layers import rms_norm
from engine.model.weights import load_model
from protocol.model_files import resolve
from tests.eagle_reference import DenseEagle, HeadShape, causal

Layout = Literal["eagle", "safeailab", "deepspec", "speculators"]
Weights = dict[str, torch.Tensor]

# What the biases and bans of tests.lossless make likely. A tiny random target is chaotic: a fitted head is right in one
# draft of twenty or thirty; on requests that prefer these tokens one that prefers them too is right again and again.
FAVOURED_TOKEN_IDS = (7, 15, 16, *range(40, 46))
FAVOUR = 2.5

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN = 4, 2, 16, 128
_AUX = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Published:
    """What a publisher decided. `taps` are numbers of hidden states, whatever the layout writes."""

    layout: Layout
    taps: tuple[int, ...] = (1, 2)
    draft_vocab_size: int | None = None  # None: the target's
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norm: Literal["none", "joint", "each"] = "none"
    qk_norm: bool = False
    attention_bias: bool = False
    fc_bias: bool = False
    has_embedding: bool = False
    has_head: bool = True
    pickled: bool = False
    context_length: int = 512

    @property
    def generation(self) -> int:
        return 1 if self.layout == "eagle" else 3

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(
            self.generation,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
        )


FITTED_EAGLE = Published("eagle", taps=(2,), fc_bias=True)
FITTED_EAGLE3 = Published("safeailab", taps=(1, 2), draft_vocab_size=200)


def fitted_eagle(directory: Path, target: Path) -> Path:
    return write_eagle(directory, target, FITTED_EAGLE, favour=FAVOUR)


def fitted_eagle3(directory: Path, target: Path) -> Path:
    return write_eagle(directory, target, FITTED_EAGLE3, favour=FAVOUR)


def write_eagle(
    directory: Path, target: Path, published: Published, *, seed: int = 0, favour: float | None = None
) -> Path:
    """A drafter for the Hugging Face directory `target`, whose layers number two or more.

    Random, or with `favour` fitted, and the logits of `FAVOURED_TOKEN_IDS` multiplied by it.
    """
    model = target_model(target)
    weights = random_weights(model, published, seed)
    if favour is not None:
        _fit(model, published, weights, favour)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(eagle_config(model, published)))
    prefix = "midlayer." if published.layout == "safeailab" else "layers.0."
    stored = {name.replace("layers.0.", prefix): tensor.contiguous() for name, tensor in weights.items()}
    if published.pickled:
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def target_model(target: Path) -> DecoderModel:
    return load_model(resolve(str(target)), torch.float32, torch.device("cpu"))


def eagle_config(model: DecoderModel, published: Published) -> dict[str, Any]:
    """config.json as the layout's publishers write it."""
    arch = model.arch
    layer = {
        "model_type": "qwen3" if published.qk_norm else "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": published.context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    draft_vocab_size = published.draft_vocab_size or arch.vocab_size
    norms = {"norm_before_residual": published.norm_before_residual, "norm_output": published.norm_output}
    norms |= {"norm_before_fc": published.feature_norm == "joint", "fc_norm": published.feature_norm == "each"}
    match published.layout:
        case "eagle":
            return {**layer, "architectures": ["LlamaForCausalLMEagle"], "bias": published.fc_bias}
        case "safeailab":
            nested = {_AUX: [tap - 1 for tap in published.taps], "use_aux_hidden_state": True}
            return {**layer, **norms, "draft_vocab_size": draft_vocab_size, "eagle_config": nested}
        case "deepspec":
            return {**layer, **norms, "target_layer_ids": [tap - 1 for tap in published.taps], "ttt_length": 7}
        case "speculators":
            proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
            return {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": layer,
                "draft_vocab_size": draft_vocab_size,
                _AUX: list(published.taps),
                "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
                **norms,
            }


def random_weights(model: DecoderModel, published: Published, seed: int) -> Weights:
    """Every tensor of the checkpoint under `layers.0.` names, float32 (d2t and t2d as they are stored)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.arch.hidden_size
    reads = hidden if published.generation == 1 else 2 * hidden
    query, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    fc_reads = 2 * hidden if published.generation == 1 else len(published.taps) * hidden
    attention = "layers.0.self_attn."

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    matrices = {"fc": (hidden, fc_reads), f"{attention}q_proj": (query, reads), f"{attention}k_proj": (kv, reads)}
    matrices |= {f"{attention}v_proj": (kv, reads), f"{attention}o_proj": (hidden, query)}
    matrices |= {"layers.0.mlp.gate_proj": (FFN, hidden), "layers.0.mlp.up_proj": (FFN, hidden)}
    matrices |= {"layers.0.mlp.down_proj": (hidden, FFN)}
    weights = {f"{name}.weight": draw(*size, scale=1.3 / math.sqrt(size[1])) for name, size in matrices.items()}
    biased = [f"{attention}{name}_proj" for name in "qkv"] if published.attention_bias else []
    for name in [*biased, *(["fc"] if published.fc_bias else [])]:
        weights[f"{name}.bias"] = draw(matrices[name][0], scale=0.3)
    for name, size in _norm_sizes(hidden, published).items():
        weights[f"{name}.weight"] = 1.0 + draw(size, scale=0.2)
    if published.has_embedding:
        weights["embed_tokens.weight"] = draw(model.arch.vocab_size, hidden, scale=0.4)
    draft_vocab_size = published.draft_vocab_size or model.arch.vocab_size
    if published.has_head:
        weights["lm_head.weight"] = draw(draft_vocab_size, hidden, scale=0.4)
    if published.draft_vocab_size is not None:
        others = torch.randperm(model.arch.vocab_size, generator=generator)
        others = others[~torch.isin(others, torch.tensor(FAVOURED_TOKEN_IDS))]
        token_ids = torch.cat([torch.tensor(FAVOURED_TOKEN_IDS), others])[:draft_vocab_size].sort().values
        weights["d2t"] = token_ids - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.zeros(model.arch.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    return weights


def _norm_sizes(hidden: int, published: Published) -> dict[str, int]:
    norms = {"layers.0.post_attention_layernorm": hidden}
    if published.qk_norm:
        norms |= {"layers.0.self_attn.q_norm": HEAD_DIM, "layers.0.self_attn.k_norm": HEAD_DIM}
    if published.generation == 1:
        return norms
    norms |= {"layers.0.input_layernorm": hidden, "layers.0.hidden_norm": hidden, "norm": hidden}
    if published.feature_norm == "joint":
        norms["input_norm"] = len(published.taps) * hidden
    elif published.feature_norm == "each":
        norms |= {f"fc_norm.{index}": hidden for index in range(len(published.taps))}
    return norms


def dense_head(model: DecoderModel, weights: Mapping[str, torch.Tensor], published: Published) -> DenseEagle:
    """The float64 reference over these weights, with what the target lends."""
    lent = model.weights.output[draft_token_ids(model, weights)]
    shared = {"embed_tokens.weight": model.weights.embedding, "lm_head.weight": lent}
    return DenseEagle({**shared, **weights}, published.head_shape)


def draft_token_ids(model: DecoderModel, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [D]: the target's token for each of the drafter's."""
    if "d2t" not in weights:
        return torch.arange(model.arch.vocab_size)
    return weights["d2t"] + torch.arange(len(weights["d2t"]))


def taps_of(model: DecoderModel, token_ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
    """[B, L, n, hidden] hidden states of B texts of L tokens, each computed in one piece."""
    count, length = token_ids.shape
    attention = _attention(model, count, length)
    slots = torch.arange(count * length)
    layout = attention.layout([SpanLayout(0, length, (row,)) for row in range(count)])
    step = ForwardInput(token_ids.flatten(), slots % length, slots)
    _, states = model.forward(step, attention, layout, taps)
    assert states is not None
    return states.view(count, length, len(taps), -1)


def _attention(model: DecoderModel, count: int, length: int) -> GroupedAttention:
    """Over new pages: one block per text."""
    arch = model.arch
    shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, length, model.dtype)
    return GroupedAttention(KVPool(shape, count, model.device), arch.num_heads)


# ---- fitting ----


def target_texts(model: DecoderModel, count: int, length: int) -> torch.Tensor:
    """int64 [count, length]: phrases said again and again, then what the target makes of them."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.zeros(count, length, dtype=torch.int64)
    for row in range(count):
        phrase = torch.randint(3, model.arch.vocab_size, (1 + row % 9,), generator=generator)
        tokens[row, :12] = phrase.repeat(12)[:12]
    attention = _attention(model, count, length)
    for start, end in [(0, 12), *((at, at + 1) for at in range(12, length))]:
        positions = torch.arange(start, end).repeat(count)
        slots = positions + torch.arange(count).repeat_interleave(end - start) * length
        layout = attention.layout([SpanLayout(start, end - start, (row,)) for row in range(count)])
        step = ForwardInput(tokens[:, start:end].flatten(), positions, slots)
        hidden, _ = model.forward(step, attention, layout)
        if end < length:
            logits = model.logits(hidden.view(count, end - start, -1)[:, -1])
            hot = (logits / 0.8).softmax(dim=1).multinomial(1, generator=generator)[:, 0]
            tokens[:, end] = torch.where(torch.arange(count) % 2 == 0, logits.argmax(dim=1), hot)
    return tokens


def _fit(model: DecoderModel, published: Published, weights: Weights, favour: float) -> None:
    """fc, then o_proj, then down_proj by ridge regression on what is still missing from the next hidden state."""
    count, length = 60, 44
    tokens = target_texts(model, count, length)
    states = taps_of(model, tokens, tuple(range(model.arch.num_layers + 1)))
    last = states[:, :, -1]
    if published.generation == 1:
        last = rms_norm(last, model.weights.final_norm, model.arch.norm_eps)
    wanted = last[:, 1:].flatten(0, 1).to(torch.float64)  # pair i is to give the state of position i + 1
    read_taps = states[:, :-1, list(published.taps)] if published.generation == 3 else last[:, :-1, None]
    _start_from_target(model, published, weights, favour)
    embedded = model.weights.embedding[tokens[:, 1:]].flatten(0, 1).to(torch.float64)
    inputs = read_taps.flatten(2).flatten(0, 1).to(torch.float64)
    if published.generation == 1:
        inputs = torch.cat([embedded, inputs], dim=1)
    fitted = ridge(torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1), wanted)
    weights["fc.weight"] = fitted[:-1].T.float()
    if published.fc_bias:
        weights["fc.bias"] = fitted[-1].float()
    head = dense_head(model, weights, published)
    contexts, residuals = [], []
    for row in range(count):
        features = head.features(read_taps[row])
        read, residual = head.enter(features, tokens[row, 1:].tolist())
        contexts.append(head.attention(read, range(length - 1), causal(length - 1)))
        residuals.append(residual)
    context, hidden = torch.cat(contexts), torch.cat(residuals)
    out = ridge(context, wanted - hidden)
    hidden = hidden + context @ out
    gated = head.gated(hidden)
    weights["layers.0.self_attn.o_proj.weight"] = out.T.float()
    weights["layers.0.mlp.down_proj.weight"] = ridge(gated, wanted - hidden).T.float()


def _start_from_target(model: DecoderModel, published: Published, weights: Weights, favour: float) -> None:
    """The target's own last norm and head, and attention that looks at the newest token above all."""
    head = model.weights.output.clone()
    head[list(FAVOURED_TOKEN_IDS)] *= favour
    weights["lm_head.weight"] = head[draft_token_ids(model, weights)]
    if published.generation == 1:
        return
    weights["norm.weight"] = model.weights.final_norm.clone()
    key = torch.zeros_like(weights["layers.0.self_attn.k_proj.weight"])
    hidden = model.arch.hidden_size
    key[:, :hidden] = weights["layers.0.self_attn.k_proj.weight"][:, :hidden] * 1.8
    weights["layers.0.self_attn.k_proj.weight"] = key
    groups = key.view(NUM_KV_HEADS, HEAD_DIM, -1).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0)
    weights["layers.0.self_attn.q_proj.weight"] = groups.flatten(0, 1).clone()


def ridge(inputs: torch.Tensor, wanted: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
    """[inputs' width, wanted's width]: least squares with a little weight decay."""
    gram = inputs.T @ inputs + strength * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    return torch.linalg.solve(gram, inputs.T @ wanted)
