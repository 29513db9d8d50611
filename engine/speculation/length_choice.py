"""How many tokens each row of a step drafts: the lengths that promise the most tokens per second, all rows together.

Owns the choice, the probes and the hysteresis; what is believed comes from `acceptance_memory` and `step_cost`. Knows no
block, no token and no clock. Called by engine.draft_lengths, once per step. Without torch.

Source: the objective and the greedy order are DSpark's (hardware-aware prefix scheduler, algorithm 1: rows plus survival
over the step's cost); survival comes from verdicts of earlier rounds instead of confidences of this draft, so that the
whole choice, an argmax over all budgets too, is made before the first token is drawn and no cut ever depends on a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.speculation.acceptance_memory import ENGINE_DECAY, OPTIMISM, Acceptance, DraftMemory
from engine.speculation.step_cost import StartUpCosts, StepCost

PROBE_SHARE = 0.02  # of the time goes into drafts longer than the best
PROBE_EVERY = 8  # steps between two probes at least, however cheap they are
MOST_CREDIT = 4.0  # probes that may be saved up, or made in advance, in units of the one that is due
MOST_IN_A_ROW = 6  # probes that go on while they are right
ADVANTAGE = 1.02  # drafting and not drafting change places only for this much, or noise would move them back and forth
LEAST_PRICE = 0.25  # of a probe, in shares of the time it adds: what it is expected to bring may be wrong
DEPTHS = (1, 2, 3, 5, 8, 12, 20, 32)  # tried as the longest draft of a step
DEPTH_MATTERS = 1.05  # times as long for the longest draft as for one token
LEAST_SURVIVAL = 0.01  # what is less likely than this to be accepted is not looked at


@dataclass(frozen=True)
class Asking:
    """One row of the step."""

    memory: DraftMemory
    limit: int  # most tokens it may draft, 0..W


class _Slot(NamedTuple):
    """One more draft slot for a row, or a whole tree."""

    survival: float  # P(it is accepted | it is drafted); for a tree, expected tokens per node
    row: int
    length: int  # of the row's draft with it
    tokens: float  # expected, accepted with it
    cost: float  # expected, drafted for it


class _Plan(NamedTuple):
    """Slots that are taken, and what they promise."""

    value: float  # expected tokens per ns
    slots: Sequence[_Slot]


class LengthChoice:
    """`whole`: drafts are trees, whose shape is the drafter's own: drafted to their limit or not at all."""

    def __init__(self, max_draft_len: int, whole: bool, start_up: StartUpCosts | None) -> None:
        self.cost = StepCost(start_up)
        self._whole = whole
        self._everybody = Acceptance(max_draft_len, ENGINE_DECAY)
        self._guesses = [OPTIMISM] * max_draft_len
        self._always = [1.0] * max_draft_len
        self._is_drafting: bool | None = None  # None: nothing chosen yet
        self._probe = _Probe()

    def choose(self, rows: Sequence[Asking], num_rows: int, spare: int) -> list[int]:
        """A length for each of `rows`, together at most `spare`. `num_rows`: rows that decode, those that cannot draft too.

        O(rows W log(rows W)).
        """
        slots = self._slots(rows)
        plan = self._best(slots, num_rows, spare)
        plain = _Plan(num_rows / self.cost.verify_ns(num_rows, num_rows), ())
        needed = {None: 1.0, True: 1.0 / ADVANTAGE, False: ADVANTAGE}[self._is_drafting]
        if slots:
            self._is_drafting = plan.value > plain.value * needed
        lengths = _lengths(plan if self._is_drafting else plain, len(rows))
        longer = self._longer(rows, lengths, plan, spare)
        if longer == lengths:
            self._probe.is_running = False
        elif self._probe.is_due(*self._prices(lengths, longer, slots, num_rows)):
            lengths = longer
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                row.memory.acceptance.fade()
        return lengths

    def hear(self, memory: DraftMemory, judged: int, accepted: int) -> None:
        """The verdict of a round in which the row might draft `memory.allowed` tokens, at least one."""
        memory.acceptance.hear(memory.allowed, judged, accepted)
        self._everybody.hear(memory.allowed, judged, accepted)
        self._probe.hear(judged, accepted)

    def _slots(self, rows: Sequence[Asking]) -> list[_Slot]:
        """Of all rows, the likeliest first; a row's own stay in their order, for survival only falls."""
        accepted_by_all = self._everybody.accepted(self._guesses)
        drafted_by_all = self._everybody.drafted(self._always)
        slots: list[_Slot] = []
        for index, row in enumerate(rows):
            accepted = row.memory.acceptance.accepted(accepted_by_all)[: row.limit]
            drafted = row.memory.acceptance.drafted(drafted_by_all)[: row.limit]
            chain = _chain(index, accepted, drafted)
            if self._whole and chain:
                tokens = sum(slot.tokens for slot in chain)
                there = chain[0].cost
                slots.append(_Slot(tokens / (there * row.limit), index, row.limit, tokens, there * row.limit))
            elif not self._whole:
                slots += chain
        slots.sort(key=lambda slot: -slot.survival)  # stable
        return slots

    def _best(self, slots: Sequence[_Slot], num_rows: int, spare: int) -> _Plan:
        """Of all ways to take slots from the front, the one with the most expected tokens per time.

        Where a longer draft takes longer to make, whoever's it is, drafts of every row are also tried shorter.
        """
        deepest = max((slot.length for slot in slots), default=0)
        every, one = self.cost.draft_ns(num_rows, deepest), self.cost.draft_ns(num_rows, 1)
        plans = [self._walk(slots, num_rows, spare)]
        if not self._whole and every > one * DEPTH_MATTERS:
            shorter = [[slot for slot in slots if slot.length <= depth] for depth in DEPTHS if depth < deepest]
            plans += [self._walk(some, num_rows, spare) for some in shorter]
        return max(plans, key=lambda plan: plan.value)

    def _walk(self, slots: Sequence[_Slot], num_rows: int, spare: int) -> _Plan:
        plain_ns = self.cost.verify_ns(num_rows, num_rows)
        best, best_value = 0, 0.0
        tokens, drafted, used, deepest, drafting = float(num_rows), 0.0, 0, 0, 0
        nobody = 1.0  # P(no row's drafter has anything): then the step is a plain one, which may be much cheaper
        lengths: dict[int, int] = {}
        for count, slot in enumerate(slots, start=1):
            before = lengths.get(slot.row, 0)
            used += slot.length - before
            if used > spare:
                break
            if not before:
                drafting += 1
                nobody *= 1.0 - slot.cost / slot.length
            lengths[slot.row] = slot.length
            deepest = max(deepest, slot.length)
            tokens, drafted = tokens + slot.tokens, drafted + slot.cost
            somebody = max(1.0 - nobody, LEAST_SURVIVAL)
            verify_ns = self.cost.verify_ns(num_rows, num_rows + round(drafted / somebody))
            step_ns = plain_ns + somebody * (verify_ns - plain_ns) + self.cost.draft_ns(drafting, deepest)
            if tokens / step_ns > best_value:
                best, best_value = count, tokens / step_ns
        return _Plan(best_value, slots[:best])

    def _longer(self, rows: Sequence[Asking], lengths: Sequence[int], plan: _Plan, spare: int) -> list[int]:
        """What a probe would draft: one token more for every row that may have it; where nothing is drafted, as much as
        came closest to being worth it; a tree that is not drafted, whole."""
        nearest = max((slot.length for slot in plan.slots), default=1)
        target = nearest if not any(lengths) else 1
        longer, left = list(lengths), spare - sum(lengths)
        for index, row in enumerate(rows):
            more = (row.limit if self._whole else min(lengths[index] + target, row.limit)) - lengths[index]
            if 0 < more <= left:
                longer[index] += more
                left -= more
        return longer

    def _prices(
        self, lengths: Sequence[int], longer: Sequence[int], slots: Sequence[_Slot], num_rows: int
    ) -> tuple[float, float]:
        """(what the step takes, what the longer drafts cost beyond what they are expected to bring), ns."""
        now_ns = self._step_ns(lengths, num_rows)
        extra_ns = self._step_ns(longer, num_rows) - now_ns
        tokens, gained = float(num_rows), 0.0
        for slot in slots:
            if slot.length <= lengths[slot.row]:
                tokens += slot.tokens
            elif slot.length <= longer[slot.row]:
                gained += slot.tokens
        return now_ns, max(extra_ns - gained * now_ns / tokens, extra_ns * LEAST_PRICE)

    def _step_ns(self, lengths: Sequence[int], num_rows: int) -> float:
        drafting = sum(length > 0 for length in lengths)
        draft_ns = self.cost.draft_ns(drafting, max(lengths, default=0))
        return self.cost.verify_ns(num_rows, num_rows + sum(lengths)) + draft_ns


