"""What is remembered of acceptance, and which draft length follows from it."""

import itertools
import random

import pytest

from engine.speculation.acceptance_memory import (
    ADVANTAGE,
    PROBE_EVERY,
    ROW_DECAY,
    Acceptance,
    DraftMemory,
    best_length,
)

W = 5
EVEN = [0.5] * W


def value(rates: list[float], fixed: float, length: int) -> float:
    """Expected tokens per cost of a round with `length` draft tokens, spelled out."""
    expected = 1 + sum(prod(rates[:count]) for count in range(1, length + 1))
    return expected / (fixed + 1 + length)


def prod(values: list[float]) -> float:
    result = 1.0
    for one in values:
        result *= one
    return result


def heard(memory: Acceptance, *rounds: tuple[int, int]) -> Acceptance:
    for judged, accepted in rounds:
        memory.hear(judged, accepted)
    return memory


# ---- acceptance ----


def test_without_rounds_a_position_is_believed_to_be_as_everybodys() -> None:
    beliefs = [0.9, 0.8, 0.7, 0.6, 0.5]
    assert Acceptance(W, ROW_DECAY).rates(beliefs) == pytest.approx(beliefs)


def test_a_position_behind_the_first_rejection_learns_nothing() -> None:
    rates = heard(Acceptance(W, ROW_DECAY), (2, 1)).rates(EVEN)
    assert rates[0] > 0.5 > rates[1]
    assert rates[2:] == EVEN[2:]


def test_many_rounds_outweigh_what_is_believed() -> None:
    assert heard(Acceptance(W, ROW_DECAY), *[(1, 0)] * 50).rates(EVEN)[0] < 0.1
    assert heard(Acceptance(W, ROW_DECAY), *[(5, 5)] * 50).rates(EVEN)[4] > 0.9


def test_a_position_that_is_not_tried_is_forgotten_as_fast_as_the_others_learn() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), *[(2, 1)] * 50)
    before = memory.rates(EVEN)[1]
    heard(memory, *[(1, 1)] * 40)
    assert before < 0.1
    assert memory.rates(EVEN)[1] == pytest.approx(0.5, abs=0.05)


# ---- the length ----


@pytest.mark.parametrize("fixed", [0.0, 0.5, 4.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_length_has_the_most_expected_tokens_per_cost(fixed: float, seed: int) -> None:
    generator = random.Random(seed)
    rates = [generator.random() for _ in range(W)]
    chosen = best_length(rates, fixed, W, whole=False, current=None)
    assert value(rates, fixed, chosen) == max(value(rates, fixed, length) for length in range(W + 1))


def test_the_cheaper_a_token_the_longer_the_draft() -> None:
    lengths = [best_length([0.6] * W, fixed, W, whole=False, current=None) for fixed in (0.0, 0.5, 2.0, 8.0, 500.0)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, W)


def test_nothing_accepted_means_no_draft() -> None:
    assert best_length([0.0] * W, 16.0, W, whole=False, current=3) == 0
    assert best_length([0.0] * W, 1000.0, W, whole=False, current=None) == 0


def test_a_length_stays_until_another_is_clearly_better() -> None:
    """Whatever the rates are: a change promises at least 3 % more, and what promises that is taken."""
    generator = random.Random(3)
    stayed = moved = 0
    for _ in range(500):
        rates, fixed = [generator.random() for _ in range(W)], generator.random() * 6
        current = generator.randint(0, W)
        chosen = best_length(rates, fixed, W, whole=False, current=current)
        best = max(value(rates, fixed, length) for length in range(W + 1))
        if best > value(rates, fixed, current) * ADVANTAGE:
            assert value(rates, fixed, chosen) == best
            moved += 1
        else:
            assert chosen == current
            stayed += best > value(rates, fixed, current)
    assert stayed > 20 and moved > 20


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    for rate, fixed, current in itertools.product((0.1, 0.4, 0.9), (0.1, 2.0, 50.0), (None, 0, 3, W)):
        assert best_length([rate] * W, fixed, W, whole=True, current=current) in (0, W)
    assert best_length([0.9] * W, 50.0, W, whole=True, current=0) == W
    assert best_length([0.1] * W, 0.1, W, whole=True, current=W) == 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_choice_and_no_probe_exceeds_the_limit(limit: int, whole: bool) -> None:
    generator = random.Random(limit)
    memory = DraftMemory(W)
    for _ in range(600):
        most = generator.randint(1, limit)
        length = memory.choose(EVEN, generator.random() * 10, most, whole)
        assert 0 <= length <= most
        if length:
            accepted = generator.randint(0, length)
            memory.hear(min(length, accepted + 1), accepted)


# ---- probes ----


def lengths_while(memory: DraftMemory, count: int, is_right: bool, fixed: float = 2.0) -> list[int]:
    """Draft lengths of `count` rounds in which every draft is right, or every draft is wrong."""
    lengths = []
    for _ in range(count):
        length = memory.choose(EVEN, fixed, W, whole=False)
        lengths.append(length)
        if length:
            memory.hear(length if is_right else 1, length if is_right else 0)
    return lengths


def test_drafts_that_are_never_accepted_end_and_are_probed_now_and_then() -> None:
    memory = DraftMemory(W)
    lengths_while(memory, 100, is_right=False)
    lengths = lengths_while(memory, PROBE_EVERY * 10, is_right=False)
    assert set(lengths) == {0, 1}
    assert 9 <= lengths.count(1) <= 10


def test_one_probe_that_is_right_is_followed_by_another_until_drafts_are_back() -> None:
    memory = DraftMemory(W)
    lengths_while(memory, 200, is_right=False)
    lengths = lengths_while(memory, PROBE_EVERY + 30, is_right=True)
    assert lengths[-1] >= W - 1
    first = next(index for index, length in enumerate(lengths) if length)
    assert all(length > 0 for length in lengths[first:])


def test_a_short_draft_is_probed_too() -> None:
    """A row that drafts one token hears of the second by probing: it may have become good."""
    memory = DraftMemory(W)
    beliefs = [0.95, 0.0, 0.0, 0.0, 0.0]
    lengths = []
    for _ in range(PROBE_EVERY * 4):
        length = memory.choose(beliefs, 0.5, W, whole=False)
        lengths.append(length)
        memory.hear(min(length, 2), 1)
    assert set(lengths) == {1, 2} and 2 <= lengths.count(2) <= 4


def test_a_probe_for_which_the_drafter_had_nothing_stays_due() -> None:
    memory = DraftMemory(W)
    lengths_while(memory, 200, is_right=False)
    lengths = [memory.choose(EVEN, 2.0, W, whole=False) for _ in range(PROBE_EVERY + 5)]  # nothing is ever judged
    assert lengths[-3:] == [1, 1, 1]
    memory.hear(1, 0)
    assert memory.choose(EVEN, 2.0, W, whole=False) == 0
