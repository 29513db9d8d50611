"""From a drafter's files to `EagleWeights`: which tensors a head needs, their shapes, and filling them.

Owns the names and the check of every tensor before anything is allocated. What a checkpoint leaves out (embedding, head)
is the target's own tensor, as is what turns out to be a copy of it. Called by `eagle_recipe`.
h = drafter's width, t = target's width, V = target's vocabulary, D = drafter's vocabulary (D <= V).
"""

from dataclasses import dataclass

import torch

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.layers import LayerWeights
from engine.model.rope import inverse_frequencies
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.eagle_head import EagleWeights
from engine.speculation.eagle_layout import EagleFacts

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYER = "layers.0."
_ATTENTION = _LAYER + "self_attn."


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
    width, ffn, reads = arch.hidden_size, arch.ffn_size, shape.attention_width
    matrices = {
        f"{_ATTENTION}q_proj": ((arch.query_size, reads), arch.qkv_bias),
        f"{_ATTENTION}k_proj": ((arch.kv_size, reads), arch.qkv_bias),
        f"{_ATTENTION}v_proj": ((arch.kv_size, reads), arch.qkv_bias),
        f"{_ATTENTION}o_proj": ((width, arch.query_size), arch.out_bias),
        f"{_LAYER}mlp.gate_proj": ((ffn, width), arch.ffn_bias),
        f"{_LAYER}mlp.up_proj": ((ffn, width), arch.ffn_bias),
        f"{_LAYER}mlp.down_proj": ((width, ffn), arch.ffn_bias),
        "fc": ((width, _fc_reads(shape)), shape.has_fc_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (size, has_bias) in matrices.items():
        tensors[f"{name}.weight"] = size
        if has_bias:
            tensors[f"{name}.bias"] = size[:1]
    norms = {f"{_LAYER}post_attention_layernorm": width}
    if arch.qk_norm:
        norms |= {f"{_ATTENTION}q_norm": arch.head_dim, f"{_ATTENTION}k_norm": arch.head_dim}
    if facts.layout.generation == 3:
        norms |= {f"{_LAYER}input_layernorm": width, f"{_LAYER}hidden_norm": width, "norm": width}
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
    read = _Reader(tensors, target)
    layer = LayerWeights(
        input_norm=read.norm(f"{_LAYER}input_layernorm", shape.facts.layout.generation == 3),
        qkv=torch.cat([read.matrix(f"{_ATTENTION}{name}_proj.weight") for name in "qkv"]),
        qkv_bias=torch.cat([read.matrix(f"{_ATTENTION}{name}_proj.bias") for name in "qkv"])
        if shape.arch.qkv_bias
        else None,
        query_norm=read.norm(f"{_ATTENTION}q_norm") if shape.arch.qk_norm else None,
        key_norm=read.norm(f"{_ATTENTION}k_norm") if shape.arch.qk_norm else None,
        out=read.matrix(f"{_ATTENTION}o_proj.weight"),
        out_bias=read.matrix(f"{_ATTENTION}o_proj.bias") if shape.arch.out_bias else None,
        ffn_norm=read.norm(f"{_LAYER}post_attention_layernorm"),
        gate_up=torch.cat([read.matrix(f"{_LAYER}mlp.{name}_proj.weight") for name in ("gate", "up")]),
        gate_up_bias=torch.cat([read.matrix(f"{_LAYER}mlp.{name}_proj.bias") for name in ("gate", "up")])
        if shape.arch.ffn_bias
        else None,
        down=read.matrix(f"{_LAYER}mlp.down_proj.weight"),
        down_bias=read.matrix(f"{_LAYER}mlp.down_proj.bias") if shape.arch.ffn_bias else None,
    )
    is_third = shape.facts.layout.generation == 3
    target_ids = read_map(tensors, shape, target.device)
    return EagleWeights(
        embedding=read.shared(EMBEDDING, target.weights.embedding) if shape.has_embedding else target.weights.embedding,
        fc=read.matrix("fc.weight"),
        fc_bias=read.matrix("fc.bias") if shape.has_fc_bias else None,
        feature_norms=tuple(read.norm(name) for name, _ in _feature_norms(shape)),
        final_norm=target.weights.final_norm if shape.facts.final_norm else None,
        layer=layer,
        hidden_norm=read.norm(f"{_LAYER}hidden_norm") if is_third else None,
        output_norm=read.norm("norm") if is_third else None,
        output=read.shared(HEAD, target.weights.output) if shape.has_head else _lent_head(target, target_ids),
        target_ids=target_ids,
        inverse_frequencies=inverse_frequencies(shape.arch.rope, shape.arch.head_dim).to(target.device),
    )


def _lent_head(target: DecoderModel, target_ids: torch.Tensor | None) -> torch.Tensor:
    """[D, h]: the target's rows of the tokens the drafter knows. A copy where it knows fewer: rows next to each other."""
    output = target.weights.output
    return output if target_ids is None else output.index_select(0, target_ids)


class _Reader:
    """Tensors in the target's dtype on its device."""

    def __init__(self, tensors: DrafterTensors, target: DecoderModel) -> None:
        self._tensors = tensors
        self._dtype, self._device = target.dtype, target.device

    def matrix(self, name: str) -> torch.Tensor:
        return self._filled(name, self._dtype)

    def norm(self, name: str, is_there: bool = True) -> torch.Tensor:
        """Float32; empty where the architecture has none."""
        if not is_there:
            return torch.empty(0, device=self._device)
        return self._filled(f"{name}.weight", torch.float32)

    def shared(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The file's tensor, or the target's when the file merely repeats it, which publishers often do."""
        read = self.matrix(name)
        return own if read.shape == own.shape and torch.equal(read, own) else read

    def _filled(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._tensors.shape(name)
        assert shape is not None, name
        target = torch.empty(shape, dtype=dtype, device=self._device)
        self._tensors.copy(name, target)
        return target


def read_map(tensors: DrafterTensors, shape: EagleShape, device: torch.device) -> torch.Tensor | None:
    """int64 [D]: the target's token for each of the drafter's; None when they are the same tokens.

    Raises `ModelFilesError` for a map that no trainer writes: it would draft nonsense without anybody noticing.
    """
    if not shape.has_map:
        return None
    stored = tensors.read("d2t")
    if stored.dtype not in (torch.int64, torch.int32) or stored.shape != (shape.draft_vocab_size,):
        raise tensors.refusal(
            f"the tensor d2t is {stored.dtype} {tuple(stored.shape)}; {shape.draft_vocab_size} whole numbers are needed"
        )
    numbers = stored.to(torch.int64)
    is_offsets = shape.facts.vocabulary_map == "offsets"
    token_ids = numbers + torch.arange(len(numbers)) if is_offsets else numbers
    problem = _map_problem(token_ids, shape.arch.vocab_size)
    if problem is None and "t2d" in tensors:
        known = tensors.read("t2d").flatten()
        if len(known) != shape.arch.vocab_size or not torch.equal(known.nonzero().flatten(), token_ids):
            problem = "t2d marks other tokens"
    if problem is not None:
        raise tensors.refusal(
            f"the tensor d2t, read as {shape.facts.vocabulary_map}, maps no vocabulary ({problem}); "
            "--eagle-vocabulary-map says how to read it"
        )
    if shape.draft_vocab_size == shape.arch.vocab_size:
        return None
    return token_ids.to(device)


def _map_problem(token_ids: torch.Tensor, vocab_size: int) -> str | None:
    if not bool((token_ids.diff() > 0).all()):
        return "its tokens do not ascend"
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        return f"it leaves the target's {vocab_size} tokens"
    return None
