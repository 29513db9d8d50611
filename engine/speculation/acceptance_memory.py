"""What became of drafts: how often a position was drafted, and how often it was accepted when it was.

Owns the statistics; knows no block, no token and no clock, and decides nothing (engine.speculation.length_choice does). The
engine keeps one memory for everybody, every sequence one of its own, kept over preemptions and gone with it. Without torch.

Lossless for drafts that were drawn at random too. A cut may depend on anything known before the token it cuts was drawn
(DSpark, section on verification: committed text, other requests, profiles; never the token itself or a later one). Here
it depends on verdicts of rounds before. Of those only what was reached is heard, up to the first rejection: a draft that
was drawn behind it is drawn again with the same random numbers (engine.noise), so how long it was must not matter.
"""

from collections.abc import Sequence

OPTIMISM = 0.7  # acceptance of a position of which nothing is known
PRIOR_WEIGHT = 4.0  # rounds that outweigh what is believed of everybody: of many rows the luckiest are chosen otherwise
ROW_DECAY = 0.95  # a row remembers about twenty rounds: text changes from prose to code within a paragraph
IDLE_DECAY = 0.97  # of a round without a draft: bad luck is forgotten, though more slowly than it would be disproved
ENGINE_DECAY = 0.995  # the engine about two hundred


class Acceptance:
    """P(a position is drafted | it was reached) and P(it is accepted | it was drafted), the newest rounds counting most.

    Positions are places in a chain, or depths in a tree. 4 W numbers, whatever comes. A position is reached when it was
    allowed and all before it were accepted.
    """

    __slots__ = ("_accepted", "_decay", "_drafted", "_judged", "_reached")

    def __init__(self, max_draft_len: int, decay: float) -> None:
        self._decay = decay
        self._reached = [0.0] * max_draft_len  # decayed counts, as all of these
        self._drafted = [0.0] * max_draft_len
        self._judged = [0.0] * max_draft_len
        self._accepted = [0.0] * max_draft_len

    def hear(self, allowed: int, judged: int, accepted: int) -> None:
        """One round that `allowed` at least one token: positions below `judged` got a verdict, below `accepted` a good one.

        What was not judged is forgotten as fast as what was: a row that drafts short believes of the positions behind
        more and more what everybody does, and tries them again.
        """
        decay = self._decay
        self._reached = _raised([count * decay for count in self._reached], min(accepted + 1, allowed))
        self._drafted = _raised([count * decay for count in self._drafted], judged)
        if judged:  # a drafter that had nothing says nothing of what it is worth when it has
            self._judged = _raised([count * decay for count in self._judged], judged)
            self._accepted = _raised([count * decay for count in self._accepted], accepted)

    def fade(self) -> None:
        """One round that allowed nothing."""
        for counts in (self._reached, self._drafted, self._judged, self._accepted):
            counts[:] = [count * IDLE_DECAY for count in counts]

    def accepted(self, beliefs: Sequence[float]) -> list[float]:
        """P(accepted | drafted) per position, shrunk towards `beliefs` as far as nothing better is known."""
        return _rates(self._accepted, self._judged, beliefs)

    def drafted(self, beliefs: Sequence[float]) -> list[float]:
        """P(drafted | reached) per position, likewise."""
        return _rates(self._drafted, self._reached, beliefs)


class DraftMemory:
    """One sequence: what became of its drafts, and how many tokens the round under way may draft."""

    __slots__ = ("acceptance", "allowed")

    def __init__(self, max_draft_len: int) -> None:
        self.acceptance = Acceptance(max_draft_len, ROW_DECAY)
        self.allowed = 0


def _raised(counts: list[float], end: int) -> list[float]:
    """`counts`, those below `end` one higher."""
    for position in range(end):
        counts[position] += 1.0
    return counts


def _rates(hits: Sequence[float], trials: Sequence[float], beliefs: Sequence[float]) -> list[float]:
    return [
        (hit + PRIOR_WEIGHT * belief) / (trial + PRIOR_WEIGHT)
        for hit, trial, belief in zip(hits, trials, beliefs, strict=True)
    ]
