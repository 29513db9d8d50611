"""The head of an EAGLE drafter: one decoder layer that reads a hidden state and the token behind it.

Owns the arithmetic of both generations; never drafts, never knows a row, and touches pages only through its attention.
Called by `eagle_passes`. Sources: EAGLE (arXiv 2401.15077, section 4.1), EAGLE-3 (arXiv 2503.01840, section 3).

A pair (feature of position i, token at i + 1) has position i. EAGLE-1's feature is the target's normed hidden state; the
layer reads fc(embedding, feature) without an input norm and gives the next feature. EAGLE-3's feature is fc(tapped hidden
states); the layer reads the normed embedding next to the normed feature, and its output, before the last norm, is fed
back in place of a feature. T = pairs, n = taps, h = drafter's width, t = target's, D = drafter's vocabulary.
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
class EagleWeights:
    """Matrices in the target's dtype, norms float32."""

    embedding: torch.Tensor  # [V, h]
    fc: torch.Tensor  # EAGLE-1 [h, h + t], EAGLE-3 [h, n * t]
    fc_bias: torch.Tensor | None  # [h]
    feature_norms: tuple[torch.Tensor, ...]  # none, one [n * t], or n of [t]
    final_norm: torch.Tensor | None  # the target's [t], for the taps behind its last layer
    layer: LayerWeights  # its qkv reads h (EAGLE-1) or 2 * h; its input_norm is the embedding's, EAGLE-1 has none
    hidden_norm: torch.Tensor | None  # [h]; None: EAGLE-1
    output_norm: torch.Tensor | None  # [h]; None: EAGLE-1
    output: torch.Tensor  # [D, h]
    target_ids: torch.Tensor | None  # int64 [D]; None: the drafter's tokens are the target's
    inverse_frequencies: torch.Tensor  # float32 [head_dim / 2]

    @property
    def draft_vocab_size(self) -> int:
        return self.output.shape[0]


@dataclass(frozen=True)
class HeadConventions:
    """What the weights alone do not say."""

    last_layer: tuple[bool, ...]  # per tap, whether it is behind the target's last layer
    norm_before_residual: bool
    norm_output: bool


class EagleHead:
    def __init__(
        self, arch: ArchConfig, weights: EagleWeights, conventions: HeadConventions, target_eps: float
    ) -> None:
        self.arch = arch
        self.weights = weights
        self._conventions = conventions
        self._target_eps = target_eps
        self._rope_factor = attention_factor(arch.rope)
        self._is_first_generation = weights.hidden_norm is None

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, n, t] hidden states of the target to [T, h] features (EAGLE-1: [T, t])."""
        weights = self.weights
        if weights.final_norm is not None and any(self._conventions.last_layer):
            normed = rms_norm(taps, weights.final_norm, self._target_eps)
            last = torch.tensor(self._conventions.last_layer, device=taps.device)
            taps = torch.where(last[:, None], normed, taps)
        if self._is_first_generation:
            return taps[:, 0]
        if len(weights.feature_norms) == 1:
            taps = rms_norm(taps.flatten(1), weights.feature_norms[0], self.arch.norm_eps)
        elif weights.feature_norms:
            taps = torch.stack(
                [rms_norm(tap, norm, self.arch.norm_eps) for tap, norm in zip(taps.unbind(1), weights.feature_norms)],
                dim=1,
            )
        return project(taps.flatten(1), weights.fc, weights.fc_bias)

    def write_keys(
        self,
        attention: PagedAttention[Layout],
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Keys and values alone of T pairs: all that later positions ever read of a committed one."""
        read, _ = self._enter(features, token_ids)
        layer, size = self.weights.layer, self.arch.query_size
        bias = None if layer.qkv_bias is None else layer.qkv_bias[size:]
        fused = project(read, layer.qkv[size:], bias).view(read.shape[0], 2, self.arch.num_kv_heads, -1)
        keys, values = fused.unbind(dim=1)
        if layer.key_norm is not None:
            keys = rms_norm(keys, layer.key_norm, self.arch.norm_eps)
        attention.pool.write(0, slots, rotate(keys, *self._rotation(positions)), values)

    def forward(
        self,
        attention: PagedAttention[Layout],
        layout: Layout,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, h], the layer's output for T pairs. `slots` None: their keys are in the pool already."""
        layer, arch = self.weights.layer, self.arch
        read, residual = self._enter(features, token_ids)
        fused = project(read, layer.qkv, layer.qkv_bias).view(read.shape[0], -1, arch.head_dim)
        sizes = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        queries, keys, values = torch.split_with_sizes(fused, sizes, dim=1)
        cos, sin = self._rotation(positions)
        if layer.query_norm is not None:
            queries = rms_norm(queries, layer.query_norm, arch.norm_eps)
        if slots is not None:
            if layer.key_norm is not None:
                keys = rms_norm(keys, layer.key_norm, arch.norm_eps)
            attention.pool.write(0, slots, rotate(keys, cos, sin), values)
        attended = attention.attend(0, rotate(queries, cos, sin), layout)
        hidden = residual + project(attended, layer.out, layer.out_bias)
        return hidden + feed_forward(rms_norm(hidden, layer.ffn_norm, arch.norm_eps), layer)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the feature of a position the target has not seen, from `forward`'s output."""
        if self.weights.output_norm is None or not self._conventions.norm_output:
            return hidden
        return rms_norm(hidden, self.weights.output_norm, self.arch.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [T, D] from `forward`'s output. Always finite: what overflowed would poison a choice of tokens."""
        if self.weights.output_norm is not None:
            hidden = rms_norm(hidden, self.weights.output_norm, self.arch.norm_eps)
        return project(hidden, self.weights.output).float().nan_to_num_(nan=0.0)

    def target_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's tokens for the drafter's, int64 of any shape."""
        return token_ids if self.weights.target_ids is None else self.weights.target_ids[token_ids]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [T, D] to [T, V]: tokens the drafter does not know are impossible."""
        if self.weights.target_ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.arch.vocab_size), -torch.inf)
        return spread.index_copy_(1, self.weights.target_ids, logits)

    def _enter(self, features: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and where the residual stream begins."""
        weights, eps = self.weights, self.arch.norm_eps
        embedded = F.embedding(token_ids, weights.embedding)
        if weights.hidden_norm is None:
            entered = project(torch.cat([embedded, features], dim=1), weights.fc, weights.fc_bias)
            return entered, entered
        normed = rms_norm(features, weights.hidden_norm, eps)
        read = torch.cat([rms_norm(embedded, weights.layer.input_norm, eps), normed], dim=1)
        return read, normed if self._conventions.norm_before_residual else features

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim / 2] in the model's dtype, computed in float32."""
        angles = (positions.float()[:, None] * self.weights.inverse_frequencies)[:, None, :]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos.to(self.weights.fc.dtype), sin.to(self.weights.fc.dtype)
