"""Tiny block drafters (DFlash, DSpark) in every published layout, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and config.json; never touches a network. `write_block` is the entry; `fitted_dflash` and `fitted_dspark`
are what tests of the whole engine draft with. Fitting is least squares over text the target wrote: a random drafter would
be right once in the vocabulary, and equal answers would prove little.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine.model.decoder import DecoderModel
from tests.block_reference import BlockSpec, DenseBlock
from tests.tiny_drafters import FAVOURED_TOKEN_IDS, draft_token_ids, ridge, taps_of, target_model, target_texts

Layout = Literal["z-lab", "speculators", "deepspec", "specforge"]
Weights = dict[str, torch.Tensor]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN = 4, 2, 16, 128
FAVOUR = 2.5  # as tests.tiny_drafters explains
REPEATS = 0.5  # one token in eight of the traffic of tests.lossless is the one before it


@dataclass(frozen=True)
class PublishedBlock:
    """What a publisher decided. `taps` are numbers of hidden states, whatever the layout writes."""

    layout: Layout
    taps: tuple[int, ...] = (1, 2)
    block_size: int = 5
    anchor: Literal["drop", "first"] = "drop"
    says_anchor: bool = False  # `sample_from_anchor` is written
    num_layers: int = 2
    sliding: tuple[bool, ...] = (False, False)
    window: int = 6
    says_causal: bool | None = None  # `is_causal`; for speculators `sliding_window_non_causal` is its opposite
    draft_vocab_size: int | None = None  # None: the target's
    qk_norm: bool = True
    attention_bias: bool = False
    has_embedding: bool = False
    has_head: bool = False
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    rank: int = 8
    confidence: Literal["none", "hidden", "markov"] = "none"
    mask_token_id: int = 319
    context_length: int = 512
    extras: tuple[tuple[str, Any], ...] = ()  # more keys, where the layout keeps its own

    @property
    def name(self) -> str:
        return "dflash" if self.markov is None and self.confidence == "none" else "dspark"

    @property
    def anchor_rows(self) -> int:
        return 1 if self.anchor == "drop" else 0

    @property
    def max_tokens(self) -> int:
        return self.block_size - self.anchor_rows

    @property
    def causal(self) -> tuple[bool, ...]:
        """Per layer, as the layout's publishers run it."""
        if self.says_causal is None or self.layout == "speculators":
            is_causal = self.layout != "deepspec" and self.says_causal is not False
            return tuple(is_causal and one for one in self.sliding[: self.num_layers])
        return (self.says_causal,) * self.num_layers

    def spec(self) -> BlockSpec:
        extras = dict(self.extras)
        sliding = self.sliding[: self.num_layers]
        return BlockSpec(
            self.num_layers, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
            windows=tuple(self.window if one else None for one in sliding),
            causal=self.causal,
            anchor_rows=self.anchor_rows,
            mask_token_id=self.mask_token_id,
            markov=self.markov,
            embedding_scale=extras.get("input_embedding_scale", 1.0),
            multiplier=extras.get("output_multiplier", 1.0),
            softcap=extras.get("final_logit_softcapping"),
        )  # fmt: skip


FITTED_DFLASH = PublishedBlock("deepspec", anchor="first", num_layers=1, has_head=True)
FITTED_DSPARK = PublishedBlock(
    "speculators", anchor="first", num_layers=1, has_head=True, draft_vocab_size=200,
    markov="vanilla", rank=64, confidence="markov",
)  # fmt: skip


def fitted_dflash(directory: Path, target: Path) -> Path:
    return write_block(directory, target, FITTED_DFLASH, favour=FAVOUR, repeats=REPEATS)


def fitted_dspark(directory: Path, target: Path) -> Path:
    return write_block(directory, target, FITTED_DSPARK, favour=FAVOUR, repeats=REPEATS)


