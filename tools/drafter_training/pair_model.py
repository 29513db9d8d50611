"""A drafter of one decoder layer that can be trained: EAGLE-3's and an MTP module's, which differ in what they read.

Owns the parameters and the arithmetic with gradients, over whole texts and unrolled over the steps of a chain; never
drafts. What it computes is what `engine.speculation.eagle_head` and `mtp_head` compute without gradients, which a test
holds it to. Sources: EAGLE-3 (arXiv 2503.01840, section 3.2, training-time test); DeepSeek-V3 (arXiv 2412.19437, 2.2).

Pair i is the feature of position i with the token at i + 1, and predicts the token at i + 2. Step j of the chain that
begins at pair r stands at pair r + j: its feature is the step before's output, it sees the pairs up to r with their real
features, and the steps 1 .. j of its own chain. B = texts, T = pairs of the longest, h = width, H = heads, D = head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.rope import attention_factor, inverse_frequencies, rotate

DROPPED = 0.1
STATE_LENGTH = 25.0  # root mean square of hidden states near the end, as found in the embedded model
EMBEDDED_SHARE = 0.2


@dataclass(frozen=True)
class Unrolled:
    """One step of all chains."""

    hidden: torch.Tensor  # [B, T, h], normed: the product with the vocabulary gives logits
    num_pairs: int  # chains begun at pairs < num_pairs have this step; behind them there is no text


class PairModel(nn.Module, ABC):
    """One decoder layer that starts from the target's last one. `reads`: width of what attention projects from."""

    def __init__(self, target: DecoderModel, reads: int) -> None:
        super().__init__()
        self.arch: ArchConfig = target.arch
        arch, last = target.arch, target.weights.layers[-1]
        qkv = torch.zeros(last.qkv.shape[0], reads)
        qkv[:, reads - arch.hidden_size :] = last.qkv
        if reads > arch.hidden_size:  # the embedding's half
            nn.init.normal_(qkv[:, : reads - arch.hidden_size], std=0.02)
        self.qkv, self.out = nn.Parameter(qkv), nn.Parameter(last.out.clone())
        self.gate_up, self.down = nn.Parameter(last.gate_up.clone()), nn.Parameter(last.down.clone())
        self.ffn_norm = nn.Parameter(last.ffn_norm.clone())
        self.output_norm = nn.Parameter(target.weights.final_norm.clone())
        self.embedding = target.weights.embedding.clone()  # the target's: frozen
        frequencies = inverse_frequencies(arch.rope, arch.head_dim)
        self._frequencies, self._rope_factor = frequencies, attention_factor(arch.rope)

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [B, T, taps, h] to what stands for them [B, T, h]."""

    @abstractmethod
    def enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads [B, T, reads], and where the residual stream begins [B, T, h]."""

    @abstractmethod
    def fed_back(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The feature of the next step, from the layer's output and its norm."""

    def blurred(self, x: torch.Tensor) -> torch.Tensor:
        """What a layer reads, with some of it missing while it learns: the text is short and soon known by heart."""
        return F.dropout(x, DROPPED, self.training)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)

    def unroll(self, states: torch.Tensor, token_ids: torch.Tensor, num_steps: int) -> Iterator[Unrolled]:
        """`states` [B, T, taps, h] of positions 0 .. T - 1, `token_ids` int64 [B, T + 1] of positions 0 .. T."""
        features, num_pairs = self.features(states), states.shape[1]
        chain = _Chain(self.arch)
        for step in range(num_steps):
            length = num_pairs - step
            embedded = F.embedding(token_ids[:, 1 + step :], self.embedding)
            read, residual = self.enter(features[:, :length], embedded)
            attended = chain.attend(F.linear(self.blurred(read), self.qkv), self._rotation(step, length))
            hidden = residual + F.linear(attended, self.out)
            gate, up = F.linear(self.normed(hidden, self.ffn_norm), self.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(self.blurred(F.silu(gate) * up), self.down)
            normed = self.normed(hidden, self.output_norm)
            yield Unrolled(normed, length)
            features = self.fed_back(hidden, normed)

    def _rotation(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(start, start + length)[:, None, None] * self._frequencies
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor


class _Chain:
    """Attention of the steps so far. Row r of step j is at pair r + j."""

    def __init__(self, arch: ArchConfig) -> None:
        self._arch = arch
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values [B, H, T, D], heads repeated

    def attend(self, fused: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Fused queries, keys, values [B, T, ...] of the next step to [B, T, H * D]."""
        arch, (size, length) = self._arch, fused.shape[:2]
        heads = fused.view(size, length, -1, arch.head_dim)
        queries, keys, values = torch.split_with_sizes(
            heads, (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), dim=2
        )
        repeats = arch.num_heads // arch.num_kv_heads
        queries, keys = rotate(queries, *rotation).transpose(1, 2), rotate(keys, *rotation).transpose(1, 2)
        keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values.transpose(1, 2)))
        self._steps.append((keys, values))
        first_keys, first_values = self._steps[0]
        hidden = torch.ones(length, first_keys.shape[2], dtype=torch.bool).triu(1)
        scores = (queries @ first_keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        own = [(queries * k[:, :, :length]).sum(-1, keepdim=True) for k, _ in self._steps[1:]]
        weights = (torch.cat([scores, *own], dim=-1) * arch.head_dim**-0.5).softmax(dim=-1)
        attended = weights[..., : first_keys.shape[2]] @ first_values
        for index, (_, values) in enumerate(self._steps[1:]):
            weight = weights[..., first_keys.shape[2] + index, None]
            attended = attended + weight * values[:, :, :length]
        result: torch.Tensor = attended.transpose(1, 2).reshape(size, length, -1)
        return result


class Eagle3Model(PairModel):
    """Reads several hidden states; its output, before the norm, is fed back."""

    def __init__(self, target: DecoderModel, num_taps: int) -> None:
        hidden = target.arch.hidden_size
        super().__init__(target, reads=2 * hidden)
        fc = torch.zeros(hidden, num_taps * hidden)
        fc[:, -hidden:] = torch.eye(hidden)  # begin with the deepest tap
        nn.init.normal_(fc[:, :-hidden], std=0.01)
        self.fc = nn.Parameter(fc)
        self.hidden_norm = nn.Parameter(target.weights.layers[-1].input_norm.clone())
        self.input_norm = nn.Parameter(torch.ones(hidden))

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states.flatten(2), self.fc)

    def enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read = torch.cat([self.normed(embedded, self.input_norm), self.normed(features, self.hidden_norm)], dim=-1)
        return read, features

    def fed_back(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return hidden


class MtpModel(PairModel):
    """Reads the target's last hidden state behind its final norm; its normed output is fed back."""

    def __init__(self, target: DecoderModel) -> None:
        hidden = target.arch.hidden_size
        super().__init__(target, reads=hidden)
        final_norm = target.weights.final_norm
        # Begin where the target's last layer is at home: its own state, as long as such states are, behind both norms.
        fc = torch.zeros(hidden, 2 * hidden)
        nn.init.normal_(fc[:, :hidden], std=EMBEDDED_SHARE * STATE_LENGTH / hidden**0.5)
        fc[:, hidden:] = STATE_LENGTH * torch.eye(hidden)
        self.fc = nn.Parameter(fc)
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(final_norm.abs().mean() / _away_from_zero(final_norm))
        self.input_norm = nn.Parameter(target.weights.layers[-1].input_norm.clone())
        self._final_norm = target.weights.final_norm.clone()

    def features(self, states: torch.Tensor) -> torch.Tensor:
        return self.normed(states[:, :, -1], self._final_norm)

    def enter(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.normed(embedded, self.embedding_norm), self.normed(features, self.hidden_norm)
        entered = F.linear(torch.cat(normed, dim=-1), self.fc)
        return self.normed(entered, self.input_norm), entered

    def fed_back(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed


def _away_from_zero(norm: torch.Tensor) -> torch.Tensor:
    return torch.where(norm < 0, -1.0, 1.0) * norm.abs().clamp_min(0.3)
