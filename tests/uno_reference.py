"""A target with a LoRA adapter on some rows, in straight lines: float64, dense, one sequence, no pages.

Owns the arithmetic of llama, qwen2 and qwen3 decoders over a checkpoint's raw tensors and of an adapter's (LoRA,
arXiv 2106.09685), and what UNO feeds them; shares no code with the engine. T = rows, h = width, J = noise rows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

Tensor = torch.Tensor
MODULES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class DenseTarget:
    """`adapter`: `layers.0.self_attn.q_proj` -> (A [r, in], B [out, r]); it is applied to the rows a call names."""

    def __init__(
        self,
        directory: Path,
        adapter: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in stored.items()}
        self.adapter = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in (adapter or {}).items()}
        self.scale = scale
        self.dtype = dtype
        self.num_heads, self.num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.num_heads

    def hidden(
        self, token_ids: Sequence[int], positions: Sequence[int], visible: Tensor, adapted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Residual stream [T, h] behind the last layer, and what its down_proj reads. `visible` bool [T, T]; `adapted` bool [T]."""
        hidden, read = self.weights["embed_tokens.weight"][torch.tensor(token_ids)], torch.empty(0)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            normed = self.norm(f"{prefix}input_layernorm", hidden)
            attended = self.attention(f"{prefix}self_attn.", normed, positions, visible, adapted)
            hidden = hidden + self.linear(f"{prefix}self_attn.o_proj", attended, adapted)
            normed = self.norm(f"{prefix}post_attention_layernorm", hidden)
            gate = self.linear(f"{prefix}mlp.gate_proj", normed, adapted)
            read = gate * torch.sigmoid(gate) * self.linear(f"{prefix}mlp.up_proj", normed, adapted)
            hidden = hidden + self.linear(f"{prefix}mlp.down_proj", read, adapted)
        return hidden, read

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        return self.norm("norm", hidden) @ head.T

    def uno(self, history: Sequence[int], noise: Sequence[int]) -> Tensor:
        """Logits [1 + J, V]: the target's own behind the history, then the guess of each noise row."""
        token_ids = [*history, *noise]
        size = len(token_ids)
        adapted = torch.arange(size) >= len(history)
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        hidden, _ = self.hidden(token_ids, range(size), causal, adapted)
        return self.logits(hidden[len(history) - 1 :])

    def attention(
        self, prefix: str, read: Tensor, positions: Sequence[int], visible: Tensor, adapted: Tensor
    ) -> Tensor:
        queries = self.linear(prefix + "q_proj", read, adapted).view(len(read), self.num_heads, self.head_dim)
        keys = self.linear(prefix + "k_proj", read, adapted).view(len(read), self.num_kv_heads, self.head_dim)
        values = self.linear(prefix + "v_proj", read, adapted).view(len(read), self.num_kv_heads, self.head_dim)
        if f"{prefix}q_norm.weight" in self.weights:
            queries, keys = self.norm(prefix + "q_norm", queries), self.norm(prefix + "k_norm", keys)
        queries, keys = self.rotate(queries, positions), self.rotate(keys, positions)
        out = []
        for head in range(self.num_heads):
            own = head * self.num_kv_heads // self.num_heads
            scores = queries[:, head] @ keys[:, own].T / math.sqrt(self.head_dim)
            out.append(scores.masked_fill(~visible, -torch.inf).softmax(dim=1) @ values[:, own])
        return torch.cat(out, dim=1)

    def linear(self, name: str, x: Tensor, adapted: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        if f"{name}.bias" in self.weights:
            y = y + self.weights[f"{name}.bias"]
        if name in self.adapter:
            a, b = self.adapter[name]
            y = y + torch.where(adapted[:, None], self.scale * (x @ a.T) @ b.T, 0.0)
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def rotate(self, heads: Tensor, positions: Sequence[int]) -> Tensor:
        half = self.head_dim // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
