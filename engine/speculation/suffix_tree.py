"""How often every run of tokens occurred in a set of growing texts, and what followed it.

Owns the texts and the index over them; never decides what is drafted. One tree holds one sequence, another the responses of
a scope (`engine.speculation.suffix`); `suffix_cursor` and `suffix_match` read it.

It answers like a suffix tree of bounded depth. Source: SuffixDecoding (arXiv 2411.04975, section 3) for what is counted:
every suffix of every text, cut to `max_depth` tokens, also the one that has just begun; a text's end counts as an occurrence
without a continuation. The structure is our own. A run that occurred at most `_MOST_FEW` times is no node but the list of
places where it occurred, and what follows is read from the texts; only frequent runs become nodes with counts and children.
So a passage that is said twice costs two integers per token instead of `max_depth` nodes, path compression is not needed,
and nearly nothing of it is visible to the garbage collector.
"""

from __future__ import annotations  # array is generic for type checkers only

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

_MOST_FEW = 16  # occurrences; more of them become a node
_COLLAPSE = (
    8  # occurrences; a node with fewer is a list again. Half, so that one text coming and going does not thrash.
)
_OFFSET_BITS = 32  # a place is text << 32 | offset of the run's first token
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


class Branch:
    """A run of tokens that occurred often. Read-only outside this module."""

    __slots__ = ("best", "children", "count", "depth", "ends", "last")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # tokens of the run
        self.count = 0  # occurrences, those at a text's end included; of the root and of a node that was given up: 0
        self.last = 0  # time of its latest occurrence
        self.children: dict[int, Child] = {}
        self.ends: set[int] = set()  # places behind which nothing follows (yet)
        self.best: int | None = None  # the most frequent child; None: to be found out, see `SuffixTree.likeliest`


Child: TypeAlias = "int | array[int] | Branch"  # one place, a few, many


class Few(NamedTuple):
    """A run of `depth` tokens that occurred at these places only."""

    places: Sequence[int]
    depth: int


class Text:
    """Read-only outside this module."""

    __slots__ = ("first", "is_open", "pending", "ticks", "token_ids")

    def __init__(self) -> None:
        self.first = 0  # suffixes that begin before it are forgotten
        self.token_ids = array("i")
        self.ticks = array("q")  # when each token came, for ties between texts that grow at the same time
        self.is_open = True
        self.pending: list[tuple[int, Branch]] = []  # (start, node) of the suffixes that wait for the next token


Occurrence: TypeAlias = "tuple[Text, int]"  # of a run: the text, and the index of the token behind it


