"""One MTP module: a decoder layer that reads a hidden state and the token that follows it, and predicts the next one.

Owns the arithmetic of every published form; never drafts, never knows a row, and touches pages only through its
attention. Called by `eagle_passes` (one module, fed with its own output) and `mtp_modules` (several, one after another).
Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); Qwen3-Next's gated attention and partial rotation.

Module j reads at position i the normed output of module j - 1 there (module 0: the target's hidden state behind its final
norm) and the token at i + 1 + j, and gives the normed state that predicts the token at i + 2 + j. That output is what is
read next. T = pairs, h = width, V = vocabulary.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.arch import ArchConfig
from engine.model.attention import PagedAttention
from engine.model.layers import LayerWeights, feed_forward, project, rms_norm
from engine.model.rope import attention_factor, rotate

Layout = TypeVar("Layout")


@dataclass(frozen=True)
class MtpWeights:
    """Of one module: matrices in the target's dtype, norms float32 and as they multiply."""

    embedding: torch.Tensor  # [V, h]
    embedding_norm: torch.Tensor  # [h]
    hidden_norm: torch.Tensor  # [h]
    fc: torch.Tensor  # [h, 2 * h], reads the embedding first
    layer: LayerWeights
    gate: torch.Tensor | None  # [query_size, h]; None: attention's output is not gated
    gate_bias: torch.Tensor | None  # [query_size]
    output_norm: torch.Tensor  # [h]
    output: torch.Tensor  # [V, h]
    inverse_frequencies: torch.Tensor  # float32 [rotated elements of a head / 2]


@dataclass(frozen=True)
class TargetNorm:
    """The target's final norm, behind which its hidden states are read."""

    weight: torch.Tensor  # float32 [h]
    eps: float


class MtpModule:
    """`index` is the module's layer of the pool."""

    def __init__(self, arch: ArchConfig, weights: MtpWeights, index: int, target_norm: TargetNorm) -> None:
        self.arch = arch
        self.index = index
        self._weights = weights
        self._target_norm = target_norm
        self._rope_factor = attention_factor(arch.rope)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, 1, h], the target's last hidden states, to what module 0 reads: [T, h]."""
        return rms_norm(taps[:, 0], self._target_norm.weight, self._target_norm.eps)

    def write_keys(
        self,
        attention: PagedAttention[Layout],
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Keys and values alone of T pairs: all that later positions ever read of a committed one."""
        layer, size = self._weights.layer, self.arch.query_size
        read = rms_norm(self._enter(features, token_ids), layer.input_norm, self.arch.norm_eps)
        bias = None if layer.qkv_bias is None else layer.qkv_bias[size:]
        fused = project(read, layer.qkv[size:], bias).view(read.shape[0], 2, self.arch.num_kv_heads, -1)
        keys, values = fused.unbind(dim=1)
        attention.pool.write(self.index, slots, self._keys(keys, self._rotation(positions)), values)

    def forward(
        self,
        attention: PagedAttention[Layout],
        layout: Layout,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, h], the module's normed output for T pairs. `slots` None: their keys are in the pool already."""
        layer, arch = self._weights.layer, self.arch
        hidden = self._enter(features, token_ids)
        read = rms_norm(hidden, layer.input_norm, arch.norm_eps)
        fused = project(read, layer.qkv, layer.qkv_bias).view(read.shape[0], -1, arch.head_dim)
        sizes = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        queries, keys, values = torch.split_with_sizes(fused, sizes, dim=1)
        rotation = self._rotation(positions)
        if slots is not None:
            attention.pool.write(self.index, slots, self._keys(keys, rotation), values)
        if layer.query_norm is not None:
            queries = rms_norm(queries, layer.query_norm, arch.norm_eps)
        attended = attention.attend(self.index, self._rotated(queries, rotation), layout)
        if self._weights.gate is not None:
            attended = attended * torch.sigmoid(project(read, self._weights.gate, self._weights.gate_bias))
        hidden = hidden + project(attended, layer.out, layer.out_bias)
        hidden = hidden + feed_forward(rms_norm(hidden, layer.ffn_norm, arch.norm_eps), layer)
        return rms_norm(hidden, self._weights.output_norm, arch.norm_eps)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the feature of a position the target has not seen, from `forward`'s output."""
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [T, V] from `forward`'s output. Always finite: what overflowed would poison a choice of tokens."""
        return project(hidden, self._weights.output).float().nan_to_num_(nan=0.0)

    def target_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The module's tokens are the target's."""
        return token_ids

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def _enter(self, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Where the residual stream begins: [T, h]."""
        weights, eps = self._weights, self.arch.norm_eps
        embedded = rms_norm(F.embedding(token_ids, weights.embedding), weights.embedding_norm, eps)
        return project(torch.cat([embedded, rms_norm(features, weights.hidden_norm, eps)], dim=1), weights.fc)

    def _keys(self, keys: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """As they are stored: normed where heads are, and rotated."""
        if self._weights.layer.key_norm is not None:
            keys = rms_norm(keys, self._weights.layer.key_norm, self.arch.norm_eps)
        return self._rotated(keys, rotation)

    def _rotated(self, heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        size = 2 * self._weights.inverse_frequencies.shape[0]
        if size == heads.shape[-1]:
            return rotate(heads, *rotation)
        return torch.cat([rotate(heads[..., :size], *rotation), heads[..., size:]], dim=-1)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, rotated / 2] in the model's dtype, computed in float32."""
        angles = (positions.float()[:, None] * self._weights.inverse_frequencies)[:, None, :]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos.to(self._weights.fc.dtype), sin.to(self._weights.fc.dtype)
