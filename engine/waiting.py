"""Sequences that wait for a row, in the order in which they will get one, and how many tokens they bring.

Owns order and sums only; never decides who is admitted. Called by engine.scheduler.
"""

import bisect
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """Sorted by priority, then arrival, then child. Iteration goes from the next one to run to the last."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0  # still to be computed for those that wait

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, position: int) -> Sequence:
        return self._sequences[position]

    def __contains__(self, sequence: Sequence) -> bool:
        return self._find(sequence) is not None

    def add(self, sequence: Sequence) -> None:
        sequence.queued_tokens = len(sequence.token_ids) - sequence.num_computed
        self.num_tokens += sequence.queued_tokens
        bisect.insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError when it does not wait."""
        position = self._find(sequence)
        if position is None:
            raise KeyError(f"{sequence.key} does not wait")
        self.num_tokens -= self._sequences.pop(position).queued_tokens

    def recount(self, sequence: Sequence) -> None:
        """The sequence lost or gained computed tokens while it waits."""
        self.num_tokens -= sequence.queued_tokens
        sequence.queued_tokens = len(sequence.token_ids) - sequence.num_computed
        self.num_tokens += sequence.queued_tokens

    def _find(self, sequence: Sequence) -> int | None:
        position = bisect.bisect_left(self._sequences, sequence.order, key=_order)
        while position < len(self._sequences) and self._sequences[position].order == sequence.order:
            if self._sequences[position] is sequence:
                return position
            position += 1
        return None


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
