"""What the files of a block drafter hold, before any weight is read: its layers, its heads, what it leaves to the target.

Owns the reconciliation of config.json with the tensors that are there and with the target. Called by `block_recipe`.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.model.arch import ArchConfig, arch_of_config
from engine.speculation.block_config import BlockConfig
from engine.speculation.block_layout import BlockLayout, recognise, resolve_facts
from engine.speculation.block_weights import (
    CONFIDENCE,
    EMBEDDING,
    HEAD,
    MARKOV_OUTPUT,
    PREDECESSORS,
    BlockShape,
    MarkovShape,
)
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.drafter_weights import MAP
from engine.speculation.markov_head import MarkovKind
from engine.speculation.recipe import BlockOverrides, TargetFacts

# Sliding windows are resolved by `block_layout`; the architecture of a target has none.
_OF_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def read_shape(
    tensors: DrafterTensors, config: Mapping[str, object], overrides: BlockOverrides, facts: TargetFacts
) -> BlockShape:
    """Raises ValueError naming the option that cannot be, `ModelFilesError` for files that cannot be used."""
    layout = recognise(config, tensors)
    layers = _layers(layout, config, tensors)
    keys = BlockConfig(config, layers, tensors, tensors.directory)
    arch = _arch(tensors, layers, facts)
    markov = _markov(tensors, keys)
    resolved = resolve_facts(
        layout, keys, arch.num_layers, arch.vocab_size, facts.arch.num_layers, markov is not None, overrides
    )
    if overrides.final_norm and facts.arch.num_layers not in resolved.taps:
        raise ValueError("--block-final-norm says nothing: the drafter does not read the last hidden state")
    has_confidence = CONFIDENCE in tensors
    reads_token = keys.flag("confidence_head_with_markov")
    shape = BlockShape(
        arch=arch,
        facts=resolved,
        target_width=facts.arch.hidden_size,
        draft_vocab_size=_draft_vocab_size(tensors, keys, arch.vocab_size),
        has_embedding=EMBEDDING in tensors,
        has_head=HEAD in tensors,
        has_map=MAP in tensors,
        markov=markov,
        has_confidence=has_confidence,
        confidence_reads_token=has_confidence and (markov is not None if reads_token is None else reads_token),
    )
    _check(tensors, keys, shape)
    return shape


def _layers(layout: BlockLayout, config: Mapping[str, object], tensors: DrafterTensors) -> Mapping[str, object]:
    """The part of config.json that describes the decoder layers."""
    layers: object = config if layout.layer_config is None else config.get(layout.layer_config)
    if not isinstance(layers, Mapping):
        raise tensors.refusal(f"{layout.layer_config} of config.json is missing or no object")
    return layers


def _arch(tensors: DrafterTensors, layers: Mapping[str, object], facts: TargetFacts) -> ArchConfig:
    """Of the layers; what config.json leaves open (biases, norms of heads) is what the tensors are."""
    context = layers.get("max_position_embeddings", facts.arch.context_length)
    if type(context) is not int or context < 1:
        raise tensors.refusal(f"max_position_embeddings of config.json must be a whole number, got {context!r:.40}")
    plain = {key: value for key, value in layers.items() if key not in _OF_WINDOWS}
    arch = arch_of_config(tensors.directory / "config.json", plain, context)
    if arch.vocab_size != facts.vocab_size:
        raise tensors.refusal(
            f"it was made for a vocabulary of {arch.vocab_size} tokens; the target has {facts.vocab_size}"
        )
    return replace(
        arch,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        out_bias="layers.0.self_attn.o_proj.bias" in tensors,
        ffn_bias="layers.0.mlp.down_proj.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
    )


def _markov(tensors: DrafterTensors, keys: BlockConfig) -> MarkovShape | None:
    """The Markov head: config.json and the tensors must agree on whether there is one."""
    rank = keys.whole_number("markov_rank", default=0, least=0)
    if rank == 0:
        if PREDECESSORS in tensors or MARKOV_OUTPUT in tensors:
            raise tensors.refusal("it has the tensors of a Markov head, but config.json names no markov_rank")
        return None
    kind = keys.name("markov_head_type", tuple(MarkovKind), MarkovKind.VANILLA)
    return MarkovShape(MarkovKind(kind), rank)


def _draft_vocab_size(tensors: DrafterTensors, keys: BlockConfig, vocab_size: int) -> int:
    stored = tensors.shape(HEAD)
    size = keys.whole_number("draft_vocab_size", default=stored[0] if stored else vocab_size)
    if size > vocab_size:
        raise tensors.refusal(f"a draft vocabulary of {size} tokens does not fit the target's {vocab_size}")
    return size


def _check(tensors: DrafterTensors, keys: BlockConfig, shape: BlockShape) -> None:
    """What a checkpoint leaves out must be what the target has, and its heads must be what config.json says."""
    width, target_width = shape.arch.hidden_size, shape.target_width
    for name, is_there in ((EMBEDDING, shape.has_embedding), (HEAD, shape.has_head)):
        if not is_there and width != target_width:
            raise tensors.refusal(
                f"the tensor {name} is missing, and the target's is {target_width} wide where {width} is needed"
            )
    if shape.draft_vocab_size < shape.arch.vocab_size and not shape.has_map:
        raise tensors.refusal(
            f"the tensor {MAP} is missing: it drafts {shape.draft_vocab_size} of {shape.arch.vocab_size} tokens"
        )
    if keys.flag("enable_confidence_head") and not shape.has_confidence:
        raise tensors.refusal(f"enable_confidence_head of config.json is true, but the tensor {CONFIDENCE} is missing")
    if shape.confidence_reads_token and shape.markov is None:
        raise tensors.refusal("confidence_head_with_markov of config.json is true, but there is no Markov head")
    stored, taps = tensors.shape("fc.weight"), shape.facts.taps
    if stored is not None and len(stored) == 2 and stored[1] != len(taps) * target_width:
        raise ValueError(
            f"{tensors.directory}: fc.weight reads {stored[1]} numbers, which is not {len(taps)} hidden states "
            f"({', '.join(map(str, taps))}) of {target_width}: another target, or --block-taps must say which to read"
        )
