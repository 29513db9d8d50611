"""The heads that make a block drafter a DSpark: a bias from the token before, and how likely a token is to be accepted.

Owns their weights and arithmetic; never draws a token. Run by `block_chain`, filled by `block_weights`.
Source: DSpark (DeepSeek and Peking University, 2026; Markov heads and confidence head), as DeepSpec publishes them.
n = rows, h = drafter's width, r = rank, V = target's vocabulary, D = drafter's vocabulary.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from engine.model.layers import project


class MarkovKind(StrEnum):
    VANILLA = "vanilla"  # the bias depends on the token before alone
    GATED = "gated"  # and on the row's hidden state, which lets parts of it through
    RNN = "rnn"  # and on all tokens of the block before it, through a state


@dataclass(frozen=True)
class MarkovHead:
    """Matrices in the target's dtype."""

    kind: MarkovKind
    predecessors: torch.Tensor  # [V, r]
    output: torch.Tensor  # [D, r]
    mixer: torch.Tensor | None  # gated [r, h + r], rnn [3 * r, 2 * r + h]
    mixer_bias: torch.Tensor | None  # [r], [3 * r]

    @property
    def rank(self) -> int:
        return self.output.shape[1]

    def start(self, num_rows: int) -> torch.Tensor:
        """[n, r], the state before a block's first row; only the RNN reads it."""
        return self.output.new_zeros(num_rows, self.rank)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, r] for int64 [n] tokens of the target."""
        return self.predecessors.index_select(0, token_ids)

    def step(
        self, hidden: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next token's logits gain, float32 [n, D], and the state behind it.

        `hidden` [n, h] of the row that predicts it, `embedded` [n, r] the token before it.
        """
        read = embedded
        if self.mixer is not None and self.kind is MarkovKind.GATED:
            gate = project(torch.cat([hidden, embedded], dim=1), self.mixer, self.mixer_bias).sigmoid()
            read = gate * embedded
        elif self.mixer is not None and self.kind is MarkovKind.RNN:
            mixed = project(torch.cat([state, embedded, hidden], dim=1), self.mixer, self.mixer_bias)
            keep, candidate, out = mixed.chunk(3, dim=1)
            keep = keep.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            read = out.tanh()
        return project(read, self.output).float(), state


@dataclass(frozen=True)
class ConfidenceHead:
    weight: torch.Tensor  # [1, h + r], or [1, h] without the token before
    bias: torch.Tensor  # [1]
    reads_token: bool

    def probability(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Float32 [n]: that the row's token is accepted, given that those before it were.

        A function of what was known before the token was drawn: cutting a draft where it is low leaves the target's law.
        """
        if self.reads_token:
            assert embedded is not None
            hidden = torch.cat([hidden, embedded], dim=1)
        return project(hidden, self.weight, self.bias)[:, 0].float().sigmoid().nan_to_num_(nan=0.0)
