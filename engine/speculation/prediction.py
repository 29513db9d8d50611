"""Predicted output: propose the client's own prediction of the answer, as long as the answer follows it.

Owns one cursor per row and drops it when the row ends; nothing is shared between sequences. Drafts on the host. Built by
the registry. Source: OpenAI's predicted outputs for what a prediction is; the way back after a difference is our own: the
longest suffix of the output, of lookup_min to lookup_max tokens, that the prediction holds.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch

from engine.speculation.draft import Draft, empty_draft, host_draft
from engine.speculation.names import PREDICTION
from engine.speculation.speculator import Capabilities, DraftRow, SequenceStart, Speculator

_HOST = torch.device("cpu")


class PredictionSpeculator(Speculator):
    """Proposes nothing for a row without a prediction, at the cost of one look into a dict."""

    def __init__(self, num_draft_tokens: int, lookup_min: int, lookup_max: int, vocab_size: int) -> None:
        self.capabilities = Capabilities(max_draft_len=num_draft_tokens, sources=(PREDICTION,), drafts_on_host=True)
        self._lengths = range(lookup_min, lookup_max + 1)
        self._token_bits = max(1, (vocab_size - 1).bit_length())
        self._cursors: dict[int, _Cursor] = {}
        self._nothing = empty_draft(0, num_draft_tokens, _HOST)

    def begin(self, start: SequenceStart) -> None:
        self._cursors.pop(start.row, None)
        if start.prediction:
            self._cursors[start.row] = _Cursor(start.prediction, self._lengths, self._token_bits)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        if not self._cursors:  # the usual case, which costs nothing: nobody predicts
            if len(self._nothing.tokens) != len(rows):
                self._nothing = empty_draft(len(rows), self.capabilities.max_draft_len, _HOST)
            return self._nothing
        return host_draft([self._continuation(row) for row in rows], self.capabilities.max_draft_len)

    def end(self, row: int) -> None:
        self._cursors.pop(row, None)

    def _continuation(self, row: DraftRow) -> Sequence[int]:
        cursor = self._cursors.get(row.row)
        if cursor is None:
            return ()
        return cursor.continuation(
            row.token_ids, row.num_prompt_tokens, min(row.budget, self.capabilities.max_draft_len)
        )


class _Cursor:
    """Where one output is in its prediction. A function of the two texts alone: how many tokens a step brings is no matter."""

    def __init__(self, prediction: Sequence[int], lengths: range, token_bits: int) -> None:
        self._prediction = prediction
        self._lengths = lengths
        self._token_bits = token_bits
        self._position: int | None = 0  # in the prediction, of the token that the output should say next; None: lost
        self._last = 0  # where the output left the prediction
        self._num_read = 0  # generated tokens that moved the cursor
        self._places: _Places | None = None  # made at the first difference: many outputs have none

    def continuation(self, token_ids: Sequence[int], num_prompt: int, limit: int) -> Sequence[int]:
        """The next tokens of the prediction; none while the output differs from it, or behind its end. O(new tokens)."""
        for index in range(num_prompt + self._num_read, len(token_ids)):
            self._move(token_ids, num_prompt, index)
        self._num_read = len(token_ids) - num_prompt
        if self._position is None:
            return ()
        return self._prediction[self._position : self._position + limit]

    def _move(self, token_ids: Sequence[int], num_prompt: int, index: int) -> None:
        """Take in the generated token at `index`."""
        prediction, position = self._prediction, self._position
        if position is not None and position < len(prediction) and prediction[position] == token_ids[index]:
            self._position = position + 1
            return
        if position is not None:
            self._last = position
        if self._places is None:
            self._places = _Places(self._prediction, self._lengths, self._token_bits)
        self._position = self._places.behind(token_ids, num_prompt, index + 1, self._last)


class _Places:
    """Every n-gram of a prediction -> the ascending indices behind its occurrences.

    The packing is exact (fixed bits per token in one integer), so there are no collisions to check.
    """

    def __init__(self, prediction: Sequence[int], lengths: range, token_bits: int) -> None:
        self._lengths = lengths
        self._token_bits = token_bits
        self._ends: dict[int, dict[int, list[int]]] = {length: {} for length in lengths}
        for end in range(1, len(prediction) + 1):
            for length, key in self._suffix_keys(prediction, 0, end):
                self._ends[length].setdefault(key, []).append(end)

    def behind(self, token_ids: Sequence[int], first: int, end: int, last: int) -> int | None:
        """The index behind the longest known suffix of token_ids[first:end], or None.

        Of several occurrences the earliest at or behind `last`, for edited text goes on behind the edit, else the earliest.
        """
        found = None
        for length, key in self._suffix_keys(token_ids, first, end):
            ends = self._ends[length].get(key)
            if ends is None:
                break  # a longer suffix contains this one, so it does not occur either
            at = bisect_left(ends, last)
            found = ends[at] if at < len(ends) else ends[0]
        return found

    def _suffix_keys(self, token_ids: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
        """(length, packed n-gram) of the n-grams that end before `end` and begin at or behind `first`, shortest first."""
        keys = []
        key = 0
        for length in range(1, min(self._lengths.stop - 1, end - first) + 1):
            key |= token_ids[end - length] << (self._token_bits * (length - 1))
            if length >= self._lengths.start:
                keys.append((length, key))
        return keys
