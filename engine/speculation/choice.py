"""Which token a drafter proposes, given its logits: the most likely one, or one drawn from a distribution it keeps.

Owns the choice. Used by drafters whose model gives logits. n = rows, V = target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.speculator import DraftRow
from engine.transforms import Truncation, target_probs, truncation_kinds


class DraftSampling(StrEnum):
    """GREEDY drafts are deterministic: the verdict needs no probabilities and repeats plain decoding's very tokens.

    SAMPLED drafts follow the request's temperature and truncation and are accepted more often at high temperature;
    the output then has the target's law, on another path than plain decoding's.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True)
class _Group:
    """Sampled rows with the same kinds of truncation."""

    index: torch.Tensor  # int64 [m] into the n rows
    truncation: Truncation


class Chooser:
    """Draws for the same n rows, one position after the other."""

    def __init__(self, rows: Sequence[DraftRow], vocab_size: int, device: torch.device) -> None:
        by_kind: dict[tuple[bool, bool, bool], list[int]] = {}
        for index, row in enumerate(rows):
            if not row.sampling.is_greedy:
                by_kind.setdefault(truncation_kinds(row.sampling), []).append(index)
        self._seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64).to(device, non_blocking=True)
        self._groups = [
            _Group(
                torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True),
                Truncation.of([rows[index].sampling for index in indices], vocab_size, device),
            )
            for indices in by_kind.values()
        ]

    def of_target(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [n] that the target itself says, for its raw logits [n, V]: plain decoding's very tokens.

        Only for rows whose requests change nothing of the logits but by temperature, top_k, top_p and min_p.
        """
        tokens = logits.argmax(dim=1)
        for group in self._groups:
            probs = target_probs(logits[group.index].float(), group.truncation)
            numbers = uniforms(self._seeds[group.index], positions[group.index], Purpose.SAMPLE)
            tokens[group.index] = draw(probs, numbers).clamp_(max=logits.shape[1] - 1)
        return tokens

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [n] and the float32 [n, V] they were drawn from, for raw draft logits [n, V].

        `positions` int64 [n]: the index in the whole sequence of the token that is drawn. A greedy row's distribution
        is its argmax. Penalties, biases and bans are the verdict's alone: leaving them out of q costs acceptance only.
        """
        tokens = logits.argmax(dim=1)
        probs = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, tokens[:, None], 1.0)
        for group in self._groups:
            drawn_from = target_probs(logits[group.index].float(), group.truncation).to(torch.float32)
            numbers = uniforms(self._seeds[group.index], positions[group.index], Purpose.DRAFT)
            # A row of NaN (a draft model that overflowed) may draw a token behind the vocabulary, which would end a device.
            drawn = draw(drawn_from.to(torch.float64), numbers).clamp_(max=logits.shape[1] - 1)
            tokens[group.index] = drawn
            probs[group.index] = drawn_from
        return tokens, probs
