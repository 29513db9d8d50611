"""From a block drafter's files to `BlockWeights`: which tensors it needs, their shapes, and filling them.

Owns the names and the check of every tensor before anything is allocated. What a checkpoint leaves out (embedding, head)
is the target's own tensor, as is what turns out to be a copy of it. Called by `block_recipe`.
h = drafter's width, t = target's width, n = taps, r = rank of the Markov head, V = target's vocabulary, D = drafter's.
"""

from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.rope import inverse_frequencies
from engine.speculation.block_layout import BlockFacts
from engine.speculation.block_model import BlockWeights
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.drafter_weights import WeightReader, layer_shapes, lent_head, read_offsets
from engine.speculation.markov_head import ConfidenceHead, MarkovHead, MarkovKind

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PREDECESSORS, MARKOV_OUTPUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
_MIXERS = {MarkovKind.GATED: "markov_head.gate_proj", MarkovKind.RNN: "markov_head.joint_proj"}


@dataclass(frozen=True)
class MarkovShape:
    kind: MarkovKind
    rank: int  # r


@dataclass(frozen=True)
class BlockShape:
    """What the tensors and config.json agree on."""

    arch: ArchConfig  # of the layers; its vocabulary is the target's
    facts: BlockFacts
    target_width: int  # t
    draft_vocab_size: int  # D
    has_embedding: bool
    has_head: bool
    has_map: bool  # d2t
    markov: MarkovShape | None
    has_confidence: bool
    confidence_reads_token: bool  # the confidence head reads the token before, as the Markov head embeds it

    @property
    def confidence_width(self) -> int:
        rank = self.markov.rank if self.markov is not None and self.confidence_reads_token else 0
        return self.arch.hidden_size + rank


def expected_tensors(shape: BlockShape) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of the drafter under its name here."""
    arch, width = shape.arch, shape.arch.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(shape.facts.taps) * shape.target_width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(arch.num_layers):
        tensors |= layer_shapes(arch, f"layers.{index}.", width, has_input_norm=True)
    if shape.has_embedding:
        tensors[EMBEDDING] = (arch.vocab_size, width)
    if shape.has_head:
        tensors[HEAD] = (shape.draft_vocab_size, width)
    if shape.markov is not None:
        rank = shape.markov.rank
        tensors |= {PREDECESSORS: (arch.vocab_size, rank), MARKOV_OUTPUT: (shape.draft_vocab_size, rank)}
        mixers = {MarkovKind.GATED: (rank, width + rank), MarkovKind.RNN: (3 * rank, 2 * rank + width)}
        if shape.markov.kind in mixers:
            size, name = mixers[shape.markov.kind], _MIXERS[shape.markov.kind]
            tensors |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    if shape.has_confidence:
        tensors |= {CONFIDENCE: (1, shape.confidence_width), "confidence_head.proj.bias": (1,)}
    return tensors


def load_weights(tensors: DrafterTensors, shape: BlockShape, target: DecoderModel) -> BlockWeights:
    """Every tensor in the target's dtype on its device, norms in float32. `expected_tensors` were checked."""
    read = WeightReader(tensors, target)
    target_ids = read_map(tensors, shape)
    target_ids = None if target_ids is None else target_ids.to(target.device)
    layers = (read.layer(shape.arch, f"layers.{index}.", has_input_norm=True) for index in range(shape.arch.num_layers))
    return BlockWeights(
        embedding=read.shared(EMBEDDING, target.weights.embedding) if shape.has_embedding else target.weights.embedding,
        fc=read.matrix("fc.weight"),
        hidden_norm=read.norm("hidden_norm"),
        target_norm=target.weights.final_norm if shape.facts.final_norm else None,
        layers=tuple(layers),
        output_norm=read.norm("norm"),
        output=read.shared(HEAD, target.weights.output) if shape.has_head else lent_head(target, target_ids),
        target_ids=target_ids,
        inverse_frequencies=inverse_frequencies(shape.arch.rope, shape.arch.head_dim).to(target.device),
        markov=None if shape.markov is None else _markov(read, shape.markov.kind),
        confidence=_confidence(read, shape) if shape.has_confidence else None,
    )


def read_map(tensors: DrafterTensors, shape: BlockShape) -> torch.Tensor | None:
    """int64 [D] on the CPU: the target's token for each of the drafter's; None when they are the same tokens."""
    return read_offsets(tensors, shape.draft_vocab_size, shape.arch.vocab_size) if shape.has_map else None


def _markov(read: WeightReader, kind: MarkovKind) -> MarkovHead:
    mixer = _MIXERS.get(kind)
    return MarkovHead(
        kind=kind,
        predecessors=read.matrix(PREDECESSORS),
        output=read.matrix(MARKOV_OUTPUT),
        mixer=None if mixer is None else read.matrix(f"{mixer}.weight"),
        mixer_bias=None if mixer is None else read.matrix(f"{mixer}.bias"),
    )


def _confidence(read: WeightReader, shape: BlockShape) -> ConfidenceHead:
    return ConfidenceHead(
        read.matrix(CONFIDENCE), read.matrix("confidence_head.proj.bias"), shape.confidence_reads_token
    )
