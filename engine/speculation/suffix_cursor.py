"""Where a text that goes on is in a suffix tree: every run of tokens that ends it and occurred before.

Owns the place between two steps, so that a step costs its new tokens and not another walk from the root for every length;
never decides what is drafted. Made by `engine.speculation.suffix` for each sequence and tree, read by `suffix_match`.
"""

from __future__ import annotations  # array is generic for type checkers only

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.speculation.suffix_tree import Branch, Child, Few, Occurrence, SuffixTree, places_of


class Suffixes(NamedTuple):
    """The last 1, 2, ..., `longest` tokens of a text occurred and went on; `longest` + 1 did not.

    The last m tokens are `branches[m - 1]` where there is one. Longer ones are rare: they are the ends of those
    `occurrences` whose length is m or more, `lengths` beside them. An occurrence at a text's end counts but does not go on.
    """

    longest: int
    branches: Sequence[Branch]
    occurrences: Sequence[Occurrence] = ()
    lengths: Sequence[int] = ()


class Cursor:
    """One text, which only grows, in one tree, which may grow and shrink meanwhile."""

    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree
        self._num_read = 0
        self._branches: list[Branch] = []  # [m - 1]: the last m tokens that were read, as far as they are frequent

    def suffixes(self, token_ids: Sequence[int]) -> Suffixes:
        """Of the whole text. Matches have less than max_depth tokens, and one of the text's is always left over.

        O(frequent suffixes) per token that is new, O(rare occurrences) per call.
        """
        tree = self.tree
        limit = min(len(token_ids), tree.max_depth) - 1
        beyond = self._read(token_ids)
        branches = self._branches
        while isinstance(beyond, Branch):  # it became frequent since its beginning was read
            branches.append(beyond)
            beyond = self._find(token_ids, len(branches) + 1) if len(branches) < limit else None
        longest = min(len(branches), limit)
        while longest and not branches[longest - 1].children:
            longest -= 1
        if longest < len(branches) or beyond is None or len(branches) >= limit:
            return Suffixes(longest, branches)
        return self._with_rare(token_ids, beyond, limit)

    def _read(self, token_ids: Sequence[int]) -> Child | None:
        """Take in what is new; returns the run that is one token longer than the last branch, None where there is none."""
        root, first = self.tree.root, max(self._num_read, len(token_ids) - self.tree.max_depth + 1)
        branches = self._branches if first == self._num_read else []  # no match reaches over what is skipped
        while branches and not branches[-1].count:
            branches.pop()  # given up meanwhile; whatever is shorter occurs more often
        beyond: Child | None = None
        is_known = False
        for token_id in token_ids[first:]:
            grown: list[Branch] = []
            is_known = True
            beyond = root.children.get(token_id)
            for branch in branches:
                if not isinstance(beyond, Branch):
                    break
                grown.append(beyond)
                beyond = branch.children.get(token_id)
            if isinstance(beyond, Branch):
                grown.append(beyond)
                is_known = False
            branches = grown
        self._branches, self._num_read = branches, len(token_ids)
        return beyond if is_known else self._find(token_ids, len(branches) + 1)

    def _find(self, token_ids: Sequence[int], length: int) -> Child | None:
        """All occurrences of the last `length` tokens."""
        if length >= min(len(token_ids), self.tree.max_depth):
            return None
        run = self.tree.find(array("i", token_ids[-length:]))
        return array("q", run.places) if isinstance(run, Few) else run

    def _with_rare(self, token_ids: Sequence[int], places: int | array[int], limit: int) -> Suffixes:
        """`places`: of the suffix that is one token longer than the last branch."""
        branches = self._branches
        shortest = len(branches) + 1
        occurrences = self.tree.occurrences(places_of(places), shortest)
        before = array("i", token_ids[-limit:-shortest])  # what may precede them, in the text's order
        before.reverse()
        longest, lengths = len(branches), []
        for text, end in occurrences:
            known = text.token_ids
            index = end - shortest
            length = shortest
            for token_id in before:
                index -= 1
                if index < text.first or known[index] != token_id:
                    break
                length += 1
            lengths.append(length)
            if length > longest and end < len(known):
                longest = length
        return Suffixes(longest, branches, occurrences, lengths)