def _lengths(plan: _Plan, num_rows: int) -> list[int]:
    lengths = [0] * num_rows
    for slot in plan.slots:
        lengths[slot.row] = slot.length
    return lengths


class _Probe:
    """When drafts are longer than the best, to see whether they still are not worth it."""

    def __init__(self) -> None:
        self.is_running = False
        self._credit_ns = 0.0
        self._since = 0
        self._in_a_row = 0
        self._verdicts = self._right = 0

    def is_due(self, step_ns: float, extra_ns: float) -> bool:
        """Called once per step: one without a probe takes `step_ns`, one with it loses `extra_ns`.

        A probe in which most rows had everything accepted is followed by another at once, on credit: what it found has to
        outweigh what is remembered of many rounds.
        """
        goes_on = self.is_running and 2 * self._right > self._verdicts and self._in_a_row < MOST_IN_A_ROW
        self._in_a_row = self._in_a_row if self.is_running else 0
        self._verdicts = self._right = 0
        self._since += 1
        self._credit_ns = min(self._credit_ns + PROBE_SHARE * step_ns, MOST_CREDIT * max(extra_ns, 1.0))
        has_credit = self._credit_ns >= extra_ns and self._since >= PROBE_EVERY
        self.is_running = has_credit or (goes_on and self._credit_ns >= -MOST_CREDIT * extra_ns)
        if self.is_running:
            self._credit_ns -= extra_ns
            self._since = 0
            self._in_a_row += 1
        return self.is_running

    def hear(self, judged: int, accepted: int) -> None:
        if self.is_running and judged:
            self._verdicts += 1
            self._right += accepted == judged


def _chain(row: int, accepted: Sequence[float], drafted: Sequence[float]) -> list[_Slot]:
    """The slots of one row's chain, as far as they are worth a look."""
    slots: list[_Slot] = []
    survival = there = 1.0
    for length, (is_accepted, is_drafted) in enumerate(zip(accepted, drafted, strict=True), start=1):
        survival *= is_accepted
        there *= is_drafted
        if survival < LEAST_SURVIVAL or there < LEAST_SURVIVAL:
            break
        slots.append(_Slot(survival, row, length, survival * there, there))
    return slots
