"""What to draft behind a text, given one suffix tree: the longest worthwhile match, and the likely way on from it.

Owns the rule, no state. Source: SuffixDecoding (arXiv 2411.04975, section 3.2) and its published implementation's rules:
every suffix of the text that occurs in the tree is tried; a match of m tokens may draft `factor` * m tokens; a token's
probability is the share of the occurrences that it followed, times its parent's; a draft's score is the sum of them, the
expected number of accepted tokens if the past is a guide. The best score wins, of equals the longest match. Where tokens
followed equally often the published implementation's choice depends on its lists' history; here the one seen last is taken.
Called by `engine.speculation.suffix`.
"""

from __future__ import annotations  # array is generic for type checkers only

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.suffix_tree import Few, Run, SuffixTree

_ROUNDING = 1e-9  # products of the same fractions in another order are equal


@dataclass(frozen=True)
class MatchRule:
    """How far to trust a match."""

    factor: float = 1.0  # draft tokens per matched token
    min_probability: float = 0.1  # of a draft token
    tree: bool = False  # several ways on at once, instead of the likeliest only


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens in topological order; parents[i] < i, -1: the text's end."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    score: float = 0.0
    match_len: int = 0


NOTHING = Proposal()


def best_proposal(
    tree: SuffixTree, history: Sequence[int], rule: MatchRule, max_tokens: int, above: float = 0.0
) -> Proposal:
    """At most `max_tokens` tokens behind `history`; NOTHING unless its score is greater than `above`.

    The longest match is tried first, and a shorter one only while its length allows a better score. At least one token of
    the history is left unmatched (the published rule).
    """
    context = array("i", history[-tree.max_depth :])
    best, best_score = NOTHING, above
    matches = _matches(tree, context)
    for match_len in range(len(matches), 0, -1):
        room = min(max_tokens, int(match_len * rule.factor + _ROUNDING))
        if not rule.tree:
            room = min(room, tree.max_depth - match_len)
        if room <= best_score + _ROUNDING:
            continue  # no token counts for more than one
        draft = _grow_tree if rule.tree and room > 1 else _grow_path
        proposal = draft(tree, matches[match_len - 1], match_len, room, rule.min_probability)
        if proposal.score > best_score + _ROUNDING:
            best, best_score = proposal, proposal.score
    return best


def _matches(tree: SuffixTree, context: array[int]) -> list[Run]:
    """The occurrences of the last 1, 2, ... tokens, as long as anything ever followed them."""
    found: list[Run] = []
    run: Run | None = None
    for match_len in range(1, len(context)):
        run = tree.preceded(run, context[-match_len]) if isinstance(run, Few) else tree.find(context[-match_len:])
        if run is None or not tree.goes_on(run):
            break
        found.append(run)
    return found


def _grow_path(tree: SuffixTree, run: Run, match_len: int, room: int, min_probability: float) -> Proposal:
    token_ids: list[int] = []
    probability, score = 1.0, 0.0
    while len(token_ids) < room:
        if isinstance(run, Few) and len(run.places) == 1:
            rest = tree.following(run, room - len(token_ids))
            token_ids += rest
            score += probability * len(rest)
            break
        step = tree.likeliest(run)
        if step is None:
            break
        probability *= step.times / tree.count(run)
        if probability < min_probability - _ROUNDING:
            break
        token_ids.append(step.token_id)
        score += probability
        run = step.run
    return Proposal(token_ids, range(-1, len(token_ids) - 1), score, match_len)


def _grow_tree(tree: SuffixTree, run: Run, match_len: int, room: int, min_probability: float) -> Proposal:
    """The `room` likeliest nodes: always the likeliest one that can be reached, of equals the one that was seen first."""
    token_ids: list[int] = []
    parents: list[int] = []
    score = 0.0
    serial = 0
    reachable: list[tuple[float, int, int, int, Run]] = []  # (-probability, serial, parent, token, run)
    parent, probability = -1, 1.0
    while len(token_ids) < room:
        least_count = (min_probability / probability - _ROUNDING) * tree.count(run)
        for step in tree.continuations(run, least_count)[: room - len(token_ids)]:
            serial += 1
            reached = probability * step.times / tree.count(run)
            heapq.heappush(reachable, (-reached, serial, parent, step.token_id, step.run))
        if not reachable:
            break
        negative, _, above, token_id, run = heapq.heappop(reachable)
        parent, probability = len(token_ids), -negative
        token_ids.append(token_id)
        parents.append(above)
        score += probability
    return Proposal(token_ids, parents, score, match_len)
