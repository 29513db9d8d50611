"""The parts of a decoder layer: weights as plain tensors, and the functions over them.

Owns the arithmetic of one layer outside attention; knows nothing of pages, rows or files. Called by
`engine.model.decoder`. T = tokens. Projections that read the same input are fused: one product instead of two or three.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are [out, in] in the model's dtype, norms float32. None: the architecture has no such bias or norm."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [query_size + 2 * kv_size, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None  # [head_dim]
    out: torch.Tensor  # [hidden, query_size]
    out_bias: torch.Tensor | None
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * ffn_size, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, ffn_size]
    down_bias: torch.Tensor | None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, returned in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def feed_forward(x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    """SwiGLU: [T, hidden] to [T, hidden]."""
    gate, up = F.linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights.down, weights.down_bias)