def write_block(
    directory: Path,
    target: Path,
    published: PublishedBlock,
    *,
    seed: int = 0,
    favour: float | None = None,
    repeats: float = 0.0,
) -> Path:
    """A drafter for the Hugging Face directory `target`, whose layers number two or more.

    Random, or with `favour` fitted, the logits of `FAVOURED_TOKEN_IDS` multiplied by it, and with the more of an
    inclination to say the anchor again, the larger `repeats` is.
    """
    model = target_model(target)
    weights = random_block_weights(model, published, seed)
    if favour is not None:
        fit(model, published, weights, favour, repeats)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(block_config(model, published)))
    stored = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def block_config(model: DecoderModel, published: PublishedBlock) -> dict[str, Any]:
    """config.json as the layout's publishers write it."""
    arch = model.arch
    layers: dict[str, Any] = {
        "model_type": "qwen3" if published.qk_norm else "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": FFN,
        "num_hidden_layers": published.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": published.context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if any(published.sliding):
        kinds = ["sliding_attention" if one else "full_attention" for one in published.sliding]
        layers |= {"layer_types": kinds, "sliding_window": published.window, "use_sliding_window": True}
    own: dict[str, Any] = {"mask_token_id": published.mask_token_id, **dict(published.extras)}
    if published.says_anchor:
        own["sample_from_anchor"] = published.anchor == "first"
    if published.markov is not None:
        own |= {"markov_rank": published.rank, "markov_head_type": published.markov}
    if published.confidence != "none":
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": published.confidence == "markov"}
    if published.says_causal is not None and published.layout != "speculators":
        own["is_causal"] = published.says_causal
    layer_ids = [tap - 1 for tap in published.taps]
    match published.layout:
        case "z-lab":
            nested = {**own, "target_layer_ids": layer_ids}
            top = {"architectures": ["DFlashDraftModel"], "block_size": published.block_size}
            return {**layers, **top, "num_target_layers": arch.num_layers, "dflash_config": nested}
        case "specforge":
            kind = {"projector_type": published.name, "target_layer_ids": layer_ids, "block_size": published.block_size}
            return {**layers, "architectures": ["DFlashDraftModel"], "dflash_config": {**own, **kind}}
        case "deepspec":
            top = {"architectures": ["Qwen3DSparkModel"], "block_size": published.block_size, "num_anchors": 512}
            return {**layers, **top, "markov_rank": 0, **own, "target_layer_ids": layer_ids}
        case "speculators":
            own |= {"aux_hidden_state_layer_ids": list(published.taps), "block_size": published.block_size}
            own["draft_vocab_size"] = published.draft_vocab_size or arch.vocab_size
            if published.says_causal is not None:
                own["sliding_window_non_causal"] = not published.says_causal
            kind = {"speculators_model_type": published.name, "architectures": ["DFlashSpeculator"]}
            return {**kind, "transformer_layer_config": layers, **own}


def random_block_weights(model: DecoderModel, published: PublishedBlock, seed: int) -> Weights:
    """Every tensor of the checkpoint, float32 (d2t and t2d as they are stored)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab_size = model.arch.hidden_size, model.arch.vocab_size
    query, kv, rank = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, published.rank

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    matrices = {"fc": (hidden, len(published.taps) * hidden)}
    norms = {"hidden_norm": hidden, "norm": hidden}
    biased: list[str] = []
    for layer in range(published.num_layers):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        matrices |= {f"{attention}q_proj": (query, hidden), f"{attention}k_proj": (kv, hidden)}
        matrices |= {f"{attention}v_proj": (kv, hidden), f"{attention}o_proj": (hidden, query)}
        matrices |= {f"{mlp}gate_proj": (FFN, hidden), f"{mlp}up_proj": (FFN, hidden), f"{mlp}down_proj": (hidden, FFN)}
        norms |= {f"layers.{layer}.{name}": hidden for name in ("input_layernorm", "post_attention_layernorm")}
        if published.qk_norm:
            norms |= {f"{attention}q_norm": HEAD_DIM, f"{attention}k_norm": HEAD_DIM}
        if published.attention_bias:
            biased += [f"{attention}{name}_proj" for name in "qkvo"]
    draft_vocab_size = published.draft_vocab_size or vocab_size
    if published.markov is not None:
        matrices |= {"markov_head.markov_w1": (vocab_size, rank), "markov_head.markov_w2": (draft_vocab_size, rank)}
        mixers = {"gated": ("gate_proj", (rank, hidden + rank)), "rnn": ("joint_proj", (3 * rank, 2 * rank + hidden))}
        if published.markov in mixers:
            name, size = mixers[published.markov]
            matrices[f"markov_head.{name}"] = size
            biased.append(f"markov_head.{name}")
    if published.confidence != "none":
        matrices["confidence_head.proj"] = (1, hidden + (rank if published.confidence == "markov" else 0))
        biased.append("confidence_head.proj")
    weights = {f"{name}.weight": draw(*size, scale=1.3 / math.sqrt(size[1])) for name, size in matrices.items()}
    if published.markov is not None:
        weights["markov_head.markov_w1.weight"] = draw(vocab_size, rank, scale=1.0)
    weights |= {f"{name}.bias": draw(matrices[name][0], scale=0.3) for name in biased}
    weights |= {f"{name}.weight": 1.0 + draw(size, scale=0.2) for name, size in norms.items()}
    if published.has_embedding:
        weights["embed_tokens.weight"] = draw(vocab_size, hidden, scale=0.4)
    if published.has_head:
        weights["lm_head.weight"] = draw(draft_vocab_size, hidden, scale=0.4)
    if published.draft_vocab_size is not None:
        weights |= _vocabulary_map(vocab_size, published.draft_vocab_size, generator)
    return weights


def _vocabulary_map(vocab_size: int, draft_vocab_size: int, generator: torch.Generator) -> Weights:
    others = torch.randperm(vocab_size, generator=generator)
    others = others[~torch.isin(others, torch.tensor(FAVOURED_TOKEN_IDS))]
    token_ids = torch.cat([torch.tensor(FAVOURED_TOKEN_IDS), others])[:draft_vocab_size].sort().values
    marks = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    return {"d2t": token_ids - torch.arange(draft_vocab_size), "t2d": marks}


def dense_block(model: DecoderModel, weights: Mapping[str, torch.Tensor], published: PublishedBlock) -> DenseBlock:
    """The float64 reference over these weights, with what the target lends."""
    lent = model.weights.output[draft_token_ids(model, weights)]
    shared = {"embed_tokens.weight": model.weights.embedding, "lm_head.weight": lent}
    return DenseBlock({**shared, **weights}, published.spec())


def fit(model: DecoderModel, published: PublishedBlock, weights: Weights, favour: float, repeats: float) -> None:
    """o_proj, then down_proj of the one layer by ridge regression on what is still missing from the target's states.

    A Markov head says what the target would say of the token before it alone.
    """
    assert published.num_layers == 1, "deeper ones need training"
    head = model.weights.output.clone()
    head[list(FAVOURED_TOKEN_IDS)] *= favour
    head += repeats * model.weights.embedding
    known = draft_token_ids(model, weights)
    weights["lm_head.weight"] = head[known]
    weights["norm.weight"] = model.weights.final_norm.clone()
    if published.markov is not None:
        # Rows that see the anchor itself know more than the token before it says; others know hardly anything else.
        own, others = (1.0, 0.2) if published.anchor == "first" else (0.3, 1.0)
        weights["norm.weight"] *= own
        embedding = model.weights.embedding
        normed = embedding / embedding.square().mean(dim=1, keepdim=True).sqrt() * model.weights.final_norm
        weights["markov_head.markov_w1.weight"] = normed * others
        weights["markov_head.markov_w2.weight"] = head[known].clone()
    tokens = target_texts(model, 40, 40)
    states = taps_of(model, tokens, tuple(range(model.arch.num_layers + 1)))
    dense = dense_block(model, weights, published)
    rows, contexts, wanted = [], [], []
    size = published.block_size
    for text, state in zip(tokens.tolist(), states, strict=True):
        features = dense.features(state[:, list(published.taps)])
        for root in range(9, len(text) - size, 5):
            x = dense.rows(text[root], size)
            # A row that drafts predicts what the target's own state one place before its token predicts.
            predicts = state[root - published.anchor_rows : root - published.anchor_rows + size, -1]
            drafts = slice(published.anchor_rows, None)
            rows.append(x[drafts])
            contexts.append(dense.attention(0, features[:root], x)[drafts])
            wanted.append(predicts[drafts].to(torch.float64))
    hidden, context, missing = torch.cat(rows), torch.cat(contexts), torch.cat(wanted)
    out = ridge(context, missing - hidden)
    hidden = hidden + context @ out
    weights["layers.0.self_attn.o_proj.weight"] = out.T.float()
    weights["layers.0.mlp.down_proj.weight"] = ridge(dense.gated(0, hidden), missing - hidden).T.float()
