"""The layers of a block drafter: they read a whole block of masked positions at once, and hidden states of the target.

Owns the arithmetic; never drafts, never knows a row, touches pages only through its attention. Called by `block_passes`.
Source: DFlash (arXiv 2602.06036): the target's tapped hidden states of every committed position become one feature, which
each layer projects to keys and values of its own; the block's rows (anchor, mask, mask, ...) attend to those and to each
other. T = tokens, n = taps, h = drafter's width, t = target's, L = layers, D = drafter's vocabulary, V = target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.arch import ArchConfig
from engine.model.attention import PagedAttention
from engine.model.layers import LayerWeights, feed_forward, project, rms_norm
from engine.model.rope import attention_factor, rotate
from engine.speculation.markov_head import ConfidenceHead, MarkovHead

Layout = TypeVar("Layout")


@dataclass(frozen=True)
class BlockWeights:
    """Matrices in the target's dtype, norms float32."""

    embedding: torch.Tensor  # [V, h]
    fc: torch.Tensor  # [h, n * t]
    hidden_norm: torch.Tensor  # [h]
    target_norm: torch.Tensor | None  # the target's final norm [t], for taps behind its last layer
    layers: tuple[LayerWeights, ...]
    output_norm: torch.Tensor  # [h]
    output: torch.Tensor  # [D, h]
    target_ids: torch.Tensor | None  # int64 [D]; None: the drafter's tokens are the target's
    inverse_frequencies: torch.Tensor  # float32 [head_dim / 2]
    markov: MarkovHead | None
    confidence: ConfidenceHead | None


@dataclass(frozen=True)
class BlockConventions:
    """What the weights alone do not say."""

    last_layer: tuple[bool, ...]  # per tap, whether it is behind the target's last layer
    target_eps: float  # of the target's norms
    embedding_scale: float
    output_multiplier: float
    softcap: float | None


class BlockModel:
    def __init__(self, arch: ArchConfig, weights: BlockWeights, conventions: BlockConventions) -> None:
        self.arch = arch
        self.weights = weights
        self._conventions = conventions
        self._rope_factor = attention_factor(arch.rope)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, n, t] hidden states of the target to [T, h], the same for every layer."""
        weights, conventions = self.weights, self._conventions
        if weights.target_norm is not None and any(conventions.last_layer):
            normed = rms_norm(taps, weights.target_norm, conventions.target_eps)
            last = torch.tensor(conventions.last_layer, device=taps.device)
            taps = torch.where(last[:, None], normed, taps)
        return rms_norm(project(taps.flatten(1), weights.fc), weights.hidden_norm, self.arch.norm_eps)

    def write_context(
        self, attention: PagedAttention[Layout], features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Keys and values of T committed positions in every layer: all that blocks ever read of them."""
        arch, size = self.arch, self.arch.query_size
        cos, sin = self._rotation(positions)
        for index, layer in enumerate(self.weights.layers):
            bias = None if layer.qkv_bias is None else layer.qkv_bias[size:]
            fused = project(features, layer.qkv[size:], bias).view(features.shape[0], 2, arch.num_kv_heads, -1)
            keys, values = fused.unbind(dim=1)
            if layer.key_norm is not None:
                keys = rms_norm(keys, layer.key_norm, arch.norm_eps)
            attention.pool.write(index, slots, rotate(keys, cos, sin), values)

    def forward(
        self,
        attention: PagedAttention[Layout],
        layouts: Mapping[int, Layout],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """[T, h] behind the last norm, of T rows of blocks; `layouts` by layer. Their keys go to `slots`."""
        arch = self.arch
        cos, sin = self._rotation(positions)
        hidden = F.embedding(token_ids, self.weights.embedding) * self._conventions.embedding_scale
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, layer.input_norm, arch.norm_eps)
            fused = project(normed, layer.qkv, layer.qkv_bias).view(normed.shape[0], -1, arch.head_dim)
            sizes = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
            queries, keys, values = torch.split_with_sizes(fused, sizes, dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                queries = rms_norm(queries, layer.query_norm, arch.norm_eps)
                keys = rms_norm(keys, layer.key_norm, arch.norm_eps)
            attention.pool.write(index, slots, rotate(keys, cos, sin), values)
            attended = attention.attend(index, rotate(queries, cos, sin), layouts[index])
            hidden = hidden + project(attended, layer.out, layer.out_bias)
            hidden = hidden + feed_forward(rms_norm(hidden, layer.ffn_norm, arch.norm_eps), layer)
        return rms_norm(hidden, self.weights.output_norm, arch.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [T, D] from `forward`'s output. Always finite: what overflowed would poison a choice of tokens."""
        logits = project(hidden, self.weights.output).float() * self._conventions.output_multiplier
        if self._conventions.softcap is not None:
            logits = (logits / self._conventions.softcap).tanh() * self._conventions.softcap
        return logits.nan_to_num_(nan=0.0)

    def target_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's tokens for the drafter's, int64 of any shape."""
        return token_ids if self.weights.target_ids is None else self.weights.target_ids[token_ids]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 [T, D] to [T, V]: tokens the drafter does not know are impossible."""
        if self.weights.target_ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.arch.vocab_size), -torch.inf)
        return spread.index_copy_(1, self.weights.target_ids, logits)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, D / 2] in the model's dtype, computed in float32."""
        angles = (positions.float()[:, None] * self.weights.inverse_frequencies)[:, None, :]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos.to(self.weights.fc.dtype), sin.to(self.weights.fc.dtype)
