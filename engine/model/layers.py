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


_FEW_ROWS = 64


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] by weight [out, in] to [T, out], contiguous.

    On a CPU, MKL's product of few rows by a large matrix is fast only with the large matrix on the left: 12 products by
    [3072, 576] with T = 4 take 9.7 ms this way and 30 ms as F.linear (two AVX2 cores; T = 1 and T > 64 are equal).
    """
    if x.device.type != "cpu" or not 2 <= x.shape[0] <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, returned in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def feed_forward(x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    """SwiGLU: [T, hidden] to [T, hidden]."""
    gate, up = project(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return project(F.silu(gate) * up, weights.down, weights.down_bias)
