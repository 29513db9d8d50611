"""How long a row's drafts have been worth it: acceptance remembered per position, and the length that follows from it.

Owns the statistics and the choice between lengths; knows no block, no token and no clock. The engine keeps one memory for
everybody, every sequence one of its own, kept over preemptions and gone with it. Called by engine.draft_lengths. Without
torch.

Lossless for drafts that were drawn at random too. A cut may depend on anything known before the token it cuts was drawn
(DSpark, section on verification: committed text, other requests, profiles; never the token itself or a later one). Here
it depends on verdicts of rounds before. Of those only what was judged is heard, up to the first rejection: a draft that
was drawn behind it is drawn again with the same random numbers (engine.noise), so how long it was must not matter.
"""

from collections.abc import Sequence

OPTIMISM = 0.7  # acceptance of a position of which nothing is known
PRIOR_WEIGHT = 2.0  # rounds that outweigh what is believed of everybody: two
ROW_DECAY = 0.9  # a row remembers about ten rounds: text changes from prose to code within a paragraph
ENGINE_DECAY = 0.998  # the engine about five hundred
PROBE_EVERY = 32  # rounds between two drafts longer than the chosen length: 3 % of a row's rounds at worst
ADVANTAGE = 1.03  # another length must promise this much more, or noise would move rows back and forth


class Acceptance:
    """P(a position is accepted | the one before it was), the newest rounds counting most. W numbers each, whatever comes.

    Positions are places in a chain, or depths in a tree.
    """

    __slots__ = ("_accepted", "_decay", "_judged")

    def __init__(self, max_draft_len: int, decay: float) -> None:
        self._decay = decay
        self._judged = [0.0] * max_draft_len  # decayed counts: this position was put to the target
        self._accepted = [0.0] * max_draft_len

    def hear(self, judged: int, accepted: int) -> None:
        """One drafted round: positions below `judged` got a verdict, those below `accepted` a good one.

        What was not judged is forgotten as fast as what was: a row that drafts short believes of the positions behind
        more and more what everybody does, and tries them again.
        """
        decay = self._decay
        self._judged = [count * decay for count in self._judged]
        self._accepted = [count * decay for count in self._accepted]
        for position in range(judged):
            self._judged[position] += 1.0
        for position in range(accepted):
            self._accepted[position] += 1.0

    def rates(self, beliefs: Sequence[float]) -> list[float]:
        """Per position, shrunk towards `beliefs` as far as nothing better is known."""
        return [
            (accepted + PRIOR_WEIGHT * belief) / (judged + PRIOR_WEIGHT)
            for accepted, judged, belief in zip(self._accepted, self._judged, beliefs, strict=True)
        ]


def best_length(rates: Sequence[float], fixed: float, limit: int, whole: bool, current: int | None) -> int:
    """The draft length in 0..limit with the most expected tokens per cost; `current` unless another is clearly better.

    A round of k draft tokens is expected to give 1 + r0 + r0 r1 + ... tokens and costs `fixed` + 1 + k, in units of what
    one token adds to a step; `fixed` is this row's share of what the step costs anyway. `whole`: only 0 or `limit`, for
    trees, whose shape is the drafter's own.
    """
    best, best_value = 0, 1.0 / (fixed + 1.0)
    current_value = best_value
    expected, survival = 1.0, 1.0
    for length in range(1, limit + 1):
        survival *= rates[length - 1]
        expected += survival
        if whole and length < limit:
            continue
        value = expected / (fixed + 1.0 + length)
        if value > best_value:
            best, best_value = length, value
        if length == current:
            current_value = value
    if current is None or (whole and current not in (0, limit)):
        return best
    return best if best_value > current_value * ADVANTAGE else min(current, limit)


class DraftMemory:
    """One sequence: what was accepted, the length in force, and when a longer draft was last tried."""

    __slots__ = ("_acceptance", "_is_probing", "_since_probe", "length")

    def __init__(self, max_draft_len: int) -> None:
        self.length: int | None = None  # None: nothing chosen yet
        self._acceptance = Acceptance(max_draft_len, ROW_DECAY)
        self._since_probe = 0  # rounds planned below the limit
        self._is_probing = False

    def choose(self, beliefs: Sequence[float], fixed: float, limit: int, whole: bool) -> int:
        """Draft tokens for the next round, at most `limit`, which is at least 1. Counts the round."""
        rates = self._acceptance.rates(beliefs)
        self.length = best_length(rates, fixed, limit, whole, self.length)
        if self.length >= limit:
            self._is_probing, self._since_probe = False, 0
            return self.length
        self._since_probe += 1
        self._is_probing = self._since_probe > PROBE_EVERY
        if not self._is_probing:
            return self.length
        return limit if whole else self.length + 1

    def hear(self, judged: int, accepted: int) -> None:
        """The verdict of a round in which at least one position was judged.

        A probe that met only agreement is repeated in the next round; one that the drafter had nothing for stays due.
        """
        self._acceptance.hear(judged, accepted)
        if self._is_probing and accepted < judged:
            self._since_probe = 0
