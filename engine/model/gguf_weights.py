"""Tensors of a GGUF file under Hugging Face names, dequantised one at a time.

Owns the names, and undoing the row order that llama.cpp's converter gives Llama's queries and keys. The header comes
validated from `protocol.gguf`. Called by `engine.model.weights`.
"""

import mmap
from collections.abc import Mapping

import torch

from engine.model.arch import ArchConfig
from engine.model.dequantize import DEQUANTIZERS, dequantize
from protocol.gguf import TensorInfo
from protocol.model_files import ModelFiles, ModelFilesError

_PIECE_ELEMENTS = 1 << 22  # dequantised at once: 16 MiB of float32, so that loading does not double the memory
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as one divisor per frequency


class GGUFSource:
    def __init__(self, files: ModelFiles, arch: ArchConfig) -> None:
        self._files = files
        self._arch = arch
        header = files.header
        self._by_name = {_translate(tensor.name): tensor for tensor in header.tensors}
        for tensor in header.tensors:
            if tensor.type not in DEQUANTIZERS:
                supported = ", ".join(kind.name for kind in DEQUANTIZERS)
                raise self._refusal(f"tensor {tensor.name} is stored as {tensor.type.name}; {supported} can be read")
        self._data = self._map()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._by_name.values() if tensor.name != _ROPE_FACTORS)

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._by_name.get(name)
        return None if tensor is None else tensor.shape

    def size(self, name: str) -> int:
        """Bytes in the file."""
        return self._by_name[name].num_bytes

    def file_name(self, name: str) -> str:
        """What the file calls the tensor."""
        parts = name.rsplit(".", 1)
        if parts[0].startswith("model.layers."):
            _, _, layer, part = parts[0].split(".", 3)
            back = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
            return f"blk.{layer}.{back[part]}.{parts[1]}"
        back = {theirs: ours for ours, theirs in _NAMES.items()}
        return f"{back[parts[0]]}.{parts[1]}"

    def unknown(self, expected: Mapping[str, object]) -> list[str]:
        return [tensor.name for name, tensor in self._by_name.items() if name not in expected and name != _ROPE_FACTORS]

    def rope_factors(self) -> torch.Tensor | None:
        """float32 [head_dim / 2], or None where the file has no scaling of this kind."""
        tensor = self._by_name.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.shape != (self._arch.head_dim // 2,):
            raise self._refusal(f"{_ROPE_FACTORS} has shape {tensor.shape}, not half the head dimension")
        factors = dequantize(tensor.type, self._raw(tensor, 0, tensor.num_bytes))
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise self._refusal(f"{_ROPE_FACTORS} holds values that are not positive")
        return factors

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (same shape, any float dtype and device)."""
        tensor = self._by_name[name]
        num_heads = self._interleaved_heads(name)
        if num_heads is not None:
            values = dequantize(tensor.type, self._raw(tensor, 0, tensor.num_bytes))
            # The converter stored each head's rows as pairs (i, i + D/2); rotation by halves wants them apart again.
            split = values.view(num_heads, self._arch.head_dim // 2, 2, *tensor.shape[1:])
            target.copy_(split.transpose(1, 2).reshape(tensor.shape))
            return
        row_elements = tensor.shape[-1]
        row_bytes = row_elements // tensor.type.block_size * tensor.type.block_bytes
        rows, step = target.view(-1, row_elements), max(1, _PIECE_ELEMENTS // row_elements)
        for first in range(0, rows.shape[0], step):
            last = min(first + step, rows.shape[0])
            raw = self._raw(tensor, first * row_bytes, last * row_bytes)
            rows[first:last].copy_(dequantize(tensor.type, raw).view(last - first, row_elements))

    def _interleaved_heads(self, name: str) -> int | None:
        """Number of heads whose rows are interleaved, for Llama's query and key projections."""
        if self._arch.family != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self._arch.num_heads
        return self._arch.num_kv_heads if ".self_attn.k_proj." in name else None

    def _map(self) -> torch.Tensor:
        """uint8 [file size]: a private mapping, so that torch may hold it as writable; pages load when read."""
        try:
            with self._files.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self._refusal(f"it cannot be read: {error.strerror or error}") from error
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        end = max(tensor.offset + tensor.num_bytes for tensor in self._by_name.values())
        if end > data.numel():
            raise self._refusal("it became shorter while it was read")
        return data

    def _raw(self, tensor: TensorInfo, start: int, end: int) -> torch.Tensor:
        """uint8 [blocks, bytes per block] of a part of the tensor."""
        flat = self._data[tensor.offset + start : tensor.offset + end]
        return flat.view(-1, tensor.type.block_bytes)

    def _refusal(self, reason: str) -> ModelFilesError:
        return ModelFilesError(f"{self._files.path} is not usable: {reason}")


def _translate(name: str) -> str:
    """A GGUF name in Hugging Face's words; names it does not know stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isascii() and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{kind}"
    return name
