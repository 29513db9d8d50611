"""How often every run of tokens occurred in a set of growing texts, and what followed it.

Owns the texts and the index over them; never decides what is drafted. One tree holds one sequence, another the responses of
a scope (`engine.speculation.suffix`); `engine.speculation.suffix_match` reads it.

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
        self.count = 0
        self.last = 0  # time of its latest occurrence
        self.children: dict[int, _Child] = {}
        self.ends: set[int] = set()  # places behind which nothing follows (yet)
        self.best: int | None = None  # the most frequent child; None: to be found out


class Few(NamedTuple):
    """A run of `depth` tokens that occurred at these places only."""

    places: Sequence[int]
    depth: int


Run: TypeAlias = Branch | Few
_Child: TypeAlias = "int | array[int] | Branch"  # one place, a few, many


class Continuation(NamedTuple):
    """`run` is the run before it and `token_id`."""

    token_id: int
    times: int
    run: Run


class _Text:
    __slots__ = ("is_open", "pending", "ticks", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.ticks = array("q")  # when each token came, for ties between texts that grow at the same time
        self.is_open = True
        self.pending: list[tuple[int, Branch]] = []  # (start, node) of the suffixes that wait for the next token


class SuffixTree:
    """`max_depth`: the longest run that is counted, in tokens; a draft behind a match of m tokens has max_depth - m at most."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        self._root = Branch(0)
        self._texts: dict[int, _Text] = {}
        self._next_text = 0
        self._tick = 0

    def __len__(self) -> int:
        """Texts, finished and growing."""
        return len(self._texts)

    # ---- writing ----

    def open(self) -> int:
        """A new, empty text; returns its id."""
        text_id, self._next_text = self._next_text, self._next_text + 1
        self._texts[text_id] = _Text()
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

    def remove(self, text_id: int) -> None:
        """Forget every occurrence in the text. O(its tokens * max_depth) at worst."""
        self.close(text_id)
        token_ids = self._texts[text_id].token_ids
        for start in range(len(token_ids)):
            self._remove_suffix(token_ids, start, text_id << _OFFSET_BITS | start)
        self.num_tokens -= len(token_ids)
        del self._texts[text_id]

    # ---- reading ----

    def text(self, text_id: int) -> array[int]:
        """Its tokens; read-only."""
        return self._texts[text_id].token_ids

    def find(self, token_ids: array[int]) -> Run | None:
        """All occurrences of 1 to max_depth - 1 tokens; None where there is none."""
        branch = self._root
        for depth, token_id in enumerate(token_ids, start=1):
            child = branch.children.get(token_id)
            if child is None:
                return None
            if not isinstance(child, Branch):
                places = self._followed_by(_places(child), depth, token_ids[depth:])
                return Few(places, len(token_ids)) if places else None
            branch = child
        return branch

    def count(self, run: Run) -> int:
        """Its occurrences, those at the end of a text included."""
        return run.count if isinstance(run, Branch) else len(run.places)

    def preceded(self, run: Few, token_id: int) -> Few | None:
        """All occurrences of `token_id` and the run behind it: `find`, much faster."""
        places = []
        for place in run.places:
            start = place & _OFFSET_MASK
            if start and self._texts[place >> _OFFSET_BITS].token_ids[start - 1] == token_id:
                places.append(place - 1)
        return Few(places, run.depth + 1) if places else None

    def following(self, run: Few, num_tokens: int) -> array[int]:
        """What followed a run that occurred once; at most `num_tokens`, less at the text's end."""
        place = run.places[0]
        start = (place & _OFFSET_MASK) + run.depth
        return self._texts[place >> _OFFSET_BITS].token_ids[start : start + num_tokens]

    def goes_on(self, run: Run) -> bool:
        """Whether anything ever followed it."""
        if isinstance(run, Branch):
            return bool(run.children)
        texts = self._texts
        return any(
            (place & _OFFSET_MASK) + run.depth < len(texts[place >> _OFFSET_BITS].token_ids) for place in run.places
        )

    def likeliest(self, run: Run) -> Continuation | None:
        """What followed most often; of equals the one seen last. None: nothing ever followed."""
        if isinstance(run, Branch):
            if run.best is None:
                run.best = self._best_of(run)
            return None if run.best is None else _continuation(run, run.best)
        following = self._split(run)
        if not following:
            return None
        most = max(map(len, following.values()))
        equals = [token_id for token_id, there in following.items() if len(there) == most]
        depth = run.depth + 1
        if len(equals) > 1:
            equals.sort(key=lambda token_id: self._latest(following[token_id], depth))
        return Continuation(equals[-1], most, Few(following[equals[-1]], depth))

    def continuations(self, run: Run, least_count: float) -> list[Continuation]:
        """Everything that followed at least `least_count` times, the likeliest first. O(all that followed)."""
        if isinstance(run, Branch):
            tokens = [token_id for token_id, child in run.children.items() if _count(child) >= least_count]
            found = [_continuation(run, token_id) for token_id in tokens]
        else:
            found = [
                Continuation(token_id, len(there), Few(there, run.depth + 1))
                for token_id, there in self._split(run).items()
                if len(there) >= least_count
            ]
        return sorted(found, key=_fewest_last)

    # ---- appending ----

    def _append(self, text: _Text, base: int, token_id: int) -> None:
        self._tick += 1
        self.num_tokens += 1
        arriving = text.pending
        arriving.append((len(text.token_ids), self._root))
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
            if best is not None and best != token_id and count >= _count(branch.children[best]):
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
        branch = self._root
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
        places = array("q", branch.ends)
        for child in branch.children.values():
            if isinstance(child, Branch):
                raise RuntimeError("a rare run has a frequent continuation")
            places.extend(_places(child))
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

    def _split(self, run: Few) -> dict[int, list[int]]:
        """The places by the token that followed there."""
        following: dict[int, list[int]] = {}
        if run.depth == self.max_depth:
            return following
        for place in run.places:
            token_ids = self._texts[place >> _OFFSET_BITS].token_ids
            end = (place & _OFFSET_MASK) + run.depth
            if end < len(token_ids):
                following.setdefault(token_ids[end], []).append(place)
        return following

    def _best_of(self, branch: Branch) -> int | None:
        """The same that counting from the start would have found: the last one to reach the highest count."""
        most = max(map(_count, branch.children.values()), default=0)
        equals = [token_id for token_id, child in branch.children.items() if _count(child) == most]
        if len(equals) > 1:
            equals.sort(key=lambda token_id: self._last(branch.children[token_id], branch.depth + 1))
        return equals[-1] if equals else None

    def _last(self, child: _Child, depth: int) -> int:
        return child.last if isinstance(child, Branch) else self._latest(_places(child), depth)

    def _latest(self, places: Iterable[int], depth: int) -> int:
        """When the latest occurrence of a run of `depth` tokens was complete."""
        return max(self._texts[place >> _OFFSET_BITS].ticks[(place & _OFFSET_MASK) + depth - 1] for place in places)


def _continuation(branch: Branch, token_id: int) -> Continuation:
    child = branch.children[token_id]
    if isinstance(child, Branch):
        return Continuation(token_id, child.count, child)
    places = _places(child)
    return Continuation(token_id, len(places), Few(places, branch.depth + 1))


def _fewest_last(continuation: Continuation) -> int:
    return -continuation.times


def _count(child: _Child) -> int:
    if isinstance(child, int):
        return 1
    return child.count if isinstance(child, Branch) else len(child)


def _places(child: int | array[int]) -> Sequence[int]:
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
