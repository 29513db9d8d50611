"""Medusa heads that can be trained: each looks at one hidden state and names the token one place further ahead.

Owns the parameters and the arithmetic with gradients; never drafts. What it computes is what
`engine.speculation.medusa_heads` computes without gradients, which a test holds it to. Source: Medusa (arXiv 2401.10774,
section 2.1.1 and, for heads that start as the target's own, 2.2.1). B = texts, T = positions, h = width, D = vocabulary.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from engine.model.decoder import DecoderModel


class MedusaModel(nn.Module):
    def __init__(self, target: DecoderModel, num_heads: int, vocabulary: torch.Tensor) -> None:
        """`vocabulary` int64 [D]: the target's token for each of the heads'."""
        super().__init__()
        hidden = target.arch.hidden_size
        self._final_norm, self._eps = target.weights.final_norm.clone(), target.arch.norm_eps
        self.weights = nn.ParameterList([torch.zeros(hidden, hidden) for _ in range(num_heads)])
        self.biases = nn.ParameterList([torch.zeros(hidden) for _ in range(num_heads)])
        self.outputs = nn.ParameterList([target.weights.output[vocabulary].clone() for _ in range(num_heads)])

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, taps, h], the target's last hidden state the last of them, to what every head reads [B, T, h]."""
        return F.rms_norm(states[:, :, -1], self._final_norm.shape, self._final_norm, self._eps)

    def logits(self, head: int, read: torch.Tensor) -> torch.Tensor:
        """[N, h] to [N, D]: the token `head` + 2 places behind the state, `head` + 1 behind the root."""
        read = read + F.silu(F.linear(read, self.weights[head], self.biases[head]))
        return F.linear(read, self.outputs[head])
