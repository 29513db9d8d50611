"""MTP modules in straight lines: float64, dense, one sequence, no pages. The oracle of every drafted token in tests.

Owns the arithmetic, written from DeepSeek-V3 (arXiv 2412.19437, section 2.2) and Qwen3-Next's description of its gated
attention, over the tensors as a checkpoint stores them; shares no code with the engine. T = positions, h = width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class ModuleShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_gated: bool = False
    zero_centred: bool = False
    eps: float = 1e-6
    rope_base: float = 10000.0


class DenseModule:
    """`weights`: enorm, hnorm, fc, norm, embed_tokens and head, and the decoder layer's tensors without a prefix."""

    def __init__(self, weights: Mapping[str, Tensor], shape: ModuleShape) -> None:
        self.weights = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
        self.shape = shape

    def outputs(self, read: Tensor, token_ids: Sequence[int]) -> Tensor:
        """[T, h]: the normed state of every position, for hidden states [T, h] and the token that belongs to each."""
        hidden = self.entered(read, token_ids)
        hidden = hidden + self.linear("self_attn.o_proj", self.attention(hidden))
        hidden = hidden + self.linear("mlp.down_proj", self.gated(hidden))
        return self.norm("norm", hidden)

    def logits(self, output: Tensor) -> Tensor:
        return output @ self.weights["head.weight"].T

    def entered(self, read: Tensor, token_ids: Sequence[int]) -> Tensor:
        return self.linear("fc", self.read(read, token_ids))

    def read(self, read: Tensor, token_ids: Sequence[int]) -> Tensor:
        """[T, 2 * h], what fc reads."""
        embedded = self.weights["embed_tokens.weight"][torch.tensor(token_ids)]
        return torch.cat([self.norm("enorm", embedded), self.norm("hnorm", read.to(torch.float64))], dim=1)

    def attention(self, hidden: Tensor) -> Tensor:
        """[T, query size], behind the gate."""
        shape, count = self.shape, len(hidden)
        read = self.norm("input_layernorm", hidden)
        queries = self.linear("self_attn.q_proj", read).view(count, shape.num_heads, -1)
        queries, gates = queries[..., : shape.head_dim], queries[..., shape.head_dim :]
        keys, values = self.keys_and_values(hidden)
        if "self_attn.q_norm.weight" in self.weights:
            queries = self.norm("self_attn.q_norm", queries)
        queries = self.rotate(queries)
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        out = []
        for head in range(shape.num_heads):
            shared = head // (shape.num_heads // shape.num_kv_heads)
            scores = queries[:, head] @ keys[:, shared].T / math.sqrt(shape.head_dim)
            attended = scores.masked_fill(~visible, -torch.inf).softmax(dim=1) @ values[:, shared]
            out.append(attended / (1 + (-gates[:, head]).exp()) if shape.is_gated else attended)
        return torch.cat(out, dim=1)

    def keys_and_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K, D] each, as they are stored."""
        read = self.norm("input_layernorm", hidden)
        keys = self.linear("self_attn.k_proj", read).view(len(read), self.shape.num_kv_heads, -1)
        values = self.linear("self_attn.v_proj", read).view(len(read), self.shape.num_kv_heads, -1)
        if "self_attn.k_norm.weight" in self.weights:
            keys = self.norm("self_attn.k_norm", keys)
        return self.rotate(keys), values

    def gated(self, hidden: Tensor) -> Tensor:
        normed = self.norm("post_attention_layernorm", hidden)
        gate, up = self.linear("mlp.gate_proj", normed), self.linear("mlp.up_proj", normed)
        return gate / (1 + (-gate).exp()) * up

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"] + (1 if self.shape.zero_centred else 0)
        return x / (x.square().mean(dim=-1, keepdim=True) + self.shape.eps).sqrt() * weight

    def rotate(self, heads: Tensor) -> Tensor:
        """Positions are 0, 1, ...; elements behind rotary_dim stay."""
        half = self.shape.rotary_dim // 2
        rates = self.shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@dataclass(frozen=True)
class Told:
    """A draft, and the logits of each of its tokens."""

    tokens: list[int]
    logits: list[Tensor]


def recycled(
    module: DenseModule, states: Tensor, history: Sequence[int], count: int, drawn: Sequence[int] | None = None
) -> Told:
    """`count` tokens behind `history` from one module that is fed with its own output.

    `states` [len(history) - 1, h]: of the target, behind its final norm, for every position before the root. With
    `drawn` those tokens are proposed, whatever the logits say.
    """
    states, behind = states.to(torch.float64), list(history[1:])
    told = Told([], [])
    for step in range(count):
        output = module.outputs(states, behind)[-1:]
        told.logits.append(module.logits(output)[0])
        told.tokens.append(int(told.logits[-1].argmax()) if drawn is None else drawn[step])
        states, behind = torch.cat([states, output]), [*behind, told.tokens[-1]]
    return told


def chained(
    modules: Sequence[DenseModule],
    states: Tensor,
    history: Sequence[int],
    count: int,
    drawn: Sequence[int] | None = None,
) -> Told:
    """`count` tokens from as many modules: each reads the one before it, and one token further."""
    states, told = states.to(torch.float64), Told([], [])
    for step, module in enumerate(modules[:count]):
        text = [*history, *told.tokens]
        states = module.outputs(states, text[-len(states) :])
        told.logits.append(module.logits(states[-1]))
        told.tokens.append(int(told.logits[-1].argmax()) if drawn is None else drawn[step])
    return told
