"""The target model's forward over a flat step of tokens.

Owns the order of the layers and the hidden-state taps; never samples, never allocates KV, never reads files. Built by
`engine.model.weights`, called by `engine.runner`. T = tokens of the step, R = rows whose logits are wanted, V = vocabulary.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.arch import ArchConfig
from engine.model.attention import PagedAttention
from engine.model.layers import LayerWeights, feed_forward, project, rms_norm
from engine.model.low_rank import RowAdapter
from engine.model.rope import attention_factor, rotate

Layout = TypeVar("Layout")


@dataclass(frozen=True)
class DecoderWeights:
    embedding: torch.Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # float32 [hidden]
    output: torch.Tensor  # [V, hidden]; the embedding itself when tied
    inverse_frequencies: torch.Tensor  # float32 [head_dim / 2]

    @property
    def num_bytes(self) -> int:
        """Memory of all weights, tied ones once."""
        tensors = [self.embedding, self.final_norm, self.inverse_frequencies]
        tensors += [] if self.output is self.embedding else [self.output]
        for layer in self.layers:
            tensors += [value for value in vars(layer).values() if value is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class ForwardInput:
    """Flat tokens of a step; `slots` are where their keys and values go."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]


class DecoderModel:
    def __init__(self, arch: ArchConfig, weights: DecoderWeights) -> None:
        self.arch = arch
        self.weights = weights
        self._rope_factor = attention_factor(arch.rope)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @torch.inference_mode()
    def forward(
        self,
        step: ForwardInput,
        attention: PagedAttention[Layout],
        layout: Layout,
        taps: tuple[int, ...] = (),
        adapter: RowAdapter | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, hidden] before the final norm, and the taps [T, len(taps), hidden] (None without taps).

        `adapter` changes the projections of the rows it names. Tap i is the residual stream before layer i, tap num_layers the one after the last layer (before the final
        norm): Hugging Face's hidden_states numbering. Writes the step's keys and values to the attention's pool.
        """
        cos, sin = self._rotation(step.positions)
        tapped = dict.fromkeys(taps)
        hidden = F.embedding(step.token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            if index in tapped:
                tapped[index] = hidden
            normed = rms_norm(hidden, layer.input_norm, self.arch.norm_eps)
            queries, keys, values = self._project(normed, index, adapter)
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
            attention.pool.write(index, step.slots, keys, values)
            attended = attention.attend(index, queries, layout)
            projected = project(attended, layer.out, layer.out_bias)
            if adapter is not None:
                adapter.add(index, "out", projected, attended)
            hidden = hidden + projected
            normed = rms_norm(hidden, layer.ffn_norm, self.arch.norm_eps)
            hidden = hidden + (
                feed_forward(normed, layer) if adapter is None else _adapted_feed_forward(normed, layer, index, adapter)
            )
        if self.arch.num_layers in tapped:
            tapped[self.arch.num_layers] = hidden
        stacked = torch.stack([state for state in tapped.values() if state is not None], dim=1) if taps else None
        return hidden, stacked

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] from `forward` to float32 [R, V]."""
        normed = rms_norm(hidden, self.weights.final_norm, self.arch.norm_eps)
        return project(normed, self.weights.output).float()

    def _project(
        self, normed: torch.Tensor, index: int, adapter: RowAdapter | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], keys and values [T, K, D], before the rotation."""
        arch, layer = self.arch, self.weights.layers[index]
        fused = project(normed, layer.qkv, layer.qkv_bias)
        if adapter is not None:
            adapter.add(index, "qkv", fused, normed)
        queries, keys, values = torch.split_with_sizes(
            fused.view(normed.shape[0], -1, arch.head_dim),
            (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads),
            dim=1,
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = rms_norm(queries, layer.query_norm, arch.norm_eps)
            keys = rms_norm(keys, layer.key_norm, arch.norm_eps)
        return queries, keys, values

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, D / 2] in the model's dtype, computed in float32."""
        angles = (positions.float()[:, None] * self.weights.inverse_frequencies)[:, None, :]
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos.to(self.dtype), sin.to(self.dtype)


def _adapted_feed_forward(normed: torch.Tensor, layer: LayerWeights, index: int, adapter: RowAdapter) -> torch.Tensor:
    """`engine.model.layers.feed_forward` with an adapter on some rows: [T, hidden] to [T, hidden]."""
    fused = project(normed, layer.gate_up, layer.gate_up_bias)
    adapter.add(index, "gate_up", fused, normed)
    gate, up = fused.chunk(2, dim=-1)
    activated = F.silu(gate) * up
    product = project(activated, layer.down, layer.down_bias)
    adapter.add(index, "down", product, activated)
    return product
