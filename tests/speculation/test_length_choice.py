"""Which draft lengths are chosen for the rows of a step, and when longer ones are tried."""

import itertools
import random

import pytest

from engine.speculation.acceptance_memory import DraftMemory
from engine.speculation.length_choice import ADVANTAGE, PROBE_SHARE, Asking, LengthChoice
from engine.speculation.step_cost import StartUpCosts, straight

W = 5
MS = 1e6


def choice(fixed: float, each: float = 1.0, draft: float = 0.0, whole: bool = False) -> LengthChoice:
    return LengthChoice(W, whole, StartUpCosts(straight(fixed * MS, each * MS), straight(draft * MS, 0.0)))


def memory_of(*rates: float, rounds: int = 60) -> DraftMemory:
    """A row whose position i was right with probability rates[i], the same share of every stretch of rounds."""
    memory, generator = DraftMemory(W), random.Random(7)
    for _ in range(rounds):
        accepted = 0
        while accepted < len(rates) and generator.random() < rates[accepted]:
            accepted += 1
        memory.acceptance.hear(W, min(accepted + 1, W), accepted)
    return memory


def lengths(chooser: LengthChoice, *memories: DraftMemory, spare: int = 1000, limit: int = W) -> list[int]:
    return chooser.choose([Asking(memory, limit) for memory in memories], len(memories), spare)


def expected(chooser: LengthChoice, memories: list[DraftMemory], chosen: tuple[int, ...]) -> float:
    """Tokens per ns of a step with these lengths, spelled out."""
    tokens = float(len(memories))
    for memory, length in zip(memories, chosen, strict=True):
        survival = 1.0
        for rate in memory.acceptance.accepted([0.7] * W)[:length]:
            survival *= rate
            tokens += survival
    cost = chooser.cost.verify_ns(len(memories), len(memories) + sum(chosen))
    return tokens / (cost + chooser.cost.draft_ns(sum(length > 0 for length in chosen), max(chosen)))


@pytest.mark.parametrize("fixed", [0.5, 4.0, 30.0])
def test_no_other_lengths_of_the_step_promise_more(fixed: float) -> None:
    """All 216 ways to give three rows 0 to 5 tokens; drafters that always draft, so that nothing is approximated."""
    memories = [memory_of(0.9, 0.9, 0.8, 0.8, 0.8), memory_of(0.3, 0.2), memory_of(0.7, 0.5, 0.5)]
    chooser = choice(fixed, draft=1.0)
    best = max(itertools.product(range(W + 1), repeat=3), key=lambda some: expected(chooser, memories, some))
    assert tuple(lengths(chooser, *memories)) == best


def test_the_cheaper_a_token_the_longer_the_draft() -> None:
    totals = [sum(lengths(choice(fixed), memory_of(0.6, 0.6, 0.6, 0.6, 0.6))) for fixed in (0.0, 2.0, 8.0, 500.0)]
    assert totals == sorted(totals) and (totals[0], totals[-1]) == (0, W)


def test_what_drafting_takes_is_part_of_the_price() -> None:
    row = memory_of(0.5, 0.3)
    assert lengths(choice(10.0, draft=0.0), row)[0] > 0
    assert lengths(choice(10.0, draft=20.0), row) == [0]


def test_rows_share_what_the_step_costs_anyway() -> None:
    rows = [memory_of(0.4, 0.3) for _ in range(16)]
    assert sum(lengths(choice(5.0), rows[0])) > 0
    assert sum(lengths(choice(5.0), *rows)) == 0


def test_the_likeliest_get_what_there_is() -> None:
    good, bad = memory_of(0.95, 0.95, 0.95, 0.95, 0.95), memory_of(0.4, 0.4)
    assert lengths(choice(1000.0), bad, good, spare=W) == [0, W]


@pytest.mark.parametrize("whole", [False, True])
def test_no_choice_and_no_probe_exceeds_a_limit(whole: bool) -> None:
    generator, chooser = random.Random(2), choice(3.0, whole=whole)
    memories = [DraftMemory(W) for _ in range(4)]
    for _ in range(300):
        limits = [generator.randint(1, W) for _ in memories]
        spare = generator.randint(0, 12)
        rows = [Asking(memory, limit) for memory, limit in zip(memories, limits, strict=True)]
        chosen = chooser.choose(rows, 6, spare)
        assert sum(chosen) <= spare
        for row, length in zip(rows, chosen, strict=True):
            assert length in ((0, row.limit) if whole else range(row.limit + 1))
            row.memory.allowed = length
            if length:
                accepted = generator.randint(0, length)
                chooser.hear(row.memory, min(length, accepted + 1), accepted)


def test_rows_that_cannot_draft_are_part_of_the_step() -> None:
    row = memory_of(0.4, 0.3)
    chooser = choice(5.0)
    assert chooser.choose([Asking(row, W)], 1, 1000)[0] > 0
    assert choice(5.0).choose([Asking(row, W)], 60, 1000) == [0]


def played(chooser: LengthChoice, memory: DraftMemory, count: int, is_right: bool) -> list[int]:
    """Lengths of `count` rounds in which every draft is right, or every draft is wrong."""
    chosen = []
    for _ in range(count):
        (length,) = lengths(chooser, memory)
        chosen.append(length)
        memory.allowed = length
        if length:
            chooser.hear(memory, length if is_right else 1, length if is_right else 0)
    return chosen


def test_drafts_that_are_never_right_end_and_probes_take_their_share_of_the_time() -> None:
    chooser, memory = choice(9.0), DraftMemory(W)
    played(chooser, memory, 300, is_right=False)
    late = played(chooser, memory, 1000, is_right=False)
    assert 0 < sum(late) * 1.0 <= 1.1 * PROBE_SHARE * (1000 * 10.0)


def test_drafts_come_back_when_they_are_right_again() -> None:
    chooser, memory = choice(9.0), DraftMemory(W)
    played(chooser, memory, 400, is_right=False)
    assert played(chooser, memory, 60, is_right=True)[-5:] == [W] * 5


def test_drafting_ends_and_begins_only_for_a_clear_advantage() -> None:
    """The same beliefs keep whichever state there is: drafts that promise as much as none at all."""
    row = memory_of(0.5, 0.0)
    rate = row.acceptance.accepted([0.7] * W)[0]
    fixed = 1.0 / rate - 1.0  # one token: (1 + rate) / (fixed + 2) = 1 / (fixed + 1)
    drafting, silent = choice(fixed), choice(fixed)
    drafting._is_drafting, silent._is_drafting = True, False
    assert lengths(drafting, row) == [1] and lengths(silent, row) == [0]
    clear = choice(fixed * ADVANTAGE**3)
    clear._is_drafting = False
    assert lengths(clear, memory_of(0.9, 0.0))[0] >= 1


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    good, bad = memory_of(0.9, 0.9, 0.9, 0.9, 0.9), memory_of(0.0)
    assert lengths(choice(50.0, whole=True), good, bad) == [W, 0]
