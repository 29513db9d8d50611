"""Drafters that know the answer, for tests: always right, always wrong, and a script with probabilities.

They hold rollback, counters and the acceptance rules at both extremes. Not in the registry: a user cannot start them.
Tests build them with what the target will say.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from engine.noise import Purpose, uniforms
from engine.speculation.draft import Draft, host_draft
from engine.speculation.speculator import Capabilities, DraftRow, Speculator


class OracleSpeculator(Speculator):
    """Proposes the true continuation, or with `is_right` False a continuation whose every token is wrong."""

    def __init__(
        self,
        truths: Mapping[tuple[int, ...], Sequence[int]],  # prompt -> all the tokens the target will emit behind it
        max_draft_len: int,
        vocab_size: int,
        is_right: bool,
    ) -> None:
        self.capabilities = Capabilities(max_draft_len=max_draft_len, sources=("oracle",), drafts_on_host=True)
        self._truths = truths
        self._shift = 0 if is_right else 1
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return host_draft([self._continuation(row) for row in rows], self.capabilities.max_draft_len)

    def _continuation(self, row: DraftRow) -> list[int]:
        truth = self._truths.get(tuple(row.token_ids[: row.num_prompt_tokens]), ())
        start = len(row.token_ids) - row.num_prompt_tokens
        limit = min(row.budget, self.capabilities.max_draft_len)
        return [(token + self._shift) % self._vocab_size for token in truth[start : start + limit]]


class ScriptedSpeculator(Speculator):
    """Draws each draft token from a given distribution and says so: the smallest drafter with probabilities."""

    def __init__(
        self,
        draft_probs: Callable[[Sequence[int]], torch.Tensor],  # history -> float32 [V]
        max_draft_len: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.capabilities = Capabilities(max_draft_len, ("scripted",), drafts_on_host=True, gives_probs=True)
        self._draft_probs = draft_probs
        self._vocab_size = vocab_size
        self._seed = torch.tensor(seed, dtype=torch.int64)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = self.capabilities.max_draft_len
        probs = torch.zeros(len(rows), width, self._vocab_size)
        proposals: list[list[int]] = []
        for index, row in enumerate(rows):
            proposed: list[int] = []
            for step in range(min(row.budget, width)):
                probs[index, step] = self._draft_probs([*row.token_ids, *proposed])
                proposed.append(self._draw(probs[index, step], len(row.token_ids) + step))
            proposals.append(proposed)
        return host_draft(proposals, width, probs)

    def _draw(self, probs: torch.Tensor, position: int) -> int:
        number = uniforms(self._seed, torch.tensor(position), Purpose.DRAFT)
        cumulative = probs.to(torch.float64).cumsum(dim=0)
        return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
