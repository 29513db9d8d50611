"""What to draft behind a text, given one suffix tree: the longest worthwhile match, and the likely way on from it.

Owns the rule, no state. Source: SuffixDecoding (arXiv 2411.04975, section 3.2) and its published implementation's rules:
every suffix of the text that occurs in the tree is tried; a match of m tokens may draft `factor` * m tokens; a token's
probability is the share of the occurrences that it followed, times its parent's; a draft's score is the sum of them, the
expected number of accepted tokens if the past is a guide. The best score wins, of equals the longest match. Where tokens
followed equally often the published implementation's choice depends on its lists' history; here the one seen last is taken.
The same written without any haste is `tests/speculation/suffix_reference.py`. Called by `engine.speculation.suffix`.
"""

from __future__ import annotations  # array is generic for type checkers only

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from engine.speculation.suffix_cursor import Suffixes
from engine.speculation.suffix_tree import Branch, Child, Occurrence, SuffixTree, places_of, times

_ROUNDING = 1e-9  # products of the same fractions in another order are equal


@dataclass(frozen=True)
class MatchRule:
    """How far to trust a match."""

    factor: float = 1.0  # draft tokens per matched token
    min_probability: float = 0.1  # of a draft token
    tree: bool = False  # several ways on at once, instead of the likeliest only


class Proposal(NamedTuple):
    """Tokens in topological order; parents[i] < i, -1: the text's end."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    score: float = 0.0


NOTHING = Proposal()


Run: TypeAlias = Branch | Sequence[Occurrence]  # frequent, or rare


def best_proposal(
    tree: SuffixTree, suffixes: Suffixes, rule: MatchRule, max_tokens: int, above: float = 0.0
) -> Proposal:
    """At most `max_tokens` tokens behind the text; NOTHING unless its score is greater than `above`.

    A draft scores at most its tokens, and a tree at most its levels. The match that may score most is tried first, so
    that most of the others need no look.
    """
    factor, depth = rule.factor, tree.max_depth
    candidates = [
        (min(max_tokens, int(length * factor + _ROUNDING), depth - length), length)
        for length in range(1, suffixes.longest + 1)
    ]
    candidates.sort(reverse=True)
    best, best_score, best_length = NOTHING, above, depth
    tried: set[int] = set()
    for most, length in candidates:
        if most < best_score - _ROUNDING:
            break
        run = _run(suffixes, length)
        if rule.tree:
            room = min(max_tokens, int(length * factor + _ROUNDING))
            proposal = _grow_tree(tree, run, room, depth - length, rule.min_probability)
        else:
            if not isinstance(run, Branch):
                if len(run) in tried:
                    continue  # the same occurrences, with less room
                tried.add(len(run))
            proposal = _grow_path(tree, run, most, rule.min_probability, best_score)
        lead = proposal.score - best_score
        if lead > _ROUNDING or (lead > -_ROUNDING and length > best_length):
            best, best_score, best_length = proposal, proposal.score, length
    return best


def _run(suffixes: Suffixes, length: int) -> Run:
    """All occurrences of the last `length` tokens."""
    if length <= len(suffixes.branches):
        return suffixes.branches[length - 1]
    return [one for one, size in zip(suffixes.occurrences, suffixes.lengths, strict=True) if size >= length]


def _grow_path(tree: SuffixTree, run: Run, room: int, least: float, worth: float) -> Proposal:
    """The likeliest token, again and again; may stop where a score of `worth` is out of reach."""
    token_ids: list[int] = []
    probability, score = 1.0, 0.0
    while len(token_ids) < room:
        if not isinstance(run, Branch) and len(run) == 1:
            [(text, end)] = run
            rest = text.token_ids[end : end + room - len(token_ids)]
            token_ids += rest
            score += probability * len(rest)
            break
        step = _likeliest(tree, run)
        if step is None:
            break
        token_id, share, run = step
        probability *= share
        if probability < least - _ROUNDING or score + probability * (room - len(token_ids)) < worth - _ROUNDING:
            break
        token_ids.append(token_id)
        score += probability
    return Proposal(token_ids, range(-1, len(token_ids) - 1), score)


def _likeliest(tree: SuffixTree, run: Run) -> tuple[int, float, Run] | None:
    """(token, its share, the run with it) that followed most often, of equals the one seen last; None: nothing ever did."""
    if isinstance(run, Branch):
        best = tree.likeliest(run) if run.best is None else run.best
        if best is None:
            return None
        child = run.children[best]
        return best, times(child) / run.count, _run_of(tree, child, run.depth + 1)
    following = _following(run)
    if not following:
        return None
    if len(following) == 1:
        [(token_id, there)] = following.items()
    else:
        token_id, there = max(following.items(), key=_times_and_last)
    return token_id, len(there) / len(run), there


def _run_of(tree: SuffixTree, child: Child, depth: int) -> Run:
    return child if isinstance(child, Branch) else tree.occurrences(places_of(child), depth)


def _following(run: Sequence[Occurrence]) -> dict[int, list[Occurrence]]:
    """What followed a rare run, by the token that comes next."""
    following: dict[int, list[Occurrence]] = {}
    for text, end in run:
        token_ids = text.token_ids
        if end < len(token_ids):
            following.setdefault(token_ids[end], []).append((text, end + 1))
    return following


def _times_and_last(continuation: tuple[int, list[Occurrence]]) -> tuple[int, int]:
    _, there = continuation
    return len(there), max(text.ticks[end - 1] for text, end in there)


def _grow_tree(tree: SuffixTree, run: Run, room: int, levels: int, least: float) -> Proposal:
    """The `room` likeliest nodes: always the likeliest one that can be reached, of equals the one that was seen first."""
    if room == 1:
        return _grow_path(tree, run, room, least, 0.0)
    token_ids: list[int] = []
    parents: list[int] = []
    score = 0.0
    serial = 0
    reachable: list[tuple[float, int, int, int, Child | list[Occurrence], int]] = []
    parent, probability = -1, 1.0
    while len(token_ids) < room:
        if levels:
            count = run.count if isinstance(run, Branch) else len(run)
            least_count = (least / probability - _ROUNDING) * count
            for times_here, token_id, child in _continuations(run, least_count)[: room - len(token_ids)]:
                serial += 1
                reached = probability * times_here / count
                heapq.heappush(reachable, (-reached, serial, parent, token_id, child, levels - 1))
        if not reachable:
            break
        negative, _, above, token_id, child, levels = heapq.heappop(reachable)
        run = child if isinstance(child, list) else _run_of(tree, child, tree.max_depth - levels)
        parent, probability = len(token_ids), -negative
        token_ids.append(token_id)
        parents.append(above)
        score += probability
    return Proposal(token_ids, parents, score)


def _continuations(run: Run, least_count: float) -> list[tuple[int, int, Child | list[Occurrence]]]:
    """(times, token, the run with it) of what followed at least `least_count` times, the likeliest first."""
    found: list[tuple[int, int, Child | list[Occurrence]]]
    if isinstance(run, Branch):
        found = [
            (number, token_id, child)
            for token_id, child in run.children.items()
            if (number := times(child)) >= least_count
        ]
    else:
        found = [
            (len(there), token_id, there) for token_id, there in _following(run).items() if len(there) >= least_count
        ]
    found.sort(key=_fewest_last)
    return found


def _fewest_last(continuation: tuple[int, int, Child | list[Occurrence]]) -> int:
    return -continuation[0]
