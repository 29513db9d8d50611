"""An EAGLE head in straight lines: float64, dense, one sequence, no pages. The oracle of every drafted token in tests.

Owns the arithmetic of both generations, written from the papers (arXiv 2401.15077, 2503.01840) over a checkpoint's raw
tensors; shares no code with the engine. Rows are pairs (feature of position i, token at i + 1); T = rows, h = width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class HeadShape:
    generation: int  # 1 or 3
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    rope_base: float = 10000.0
    norm_before_residual: bool = False
    norm_output: bool = False


class DenseEagle:
    """`weights`: the checkpoint's tensors under `layers.0.` names, its own or the target's embedding and head among them."""

    def __init__(self, weights: Mapping[str, Tensor], shape: HeadShape) -> None:
        self.weights = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
        self.shape = shape

    def features(self, taps: Tensor) -> Tensor:
        """[T, n, t] hidden states, for EAGLE-1 already behind the target's final norm."""
        taps = taps.to(torch.float64)
        if self.shape.generation == 1:
            return taps[:, 0]
        if "input_norm.weight" in self.weights:
            return self.linear("fc", self.norm("input_norm", taps.flatten(1)))
        if "fc_norm.0.weight" in self.weights:
            taps = torch.stack([self.norm(f"fc_norm.{i}", taps[:, i]) for i in range(taps.shape[1])], dim=1)
        return self.linear("fc", taps.flatten(1))

    def layer(self, features: Tensor, token_ids: Sequence[int], positions: Sequence[int], visible: Tensor) -> Tensor:
        """Outputs [T, h]; `visible` bool [T, T]."""
        read, residual = self.enter(features, token_ids)
        hidden = residual + self.linear("layers.0.self_attn.o_proj", self.attention(read, positions, visible))
        return hidden + self.feed_forward(hidden)

    def enter(self, features: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        embedded = self.weights["embed_tokens.weight"][torch.tensor(token_ids)]
        if self.shape.generation == 1:
            x = self.linear("fc", torch.cat([embedded, features], dim=1))
            return x, x
        normed = self.norm("layers.0.hidden_norm", features)
        read = torch.cat([self.norm("layers.0.input_layernorm", embedded), normed], dim=1)
        return read, normed if self.shape.norm_before_residual else features

    def attention(self, read: Tensor, positions: Sequence[int], visible: Tensor) -> Tensor:
        shape, prefix = self.shape, "layers.0.self_attn."
        queries = self.linear(prefix + "q_proj", read).view(len(read), shape.num_heads, shape.head_dim)
        keys = self.linear(prefix + "k_proj", read).view(len(read), shape.num_kv_heads, shape.head_dim)
        values = self.linear(prefix + "v_proj", read).view(len(read), shape.num_kv_heads, shape.head_dim)
        if prefix + "q_norm.weight" in self.weights:
            queries, keys = self.norm(prefix + "q_norm", queries), self.norm(prefix + "k_norm", keys)
        queries, keys = self.rotate(queries, positions), self.rotate(keys, positions)
        group = shape.num_heads // shape.num_kv_heads
        out = []
        for head in range(shape.num_heads):
            scores = queries[:, head] @ keys[:, head // group].T / math.sqrt(shape.head_dim)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=1)
            out.append(weights @ values[:, head // group])
        return torch.cat(out, dim=1)

    def gated(self, hidden: Tensor) -> Tensor:
        normed = self.norm("layers.0.post_attention_layernorm", hidden)
        gate, up = self.linear("layers.0.mlp.gate_proj", normed), self.linear("layers.0.mlp.up_proj", normed)
        return gate * torch.sigmoid(gate) * up

    def feed_forward(self, hidden: Tensor) -> Tensor:
        return self.linear("layers.0.mlp.down_proj", self.gated(hidden))

    def fed_back(self, hidden: Tensor) -> Tensor:
        return self.norm("norm", hidden) if self.shape.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.shape.generation == 1 else self.norm("norm", hidden)
        return normed @ self.weights["lm_head.weight"].T

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.shape.eps).sqrt() * self.weights[f"{name}.weight"]

    def rotate(self, heads: Tensor, positions: Sequence[int]) -> Tensor:
        half = self.shape.head_dim // 2
        rates = self.shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


class PathDrafter:
    """What the head says behind any path of drafted tokens, each path computed from scratch."""

    def __init__(self, head: DenseEagle, taps: Tensor, history: Sequence[int]) -> None:
        """`taps` [len(history) - 1, n, t]: of every position before the root, which is the history's last token."""
        self._head = head
        self._history = list(history)
        self._features = head.features(taps)
        self._outputs: dict[tuple[int, ...], Tensor] = {}

    def logits(self, path: Sequence[int]) -> Tensor:
        """Float64 [D] for the token behind root and path (of the target's tokens)."""
        return self._head.logits(self._output(tuple(path)))[0]

    def _output(self, path: tuple[int, ...]) -> Tensor:
        if path not in self._outputs:
            fed_back = [self._head.fed_back(self._output(path[:end])) for end in range(len(path))]
            features = torch.cat([self._features, *fed_back])
            token_ids = [*self._history[1:], *path]
            rows = len(token_ids)
            self._outputs[path] = self._head.layer(features, token_ids, range(rows), causal(rows))[-1:]
        return self._outputs[path]
