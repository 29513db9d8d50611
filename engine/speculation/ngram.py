"""Prompt lookup: propose what followed the longest suffix of the history when it occurred before.

Owns one table of n-grams per row and drops it when the row ends; nothing is shared between sequences. Built by the
registry. Source: vLLM's n-gram proposer (its rule, not its code): the LONGEST suffix of lookup_min..lookup_max tokens
that occurred earlier, at its EARLIEST occurrence; the occurrence may overlap the suffix. vLLM rescans the context each
step; here the tables make a step O(lookup_max) whatever the context.
"""

from collections.abc import Sequence

from engine.speculation.draft import Draft, host_draft
from engine.speculation.speculator import Capabilities, DraftRow, SequenceStart, Speculator

DEFAULT_NUM_DRAFT_TOKENS = 5


class NgramSpeculator(Speculator):
    """Drafts on the host; its drafts' tensors are host tensors, so their lengths can be read without a synchronisation."""

    def __init__(self, num_draft_tokens: int, lookup_min: int, lookup_max: int, vocab_size: int) -> None:
        self.capabilities = Capabilities(max_draft_len=num_draft_tokens, sources=("ngram",), drafts_on_host=True)
        self._lookup_min = lookup_min
        self._lookup_max = lookup_max
        self._token_bits = vocab_size.bit_length()
        self._tables: dict[int, _NgramTable] = {}

    def begin(self, start: SequenceStart) -> None:
        table = _NgramTable(self._lookup_min, self._lookup_max, self._token_bits)
        table.read(start.token_ids)
        self._tables[start.row] = table

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return host_draft([self._lookup(row) for row in rows], self.capabilities.max_draft_len)

    def end(self, row: int) -> None:
        self._tables.pop(row, None)

    def _lookup(self, row: DraftRow) -> Sequence[int]:
        table = self._tables[row.row]
        table.read(row.token_ids)
        start = table.first_continuation()
        if start is None:
            return ()
        return row.token_ids[start : start + min(row.budget, self.capabilities.max_draft_len)]


class _NgramTable:
    """First occurrences of one history's n-grams: packed tokens -> index of the token behind them.

    The packing is exact (fixed bits per token in one integer), so there are no collisions to check; integers instead of
    tuples keep an 8k history near 3 MB and out of the garbage collector's sight.
    """

    def __init__(self, lookup_min: int, lookup_max: int, token_bits: int) -> None:
        self._token_bits = token_bits
        self._tables: tuple[tuple[int, dict[int, int]], ...] = tuple(  # (mask of a packed n-gram, first occurrences)
            ((1 << length * token_bits) - 1, {}) for length in range(lookup_min, lookup_max + 1)
        )
        self._num_read = 0
        self._last = 0  # the longest n-gram that ends what was read; zero before the beginning, where no token is

    def read(self, token_ids: Sequence[int]) -> None:
        """Add every n-gram that has a token behind it: all but those that end the history. O(new tokens)."""
        last, tables, token_bits = self._last, self._tables, self._token_bits
        longest, _ = tables[-1]
        for index in range(self._num_read, len(token_ids)):
            for mask, first in tables:
                key = last & mask
                if key not in first:
                    first[key] = index
            last = (last << token_bits | (token_ids[index] + 1)) & longest
        self._last, self._num_read = last, max(self._num_read, len(token_ids))

    def first_continuation(self) -> int | None:
        """Where the token behind the longest known suffix is, or None. O(lookup_max)."""
        found = None
        for mask, first in self._tables:
            start = first.get(self._last & mask)
            if start is None:
                break  # a longer suffix contains this one, so it cannot have occurred either
            found = start
        return found
