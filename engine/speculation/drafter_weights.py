"""Filling a drafter's weights from its checked files: matrices, norms, whole decoder layers, and a vocabulary's map.

Owns the reading in the target's dtype on its device; never knows which tensors a drafter needs. Called by the weights
modules of drafters whose layers are Llama's or Qwen's. V = target's vocabulary, D = drafter's vocabulary (D <= V).
"""

import torch

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.layers import LayerWeights
from engine.speculation.drafter_tensors import DrafterTensors

MAP = "d2t"
MAPS = frozenset({MAP, "t2d"})  # what speaks of the vocabulary and is no weight


def layer_shapes(arch: ArchConfig, prefix: str, reads: int, *, has_input_norm: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of one decoder layer, whose queries, keys and values read `reads` numbers."""
    width, ffn, attention = arch.hidden_size, arch.ffn_size, f"{prefix}self_attn."
    matrices = {
        f"{attention}q_proj": ((arch.query_size, reads), arch.qkv_bias),
        f"{attention}k_proj": ((arch.kv_size, reads), arch.qkv_bias),
        f"{attention}v_proj": ((arch.kv_size, reads), arch.qkv_bias),
        f"{attention}o_proj": ((width, arch.query_size), arch.out_bias),
        f"{prefix}mlp.gate_proj": ((ffn, width), arch.ffn_bias),
        f"{prefix}mlp.up_proj": ((ffn, width), arch.ffn_bias),
        f"{prefix}mlp.down_proj": ((width, ffn), arch.ffn_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (size, has_bias) in matrices.items():
        tensors[f"{name}.weight"] = size
        if has_bias:
            tensors[f"{name}.bias"] = size[:1]
    norms = {f"{prefix}post_attention_layernorm": width}
    if has_input_norm:
        norms[f"{prefix}input_layernorm"] = width
    if arch.qk_norm:
        norms |= {f"{attention}q_norm": arch.head_dim, f"{attention}k_norm": arch.head_dim}
    return tensors | {f"{name}.weight": (size,) for name, size in norms.items()}


class WeightReader:
    """Tensors in the target's dtype on its device. Their shapes were checked."""

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

    def layer(self, arch: ArchConfig, prefix: str, *, has_input_norm: bool) -> LayerWeights:
        """The tensors of `layer_shapes`."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}{name}_proj" for name in ("gate", "up")]
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm", has_input_norm),
            qkv=torch.cat([self.matrix(f"{name}.weight") for name in qkv]),
            qkv_bias=torch.cat([self.matrix(f"{name}.bias") for name in qkv]) if arch.qkv_bias else None,
            query_norm=self.norm(f"{attention}q_norm") if arch.qk_norm else None,
            key_norm=self.norm(f"{attention}k_norm") if arch.qk_norm else None,
            out=self.matrix(f"{attention}o_proj.weight"),
            out_bias=self.matrix(f"{attention}o_proj.bias") if arch.out_bias else None,
            ffn_norm=self.norm(f"{prefix}post_attention_layernorm"),
            gate_up=torch.cat([self.matrix(f"{name}.weight") for name in gate_up]),
            gate_up_bias=torch.cat([self.matrix(f"{name}.bias") for name in gate_up]) if arch.ffn_bias else None,
            down=self.matrix(f"{mlp}down_proj.weight"),
            down_bias=self.matrix(f"{mlp}down_proj.bias") if arch.ffn_bias else None,
        )

    def _filled(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._tensors.shape(name)
        assert shape is not None, name
        target = torch.empty(shape, dtype=dtype, device=self._device)
        self._tensors.copy(name, target)
        return target


def lent_head(target: DecoderModel, target_ids: torch.Tensor | None) -> torch.Tensor:
    """[D, h]: the target's rows of the tokens the drafter knows. A copy where it knows fewer: rows next to each other."""
    output = target.weights.output
    return output if target_ids is None else output.index_select(0, target_ids)


def read_offsets(
    tensors: DrafterTensors, draft_vocab_size: int, vocab_size: int, kind: str = "offsets", hint: str = ""
) -> torch.Tensor | None:
    """int64 [D] on the CPU: the target's token for each of the drafter's; None when they are the same tokens.

    `kind`: d2t holds "offsets" from the drafter's token to the target's, or token "ids". Raises `ModelFilesError`, which
    ends in `hint`, for a map that no trainer writes: it would draft nonsense without anybody noticing.
    """
    stored = tensors.read(MAP)
    if stored.dtype not in (torch.int64, torch.int32) or stored.shape != (draft_vocab_size,):
        raise tensors.refusal(
            f"the tensor {MAP} is {stored.dtype} {tuple(stored.shape)}; {draft_vocab_size} whole numbers are needed"
        )
    numbers = stored.to(torch.int64)
    token_ids = numbers + torch.arange(len(numbers)) if kind == "offsets" else numbers
    problem = _map_problem(token_ids, vocab_size)
    if problem is None and "t2d" in tensors:
        known = tensors.read("t2d").flatten()
        if len(known) != vocab_size or not torch.equal(known.nonzero().flatten(), token_ids):
            problem = "t2d marks other tokens"
    if problem is not None:
        raise tensors.refusal(f"the tensor {MAP}, read as {kind}, maps no vocabulary ({problem}){hint}")
    return None if draft_vocab_size == vocab_size else token_ids


def _map_problem(token_ids: torch.Tensor, vocab_size: int) -> str | None:
    if not bool((token_ids.diff() > 0).all()):
        return "its tokens do not ascend"
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        return f"it leaves the target's {vocab_size} tokens"
    return None
