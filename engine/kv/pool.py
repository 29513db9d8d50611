"""The keys and values of one model: tensors indexed by block ids that somebody else hands out.

Owns memory and the moves within it; never decides which block belongs to whom (`engine.kv.blocks` does). Used by
`engine.model.attention` and `engine.model_executor`. Slot = block id * block_size + position in the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """`keys` and `values`: [layers, num_blocks, block_size, kv_heads, head_dim], zero at first.

    Invariant, with `clear`: a slot behind the end of a sequence's last block is zero or holds that sequence's own
    rejected drafts, so reading whole blocks under a mask never meets another sequence's NaN (0 * NaN is NaN).
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1 or shape.block_size < 1:
            raise ValueError(f"a KV pool needs at least one block of one token, got {num_blocks} of {shape.block_size}")
        self.shape = shape
        self.num_blocks = num_blocks
        size = (shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeroing touches all of it now: an engine that cannot have its KV cache fails at start, not under load.
        try:
            self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
            self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        except RuntimeError as error:  # torch has no narrower one for the CPU
            num_tokens, num_bytes = num_blocks * shape.block_size, num_blocks * shape.block_size * shape.bytes_per_token
            raise ValueError(
                f"a KV cache of {num_tokens} tokens takes {num_bytes / 2**30:.1f} GiB, more than {device.type} can give: "
                "lower --kv-cache-tokens"
            ) from error
        self._key_slots = self.keys.view(shape.num_layers, -1, shape.num_kv_heads, shape.head_dim)
        self._value_slots = self.values.view(shape.num_layers, -1, shape.num_kv_heads, shape.head_dim)

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] at int64 [T] slots of one layer."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def clear(self, slots: torch.Tensor) -> None:
        """Zero int64 [N] slots in all layers."""
        self._key_slots.index_fill_(1, slots, 0)
        self._value_slots.index_fill_(1, slots, 0)

    def compact(self, block_ids: Sequence[int], root: int, path: Sequence[int]) -> None:
        """Move a tree's accepted nodes behind their root: node path[i] (stored at root + 1 + path[i]) to root + 1 + i.

        `root` is a position, `path` ascending node numbers. The nodes' blocks must not have been written since.
        """
        moves = [(root + 1 + node, root + 1 + index) for index, node in enumerate(path) if node != index]
        if not moves:
            return
        sources = self.slots_tensor([self.slot(block_ids, source) for source, _ in moves])
        targets = self.slots_tensor([self.slot(block_ids, target) for _, target in moves])
        # Indexing copies before it is stored, so overlapping sources and targets are safe.
        self._key_slots[:, targets] = self._key_slots[:, sources]
        self._value_slots[:, targets] = self._value_slots[:, sources]

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def slots_tensor(self, slots: Sequence[int]) -> torch.Tensor:
        """int64 [N] on the pool's device."""
        return torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)
