"""The frozen-KV assistant: a small decoder without keys of its own, whose queries read those of the target.

Owns its arithmetic; never drafts, never knows a row, and only ever reads the target's pages. Called by `frozen_kv_mtp`.
Source: Gemma 4's assistant models, as published; their arithmetic, none of their code. T = rows, h = the target's width,
a = the assistant's, V = vocabulary, C = clusters.

One step reads the token that was chosen last, as the target embeds it, and a hidden state of the target's width: first
the target's own (behind its final norm) at the position before the root, then what the last step gave. As no key is ever
added, all steps of a round stand at the root's position and see the same keys: those before the root.
"""

from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.attention import PagedAttention
from engine.model.decoder import DecoderModel
from engine.model.layers import project, rms_norm
from engine.model.rope import attention_factor, rotate

Layout = TypeVar("Layout")


@dataclass(frozen=True)
class FrozenLayer:
    """Matrices in the target's dtype, norms float32. Its keys and values are those of one of the target's layers."""

    kv_layer: int  # of the target, from 0
    input_norm: torch.Tensor  # [a]
    query: torch.Tensor  # [heads * head_dim, a]
    query_bias: torch.Tensor | None
    query_norm: torch.Tensor  # [head_dim]
    out: torch.Tensor  # [a, heads * head_dim]
    out_bias: torch.Tensor | None
    attended_norm: torch.Tensor  # [a], of what attention adds
    ffn_norm: torch.Tensor  # [a]
    gate_up: torch.Tensor  # [2 * ffn, a]
    down: torch.Tensor  # [a, ffn]
    fed_norm: torch.Tensor  # [a], of what the feed-forward part adds
    scale: torch.Tensor  # [1], of everything that leaves the layer


@dataclass(frozen=True)
class Clusters:
    """An output in which only the tokens of the likeliest clusters are scored."""

    centroids: torch.Tensor  # [C, a]
    members: torch.Tensor  # int64 [C, V / C], token ids
    num_scored: int  # clusters, at most C


@dataclass(frozen=True)
class FrozenWeights:
    before: torch.Tensor  # [a, 2 * h], reads the embedding first
    layers: tuple[FrozenLayer, ...]
    norm: torch.Tensor  # float32 [a]
    after: torch.Tensor  # [h, a]
    output: torch.Tensor  # [V, a]
    clusters: Clusters | None  # None: every token is scored


class FrozenKvHead:
    """`num_heads` of the assistant, `eps` of its norms. Queries are rotated as the target rotates its keys."""

    def __init__(self, weights: FrozenWeights, num_heads: int, eps: float, target: DecoderModel) -> None:
        self.num_heads = num_heads
        self.vocab_size = weights.output.shape[0]
        self._weights = weights
        self._eps = eps
        self._target = target
        self._rope_factor = attention_factor(target.arch.rope)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, h], the target's last hidden states, to what a round's first step reads: [T, h]."""
        return rms_norm(taps, self._target.weights.final_norm, self._target.arch.norm_eps)

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim / 2] in the model's dtype, computed in float32, for int64 [T]."""
        angles = (positions.float()[:, None] * self._target.weights.inverse_frequencies)[:, None, :]
        dtype = self._weights.before.dtype
        return (angles.cos() * self._rope_factor).to(dtype), (angles.sin() * self._rope_factor).to(dtype)

    def forward(
        self,
        attention: PagedAttention[Layout],
        layout: Layout,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[T, a], normed, for hidden states [T, h] and tokens int64 [T]. `layout`: one query per row, of the target's pages."""
        embedded = F.embedding(token_ids, self._target.weights.embedding)
        hidden = project(torch.cat([embedded, features], dim=1), self._weights.before)
        for layer in self._weights.layers:
            read = rms_norm(hidden, layer.input_norm, self._eps)
            queries = project(read, layer.query, layer.query_bias).view(read.shape[0], self.num_heads, -1)
            queries = rotate(rms_norm(queries, layer.query_norm, self._eps), *rotation)
            # Gemma 4 leaves scores as they are; attention here divides them by the root of the width.
            attended = attention.attend(layer.kv_layer, queries * sqrt(queries.shape[-1]), layout)
            attended = project(attended, layer.out, layer.out_bias)
            hidden = hidden + rms_norm(attended, layer.attended_norm, self._eps)
            gate, up = project(rms_norm(hidden, layer.ffn_norm, self._eps), layer.gate_up).chunk(2, dim=-1)
            fed = project(F.gelu(gate, approximate="tanh") * up, layer.down)
            hidden = (hidden + rms_norm(fed, layer.fed_norm, self._eps)) * layer.scale
        return rms_norm(hidden, self._weights.norm, self._eps)

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, h]: what the next step reads, from `forward`'s output."""
        return project(hidden, self._weights.after)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [T, V] from `forward`'s output. Never NaN; -inf for tokens whose clusters are not scored."""
        clusters = self._weights.clusters
        if clusters is None:
            return project(hidden, self._weights.output).float().nan_to_num_(nan=0.0)
        scored = project(hidden, clusters.centroids).nan_to_num_(nan=0.0).topk(clusters.num_scored, dim=1).indices
        tokens = clusters.members[scored].flatten(1)  # [T, num_scored * V / C]
        found = torch.einsum("ta,tna->tn", hidden, F.embedding(tokens, self._weights.output))
        logits = torch.full((hidden.shape[0], self.vocab_size), -torch.inf, device=hidden.device)
        return logits.scatter_(1, tokens, found.float().nan_to_num_(nan=0.0))
