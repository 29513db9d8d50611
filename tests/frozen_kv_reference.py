"""A frozen-KV assistant in straight lines: float64, one sequence, no pages. The oracle of its drafts in tests.

Owns the arithmetic, written from the description of Gemma 4's assistant models, over the tensors as a checkpoint stores
them (without a leading `model.`); shares no code with the engine. P = positions before the root, K = key-value heads,
D = their width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class TargetSide:
    """What the target lends, float64."""

    embedding: Tensor  # [V, h]
    keys: Tensor  # [P, K, D], rotated, of the layer that is read
    values: Tensor  # [P, K, D]
    state: Tensor  # [h], of position P - 1, behind the final norm


@dataclass(frozen=True)
class ToldByAssistant:
    tokens: list[int]
    logits: list[Tensor]  # [V] each; -inf for tokens outside the scored clusters


class DenseAssistant:
    def __init__(
        self, weights: Mapping[str, Tensor], num_layers: int, num_scored: int | None, rope_base: float = 10000.0
    ) -> None:
        """`num_scored`: clusters, where the output has some."""
        self.weights = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
        self.num_layers, self.num_scored, self.rope_base = num_layers, num_scored, rope_base

    def draft(self, target: TargetSide, root: int, count: int, drawn: Sequence[int] | None = None) -> ToldByAssistant:
        """`count` tokens behind the token `root`; with `drawn` those are proposed, whatever the logits say."""
        told, state, token = ToldByAssistant([], []), target.state, root
        for step in range(count):
            hidden = self.entered(target, token, state)
            for layer in range(self.num_layers):
                hidden = self.layer(f"layers.{layer}.", hidden, target)
            hidden = self.norm("norm", hidden)
            told.logits.append(self.logits(hidden))
            token = int(told.logits[-1].argmax()) if drawn is None else drawn[step]
            told.tokens.append(token)
            state = self.weights["post_projection.weight"] @ hidden
        return told

    def entered(self, target: TargetSide, token: int, state: Tensor) -> Tensor:
        return self.weights["pre_projection.weight"] @ torch.cat([target.embedding[token], state])

    def layer(self, prefix: str, hidden: Tensor, target: TargetSide) -> Tensor:
        attended = self.linear(f"{prefix}self_attn.o_proj", self.attention(prefix, hidden, target))
        hidden = hidden + self.norm(f"{prefix}post_attention_layernorm", attended)
        read = self.norm(f"{prefix}pre_feedforward_layernorm", hidden)
        gate, up = self.linear(f"{prefix}mlp.gate_proj", read), self.linear(f"{prefix}mlp.up_proj", read)
        gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        fed = self.linear(f"{prefix}mlp.down_proj", gelu * up)
        return (hidden + self.norm(f"{prefix}post_feedforward_layernorm", fed)) * self.weights[f"{prefix}layer_scalar"]

    def attention(self, prefix: str, hidden: Tensor, target: TargetSide) -> Tensor:
        """[heads * D]: one query at the root's position over all keys before it, scores not scaled."""
        num_keys, num_kv_heads, head_dim = target.keys.shape
        queries = self.linear(f"{prefix}self_attn.q_proj", self.norm(f"{prefix}input_layernorm", hidden))
        queries = self.norm(f"{prefix}self_attn.q_norm", queries.view(-1, head_dim))
        half = head_dim // 2
        angles = num_keys * self.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = queries[:, :half], queries[:, half:]
        queries = torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
        )
        heads = []
        for head, query in enumerate(queries):
            shared = head // (len(queries) // num_kv_heads)
            weights = (target.keys[:, shared] @ query).softmax(dim=0)
            heads.append(weights @ target.values[:, shared])
        return torch.cat(heads)

    def logits(self, hidden: Tensor) -> Tensor:
        own = "lm_head.weight" in self.weights
        logits = self.weights["lm_head.weight" if own else "embed_tokens.weight"] @ hidden
        if self.num_scored is None:
            return logits
        likeliest = (self.weights["masked_embedding.centroids.weight"] @ hidden).topk(self.num_scored).indices
        ordering = self.weights["masked_embedding.token_ordering"].long()
        size = len(ordering) // len(self.weights["masked_embedding.centroids.weight"])
        scored = {int(token) for cluster in likeliest for token in ordering[cluster * size : (cluster + 1) * size]}
        others = torch.tensor([token not in scored for token in range(len(logits))])
        return logits.masked_fill(others, -torch.inf)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]
