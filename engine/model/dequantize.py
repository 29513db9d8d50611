"""ggml's quantised blocks to float32, vectorised over blocks.

Owns the block formats; knows nothing of tensors or files. Called by `engine.model.gguf_weights`. N = blocks, and every
function takes uint8 [N, bytes per block] and gives float32 [N, elements per block]. Source of the formats:
ggml-org/ggml, ggml-common.h (block_q4_0, ...) and ggml-quants.c (dequantize_row_q4_0, ...).
"""

from collections.abc import Callable

import torch

from protocol.gguf import GGMLType


def dequantize(kind: GGMLType, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [N * elements per block] of uint8 [N, bytes per block], in the file's order."""
    return DEQUANTIZERS[kind](blocks).reshape(-1)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.clone().view(torch.float32)  # a fresh allocation is aligned; a file's bytes need not be


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.clone().view(torch.float16).float()


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.clone().view(torch.bfloat16).float()


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] to [..., 2 * B]: all low halves, then all high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Super-blocks of 8 groups of 32: d, dmin, 12 bytes of packed 6-bit scales and minima, 128 bytes of nibbles."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    packed = blocks[:, 16:].view(-1, 4, 32)
    values = torch.stack((packed & 0x0F, packed >> 4), dim=2).view(-1, 8, 32).float()
    factors, offsets = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    return (factors[:, :, None] * values - offsets[:, :, None]).flatten(1)


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 12] to the scales and minima [N, 8] of ggml's get_scale_min_k4."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Super-blocks of 16 groups of 16: 128 bytes of low nibbles, 64 of upper pairs of bits, 16 int8 scales, d."""
    low, high = blocks[:, :128].view(-1, 2, 64), blocks[:, 128:192].view(-1, 2, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    nibbles = torch.cat((low & 0x0F, low >> 4), dim=2).view(-1, 2, 4, 32)
    pairs = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)  # [N, 2, 4, 32]
    values = (nibbles | (pairs << 4)).view(-1, 16, 16).float() - 32
    return (values * (_half(blocks, 208) * scales)[:, :, None]).flatten(1)


DEQUANTIZERS: dict[GGMLType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
}