class SuffixTree:
    """`max_depth`: the longest run that is counted, in tokens; a draft behind a match of m tokens has max_depth - m at most."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        self.root = Branch(0)
        self._texts: dict[int, Text] = {}
        self._next_text = 0
        self._tick = 0

    def __len__(self) -> int:
        """Texts, finished and growing."""
        return len(self._texts)

    # ---- writing ----

    def open(self) -> int:
        """A new, empty text; returns its id."""
        text_id, self._next_text = self._next_text, self._next_text + 1
        self._texts[text_id] = Text()
        return text_id

    def extend(self, text_id: int, token_ids: Iterable[int]) -> None:
        """Append to an open text. O(1) a token for text that is new, O(max_depth) for text that was said many times."""
        text = self._texts[text_id]
        for token_id in token_ids:
            self._append(text, text_id << _OFFSET_BITS, token_id)

    def close(self, text_id: int) -> None:
        """The text grows no more."""
        text = self._texts[text_id]
        text.is_open, text.pending = False, []

    def reopen(self, text_id: int) -> None:
        """A closed text goes on where it ended. O(max_depth)."""
        text = self._texts[text_id]
        text.is_open = True
        end = len(text.token_ids)
        for start in range(max(0, end - self.max_depth + 1), end):
            run = self.find(text.token_ids[start:])
            if isinstance(run, Branch):
                text.pending.append((start, run))

    def shrink(self, text_id: int, num_tokens: int) -> tuple[int, bool]:
        """Forget the beginning of a text, which then grows no more; (tokens forgotten, whether nothing is left of it).

        At most `num_tokens`. O(num_tokens * max_depth) at worst.
        """
        self.close(text_id)
        text = self._texts[text_id]
        first = text.first
        text.first = end = min(first + num_tokens, len(text.token_ids))
        for start in range(first, end):
            self._remove_suffix(text.token_ids, start, text_id << _OFFSET_BITS | start)
        self.num_tokens -= end - first
        is_gone = end == len(text.token_ids)
        if is_gone:
            del self._texts[text_id]
        return end - first, is_gone

    # ---- reading ----

    def text(self, text_id: int) -> array[int]:
        """Its tokens; read-only."""
        return self._texts[text_id].token_ids

    def find(self, token_ids: array[int]) -> Branch | Few | None:
        """All occurrences of 1 to max_depth - 1 tokens; None where there is none."""
        branch = self.root
        for depth, token_id in enumerate(token_ids, start=1):
            child = branch.children.get(token_id)
            if child is None:
                return None
            if not isinstance(child, Branch):
                places = self._followed_by(places_of(child), depth, token_ids[depth:])
                return Few(places, len(token_ids)) if places else None
            branch = child
        return branch

    def occurrences(self, places: Iterable[int], depth: int) -> list[Occurrence]:
        """Where runs of `depth` tokens at these places end."""
        texts = self._texts
        return [(texts[place >> _OFFSET_BITS], (place & _OFFSET_MASK) + depth) for place in places]

    def likeliest(self, branch: Branch) -> int | None:
        """The token that followed most often; of equals the one seen last. None: nothing ever followed."""
        if branch.best is None:
            branch.best = self._best_of(branch)
        return branch.best

    # ---- appending ----

    def _append(self, text: Text, base: int, token_id: int) -> None:
        self._tick += 1
        self.num_tokens += 1
        arriving = text.pending
        arriving.append((len(text.token_ids), self.root))
        text.pending = []
        text.token_ids.append(token_id)
        text.ticks.append(self._tick)
        for start, branch in arriving:
            place = base | start
            branch.ends.discard(place)
            child = branch.children.get(token_id)
            if child is None:
                branch.children[token_id] = place
                count = 1
            elif isinstance(child, Branch):
                child.count = count = child.count + 1
                child.last = self._tick
                child.ends.add(place)
                text.pending.append((start, child))
            else:
                count = self._join(branch, token_id, child, place)
            best = branch.best
            if best is not None and best != token_id and count >= times(branch.children[best]):
                branch.best = token_id

    def _join(self, branch: Branch, token_id: int, child: int | array[int], place: int) -> int:
        """One more place for a child that is no node yet; how many it has now."""
        if isinstance(child, int):
            child = branch.children[token_id] = array("q", (child,))
        child.append(place)
        if len(child) > _MOST_FEW and branch.depth + 1 < self.max_depth:
            branch.children[token_id] = self._branch_of(child, branch.depth + 1)
        return len(child)

    def _branch_of(self, places: array[int], depth: int) -> Branch:
        """The node of a run of `depth` tokens that has become frequent."""
        branch = Branch(depth)
        branch.count = len(places)
        branch.last = self._latest(places, depth)
        following: dict[int, array[int]] = {}
        for place in places:
            text, start = self._texts[place >> _OFFSET_BITS], place & _OFFSET_MASK
            if start + depth < len(text.token_ids):
                following.setdefault(text.token_ids[start + depth], array("q")).append(place)
                continue
            branch.ends.add(place)
            if text.is_open:
                text.pending.append((start, branch))
        for token_id, there in following.items():
            is_frequent = len(there) > _MOST_FEW and depth + 1 < self.max_depth
            branch.children[token_id] = self._branch_of(there, depth + 1) if is_frequent else _packed(there)
        return branch

    # ---- removing ----

    def _remove_suffix(self, token_ids: array[int], start: int, place: int) -> None:
        branch = self.root
        path: list[tuple[Branch, int, Branch]] = []
        for offset in range(start, len(token_ids)):
            token_id = token_ids[offset]
            child = branch.children[token_id]
            if branch.best == token_id:
                branch.best = None
            if not isinstance(child, Branch):
                _drop(branch, token_id, child, place)
                break
            child.count -= 1
            path.append((branch, token_id, child))
            branch = child
        else:
            branch.ends.discard(place)
        for parent, token_id, child in reversed(path):
            if child.count > _COLLAPSE:
                break  # and so have all those above it
            places = self._places_under(child)
            if places:
                parent.children[token_id] = _packed(places)
            else:
                del parent.children[token_id]

    def _places_under(self, branch: Branch) -> array[int]:
        """Of a node that is given up. None of its children is a node: a child has no more occurrences than its parent."""
        branch.count = 0
        places = array("q", branch.ends)
        for child in branch.children.values():
            if isinstance(child, Branch):
                raise RuntimeError("a rare run has a frequent continuation")
            places.extend(places_of(child))
        for place in branch.ends:
            text = self._texts[place >> _OFFSET_BITS]
            text.pending = [one for one in text.pending if one[1] is not branch]
        return places

    # ---- reading, below ----

    def _followed_by(self, places: Sequence[int], depth: int, rest: array[int]) -> Sequence[int]:
        """Those places whose run of `depth` tokens goes on with `rest`."""
        if not rest:
            return places
        found = []
        for place in places:
            start = (place & _OFFSET_MASK) + depth
            if self._texts[place >> _OFFSET_BITS].token_ids[start : start + len(rest)] == rest:
                found.append(place)
        return found

    def _best_of(self, branch: Branch) -> int | None:
        """The same that counting from the start would have found: the last one to reach the highest count."""
        most = max(map(times, branch.children.values()), default=0)
        equals = [token_id for token_id, child in branch.children.items() if times(child) == most]
        if len(equals) > 1:
            equals.sort(key=lambda token_id: self._last(branch.children[token_id], branch.depth + 1))
        return equals[-1] if equals else None

    def _last(self, child: Child, depth: int) -> int:
        return child.last if isinstance(child, Branch) else self._latest(places_of(child), depth)

    def _latest(self, places: Iterable[int], depth: int) -> int:
        """When the latest occurrence of a run of `depth` tokens was complete."""
        return max(self._texts[place >> _OFFSET_BITS].ticks[(place & _OFFSET_MASK) + depth - 1] for place in places)


def times(child: Child) -> int:
    if isinstance(child, int):
        return 1
    return child.count if isinstance(child, Branch) else len(child)


def places_of(child: int | array[int]) -> Sequence[int]:
    """Of a child that is no node."""
    return (child,) if isinstance(child, int) else child


def _packed(places: array[int]) -> int | array[int]:
    return places[0] if len(places) == 1 else places


def _drop(branch: Branch, token_id: int, child: int | array[int], place: int) -> None:
    """One place less for a child that is no node."""
    if isinstance(child, int):
        del branch.children[token_id]
        return
    child.remove(place)
    branch.children[token_id] = _packed(child)
