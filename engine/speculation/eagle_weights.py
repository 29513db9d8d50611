"""From a drafter's files to `EagleWeights`: which tensors a head needs, their shapes, and filling them.

Owns the names and the check of every tensor before anything is allocated. What a checkpoint leaves out (embedding, head)
is the target's own tensor, as is what turns out to be a copy of it. Called by `eagle_recipe`.
h = drafter's width, t = target's width, V = target's vocabulary, D = drafter's vocabulary (D <= V).
"""

from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.rope import inverse_frequencies
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.drafter_weights import WeightReader, layer_shapes, lent_head, read_offsets
from engine.speculation.eagle_head import EagleWeights
from engine.speculation.eagle_layout import EagleFacts

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYER = "layers.0."


@dataclass(frozen=True)
class EagleShape:
    """What the tensors and config.json agree on."""

    arch: ArchConfig  # of the head's one layer; its vocabulary is the target's
    facts: EagleFacts
    target_width: int  # t
    draft_vocab_size: int  # D
    has_fc_bias: bool
    has_embedding: bool
    has_head: bool
    has_map: bool  # d2t

    @property
    def attention_width(self) -> int:
        """What queries, keys and values are projected from: EAGLE-3 reads embedding and features next to each other."""
        return self.arch.hidden_size * (1 if self.facts.layout.generation == 1 else 2)


def expected_tensors(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of the head under its name here."""
    arch, facts = shape.arch, shape.facts
    is_third = facts.layout.generation == 3
    width = arch.hidden_size
    tensors = layer_shapes(arch, _LAYER, shape.attention_width, has_input_norm=is_third)
    tensors["fc.weight"] = (width, _fc_reads(shape))
    if shape.has_fc_bias:
        tensors["fc.bias"] = (width,)
    norms = {f"{_LAYER}hidden_norm": width, "norm": width} if is_third else {}
    norms |= dict(_feature_norms(shape))
    tensors |= {f"{name}.weight": (size,) for name, size in norms.items()}
    if shape.has_embedding:
        tensors[EMBEDDING] = (arch.vocab_size, width)
    if shape.has_head:
        tensors[HEAD] = (shape.draft_vocab_size, width)
    return tensors


def _fc_reads(shape: EagleShape) -> int:
    if shape.facts.layout.generation == 1:
        return shape.arch.hidden_size + shape.target_width
    return len(shape.facts.taps) * shape.target_width


def _feature_norms(shape: EagleShape) -> list[tuple[str, int]]:
    match shape.facts.feature_norm:
        case "joint":
            return [("input_norm", len(shape.facts.taps) * shape.target_width)]
        case "each":
            return [(f"fc_norm.{index}", shape.target_width) for index in range(len(shape.facts.taps))]
        case _:
            return []


def load_weights(tensors: DrafterTensors, shape: EagleShape, target: DecoderModel) -> EagleWeights:
    """Every tensor in the target's dtype on its device, norms in float32. `expected_tensors` were checked."""
    read = WeightReader(tensors, target)
    is_third = shape.facts.layout.generation == 3
    target_ids = read_map(tensors, shape, target.device)
    return EagleWeights(
        embedding=read.shared(EMBEDDING, target.weights.embedding) if shape.has_embedding else target.weights.embedding,
        fc=read.matrix("fc.weight"),
        fc_bias=read.matrix("fc.bias") if shape.has_fc_bias else None,
        feature_norms=tuple(read.norm(name) for name, _ in _feature_norms(shape)),
        final_norm=target.weights.final_norm if shape.facts.final_norm else None,
        layer=read.layer(shape.arch, _LAYER, has_input_norm=is_third),
        hidden_norm=read.norm(f"{_LAYER}hidden_norm") if is_third else None,
        output_norm=read.norm("norm") if is_third else None,
        output=read.shared(HEAD, target.weights.output) if shape.has_head else lent_head(target, target_ids),
        target_ids=target_ids,
        inverse_frequencies=inverse_frequencies(shape.arch.rope, shape.arch.head_dim).to(target.device),
    )


def read_map(tensors: DrafterTensors, shape: EagleShape, device: torch.device) -> torch.Tensor | None:
    """int64 [D]: the target's token for each of the drafter's; None when they are the same tokens.

    Raises `ModelFilesError` for a map that no trainer writes: it would draft nonsense without anybody noticing.
    """
    if not shape.has_map:
        return None
    token_ids = read_offsets(
        tensors,
        shape.draft_vocab_size,
        shape.arch.vocab_size,
        shape.facts.vocabulary_map,
        "; --eagle-vocabulary-map says how to read it",
    )
    return None if token_ids is None else token_ids.to(device)
