"""A block drafter in straight lines: float64, dense, one sequence, no pages. The oracle of every drafted token in tests.

Owns the arithmetic of DFlash (arXiv 2602.06036) and of DSpark's heads over a checkpoint's raw tensors; shares no code with
the engine. C = committed positions, B = rows of a block, h = width, r = rank, D = drafter's vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class BlockSpec:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # per layer
    causal: tuple[bool, ...]  # per layer
    anchor_rows: int  # rows at a block's beginning that draft nothing
    mask_token_id: int
    markov: str | None = None
    eps: float = 1e-6
    rope_base: float = 10000.0
    embedding_scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None


class DenseBlock:
    """`weights`: the checkpoint's tensors, its own or the target's embedding and head among them."""

    def __init__(self, weights: Mapping[str, Tensor], spec: BlockSpec) -> None:
        self.weights = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
        self.spec = spec

    def features(self, taps: Tensor) -> Tensor:
        """[C, n, t] hidden states of the target to [C, h]."""
        return self.norm("hidden_norm", taps.to(torch.float64).flatten(1) @ self.weights["fc.weight"].T)

    def rows(self, anchor: int, num_rows: int) -> Tensor:
        """[B, h], what the first layer reads."""
        token_ids = [anchor, *[self.spec.mask_token_id] * (num_rows - 1)]
        return self.weights["embed_tokens.weight"][torch.tensor(token_ids)] * self.spec.embedding_scale

    def hidden(self, features: Tensor, anchor: int, num_rows: int) -> Tensor:
        """[B, h] behind the last norm, of a block whose anchor sits behind the C committed positions."""
        x = self.rows(anchor, num_rows)
        for layer in range(self.spec.num_layers):
            x = x + self.linear(f"layers.{layer}.self_attn.o_proj", self.attention(layer, features, x))
            x = x + self.linear(f"layers.{layer}.mlp.down_proj", self.gated(layer, x))
        return self.norm("norm", x)

    def attention(self, layer: int, features: Tensor, x: Tensor) -> Tensor:
        """[B, heads * head_dim]: every row looks at the features of all committed positions and at the block."""
        spec, prefix = self.spec, f"layers.{layer}.self_attn."
        x = self.norm(f"layers.{layer}.input_layernorm", x)
        read = torch.cat([features, x])
        count, num_rows = len(features), len(x)
        queries = self.linear(prefix + "q_proj", x).view(num_rows, spec.num_heads, -1)
        keys = self.linear(prefix + "k_proj", read).view(count + num_rows, spec.num_kv_heads, -1)
        values = self.linear(prefix + "v_proj", read).view(count + num_rows, spec.num_kv_heads, -1)
        if prefix + "q_norm.weight" in self.weights:
            queries, keys = self.norm(prefix + "q_norm", queries), self.norm(prefix + "k_norm", keys)
        queries = self.rotate(queries, range(count, count + num_rows))
        keys = self.rotate(keys, range(count + num_rows))
        visible = self.visible(layer, count, num_rows)
        group = spec.num_heads // spec.num_kv_heads
        out = []
        for head in range(spec.num_heads):
            scores = queries[:, head] @ keys[:, head // group].T / math.sqrt(spec.head_dim)
            out.append(scores.masked_fill(~visible, -torch.inf).softmax(dim=1) @ values[:, head // group])
        return torch.cat(out, dim=1)

    def visible(self, layer: int, count: int, num_rows: int) -> Tensor:
        """bool [B, C + B]."""
        window, is_causal = self.spec.windows[layer], self.spec.causal[layer]
        rows = []
        for query in range(count, count + num_rows):
            seen = [not is_causal or key <= query for key in range(count + num_rows)]
            rows.append([one and (window is None or abs(query - key) < window) for key, one in enumerate(seen)])
        return torch.tensor(rows)

    def gated(self, layer: int, x: Tensor) -> Tensor:
        normed = self.norm(f"layers.{layer}.post_attention_layernorm", x)
        gate, up = (self.linear(f"layers.{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
        return gate * torch.sigmoid(gate) * up

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.weights["lm_head.weight"].T * self.spec.multiplier
        return logits if self.spec.softcap is None else self.spec.softcap * (logits / self.spec.softcap).tanh()

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.spec.eps).sqrt() * self.weights[f"{name}.weight"]

    def rotate(self, heads: Tensor, positions: Sequence[int]) -> Tensor:
        half = self.spec.head_dim // 2
        rates = self.spec.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class BlockOracle:
    """What the drafter says behind one history, whatever was drafted before; everything computed from scratch."""

    def __init__(self, dense: DenseBlock, taps: Tensor, history: Sequence[int], num_tokens: int) -> None:
        """`taps` [len(history) - 1, n, t]; the block has the rows that `num_tokens` drafts need."""
        self._dense = dense
        self._anchor = history[-1]
        self._hidden = dense.hidden(dense.features(taps), self._anchor, num_tokens + dense.spec.anchor_rows)

    def logits(self, drafted: Sequence[int]) -> Tensor:
        """Float64 [D], for the token behind the drafted ones (of the target's tokens)."""
        row = len(drafted) + self._dense.spec.anchor_rows
        logits = self._dense.base_logits(self._hidden[row])
        if self._dense.spec.markov is not None:
            logits = logits + self._bias(drafted)
        return logits

    def confidence(self, drafted: Sequence[int]) -> float:
        """That the token behind the drafted ones is accepted."""
        weights = self._dense.weights
        read = self._hidden[len(drafted) + self._dense.spec.anchor_rows]
        if weights["confidence_head.proj.weight"].shape[1] > len(read):
            read = torch.cat([read, self._embedded([self._anchor, *drafted][-1])])
        score = weights["confidence_head.proj.weight"][0] @ read + weights["confidence_head.proj.bias"][0]
        return float(torch.sigmoid(score))

    def _embedded(self, token: int) -> Tensor:
        return self._dense.weights["markov_head.markov_w1.weight"][token]

    def _bias(self, drafted: Sequence[int]) -> Tensor:
        dense, kind = self._dense, self._dense.spec.markov
        before = [self._anchor, *drafted]
        if kind == "vanilla":
            out = self._embedded(before[-1])
        elif kind == "gated":
            embedded = self._embedded(before[-1])
            row = len(drafted) + dense.spec.anchor_rows
            out = (
                torch.sigmoid(dense.linear("markov_head.gate_proj", torch.cat([self._hidden[row], embedded])))
                * embedded
            )
        else:
            # Every row of the block is a step, the anchor's too where it drafts nothing; its token before is itself.
            steps = [self._anchor] * dense.spec.anchor_rows + before
            state = torch.zeros(dense.weights["markov_head.markov_w2.weight"].shape[1], dtype=torch.float64)
            for row, token in enumerate(steps):
                z = torch.cat([state, self._embedded(token), self._hidden[row]])
                keep, candidate, said = dense.linear("markov_head.joint_proj", z).chunk(3)
                state = torch.sigmoid(keep) * state + (1 - torch.sigmoid(keep)) * torch.tanh(candidate)
                out = torch.tanh(said)
        return dense.weights["markov_head.markov_w2.weight"] @ out
