"""Notices that a model drafter's first tokens are almost never right: then it is misread or made for another model.

Owns the comparison of what a drafter proposed first with what was committed there, and the one warning; counts nothing
that anybody publishes. Used by drafters whose checkpoints carry conventions nobody can check: reading the wrong layer
raises nothing. Judged once, over the first `NUM_DRAFTS` drafts, after which it costs nothing.
"""

import logging
from collections.abc import Sequence

import torch

from engine.speculation.speculator import CommittedSpan, DraftRow

logger = logging.getLogger(__name__)

NUM_DRAFTS = 200
LEAST_SHARE = 0.03  # chance is one in the vocabulary; a poor drafter that is read rightly has ten times this


class FirstTokenWatch:
    """`suspects`: which conventions of this drafter to doubt, and the options that change them."""

    def __init__(self, speculator: str, suspects: str) -> None:
        self._speculator = speculator
        self._suspects = suspects
        self._pending: dict[int, tuple[int, torch.Tensor]] = {}  # row -> (position, first tokens)
        self._num_judged = 0
        self._hits: list[torch.Tensor] = []  # where the drafts live; added up on the host once
        self._is_done = False

    def proposed(self, rows: Sequence[DraftRow], first_tokens: torch.Tensor, num_between: int = 0) -> None:
        """`first_tokens` int [rows, c]: the tokens proposed behind each root, -1 where there are fewer than c.

        `num_between`: tokens of the target's own between root and draft.
        """
        if not self._is_done:
            for index, row in enumerate(rows):
                self._pending[row.row] = (len(row.token_ids) + num_between, first_tokens[index])

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """What was committed: the spans the drafter hears of."""
        for span in () if self._is_done else spans:
            position, first_tokens = self._pending.pop(span.row, (-1, None))
            committed = [*span.token_ids, span.next_token_id]
            if first_tokens is None or not span.start <= position < span.start + len(committed):
                continue
            self._hits.append((first_tokens == committed[position - span.start]).any())
            self._num_judged += 1
            if self._num_judged == NUM_DRAFTS:
                self._judge()
                return

    def forget(self, row: int) -> None:
        """The row's sequence is gone, and with it its last draft."""
        self._pending.pop(row, None)

    def _judge(self) -> None:
        num_hits = int(torch.stack(self._hits).sum())
        self._is_done = True
        self._pending.clear()
        self._hits.clear()
        if num_hits < LEAST_SHARE * NUM_DRAFTS:
            logger.warning(
                "drafts are almost never right speculator=%s first_accepted=%d drafts=%d: the drafter was made for "
                "another model, or its files are misread; suspect %s",
                self._speculator, num_hits, NUM_DRAFTS, self._suspects,
            )  # fmt: skip
