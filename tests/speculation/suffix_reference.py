"""Suffix drafts as the rule says them, by looking through every text for every match: slow, and nothing kept between steps.

A text is a list of (token, tick): when each token came, for ties between texts that grow at the same time.
"""

from collections.abc import Mapping, Sequence
from itertools import count

from engine.speculation.suffix_match import NOTHING, MatchRule, Proposal

ROUNDING = 1e-9
Texts = Mapping[int, Sequence[tuple[int, int]]]


class Clocked:
    """Texts as the reference reads them, grown beside a tree."""

    def __init__(self) -> None:
        self.texts: dict[int, list[tuple[int, int]]] = {}
        self._ticks = count()

    def extend(self, text_id: int, token_ids: Sequence[int]) -> None:
        self.texts.setdefault(text_id, []).extend((token_id, next(self._ticks)) for token_id in token_ids)


def reference_proposal(
    texts: Texts, history: Sequence[int], rule: MatchRule, max_tokens: int, max_depth: int
) -> Proposal:
    """The best draft of all matches, the longest match tried first."""
    best = NOTHING
    for match_len in range(min(len(history), max_depth) - 1, 0, -1):
        run = tuple(history[-match_len:])
        room = min(max_tokens, int(match_len * rule.factor + ROUNDING))
        if not continuations(texts, run):
            continue
        if rule.tree and room > 1:
            proposal = _tree(texts, run, room, max_depth, rule.min_probability)
        else:
            proposal = _path(texts, run, min(room, max_depth - match_len), rule.min_probability)
        if proposal.score > best.score + ROUNDING:
            best = proposal
    return best


def occurrences(texts: Texts, run: Sequence[int]) -> list[tuple[int, int]]:
    """(text, index behind it) of every occurrence."""
    size = len(run)
    return [
        (text_id, end)
        for text_id, text in texts.items()
        for end in range(size, len(text) + 1)
        if all(text[end - size + offset][0] == token_id for offset, token_id in enumerate(run))
    ]


def continuations(texts: Texts, run: Sequence[int]) -> dict[int, list[int]]:
    """The ticks at which each token followed the run, ascending."""
    found: dict[int, list[int]] = {}
    for text_id, end in occurrences(texts, run):
        if end < len(texts[text_id]):
            token_id, tick = texts[text_id][end]
            found.setdefault(token_id, []).append(tick)
    return {token_id: sorted(ticks) for token_id, ticks in found.items()}


def _path(texts: Texts, run: tuple[int, ...], room: int, least: float) -> Proposal:
    token_ids: list[int] = []
    probability, score = 1.0, 0.0
    while len(token_ids) < room and (found := continuations(texts, run)):
        token_id, ticks = max(found.items(), key=lambda one: (len(one[1]), one[1][-1]))  # of equals the one seen last
        probability *= len(ticks) / len(occurrences(texts, run))
        if probability < least - ROUNDING:
            break
        token_ids.append(token_id)
        score += probability
        run += (token_id,)
    return Proposal(token_ids, range(-1, len(token_ids) - 1), score)


def _tree(texts: Texts, run: tuple[int, ...], room: int, max_depth: int, least: float) -> Proposal:
    token_ids: list[int] = []
    parents: list[int] = []
    score, serial = 0.0, 0
    reachable: list[tuple[float, int, int, tuple[int, ...]]] = []  # (-probability, serial, parent, run)
    parent, probability = -1, 1.0
    while len(token_ids) < room:
        if len(run) < max_depth:
            total = len(occurrences(texts, run))
            found = sorted(continuations(texts, run).items(), key=lambda one: (-len(one[1]), one[1][0]))
            for token_id, ticks in found:
                reached = probability * len(ticks) / total
                if reached >= least - ROUNDING:
                    serial += 1
                    reachable.append((-reached, serial, parent, (*run, token_id)))
        if not reachable:
            break
        likeliest = min(reachable)  # of equals the one that could be reached first
        reachable.remove(likeliest)
        negative, _, above, run = likeliest
        parent, probability = len(token_ids), -negative
        token_ids.append(run[-1])
        parents.append(above)
        score += probability
    return Proposal(token_ids, parents, score)
