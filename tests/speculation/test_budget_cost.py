"""What a step is believed to cost: tables measured at the start, and what steps that ran say about them."""

import random

import pytest

from engine.speculation.step_cost import CLIP, PERIOD, CostTable, StartUpCosts, StepCost, measured_table, straight

MS = 1e6
TABLE = measured_table({(1, 1): 10, (1, 4): 16, (4, 1): 20, (4, 4): 56})


def learnt(start_up: StartUpCosts | None, fixed: float, each: float, noise: float = 0.0, count: int = 20) -> StepCost:
    """Costs that heard of steps of 1 to 6 tokens whose duration is fixed + each * tokens."""
    generator, cost = random.Random(1), StepCost(start_up)
    for _ in range(count * PERIOD):
        size = generator.choice([1, 2, 4, 6])
        cost.observe(1, size, (fixed + each * size) * (1 + noise * generator.uniform(-1, 1)))
    return cost


def costs_of(fixed: float, each: float) -> StartUpCosts:
    return StartUpCosts(straight(fixed, each), straight(MS, 0.0))


# ---- tables ----


def test_measured_sizes_cost_what_was_measured() -> None:
    assert [TABLE.at(1, 1), TABLE.at(1, 4), TABLE.at(4, 4), TABLE.at(4, 16)] == [10, 16, 20, 56]


def test_between_sizes_it_is_a_straight_line_and_beyond_them_it_goes_on() -> None:
    assert TABLE.at(1, 2) == pytest.approx(12)
    assert TABLE.at(1, 7) == pytest.approx(22)
    assert TABLE.at(2, 2) == pytest.approx(10 + 10 / 3)  # between the lines, one token each
    assert TABLE.at(7, 7) == pytest.approx(30)
    assert TABLE.at(4, 28) == pytest.approx(92)


def test_a_table_never_says_that_more_costs_less() -> None:
    disturbed = measured_table({(1, 1): 30, (1, 2): 20, (1, 4): 40, (4, 1): 25, (4, 2): 35})
    for rows in range(1, 9):
        values = [disturbed.at(rows, tokens) for tokens in range(rows, 8 * rows)]
        assert values == sorted(values)
    assert disturbed.at(1, 2) == 30 and disturbed.at(4, 4) == 30


def test_a_table_of_one_line_goes_by_slots_alone() -> None:
    assert straight(10, 2).at(8, 8) == straight(10, 2).at(1, 8) == pytest.approx(26)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measurement"):
        measured_table({})


# ---- correction ----


def test_before_steps_ran_the_table_is_believed() -> None:
    cost = StepCost(StartUpCosts(TABLE, measured_table({(1, 1): 3, (1, 5): 7})))
    assert (cost.verify_ns(4, 16), cost.draft_ns(1, 5), cost.draft_ns(0, 0)) == (56, 7, 0)


@pytest.mark.parametrize("start_up", [None, costs_of(80 * MS, 8 * MS), costs_of(2 * MS, 9 * MS)])
def test_steps_correct_what_was_believed(start_up: StartUpCosts | None) -> None:
    """A table of another ratio, of another machine, or none: what counts is what a draft token adds."""
    cost = learnt(start_up, 20 * MS, 2 * MS, noise=0.1)
    assert cost.verify_ns(1, 1) == pytest.approx(22 * MS, rel=0.1)
    assert cost.verify_ns(1, 6) / cost.verify_ns(1, 1) == pytest.approx(32 / 22, rel=0.15)


def test_steps_of_one_size_change_the_scale_and_not_the_shape() -> None:
    cost = StepCost(costs_of(20 * MS, 2 * MS))
    for _ in range(10 * PERIOD):
        cost.observe(1, 3, 2 * 26 * MS)
    assert cost.verify_ns(1, 3) == pytest.approx(52 * MS)
    assert cost.verify_ns(1, 6) / cost.verify_ns(1, 1) == pytest.approx(32 / 22)


def test_more_tokens_never_cost_less_whatever_the_clock_says() -> None:
    cost = learnt(None, 20 * MS, -1 * MS)
    assert 0 < cost.verify_ns(1, 1) <= cost.verify_ns(1, 6)


def test_a_step_that_was_held_up_counts_little() -> None:
    cost = StepCost(costs_of(20 * MS, 2 * MS))
    for number in range(4 * PERIOD):
        cost.observe(1, 2, 1e15 if number % 100 == 99 else 24 * MS)
    assert cost.verify_ns(1, 2) < 24 * MS * (1 + CLIP / 50)


def test_drafting_is_corrected_too() -> None:
    cost = StepCost(costs_of(20 * MS, 2 * MS))
    for _ in range(3 * PERIOD):
        cost.observe_draft(4, 5, 4 * MS)
        cost.observe(4, 24, 68 * MS)
    assert cost.draft_ns(4, 5) == pytest.approx(4 * MS)


def test_the_newest_steps_have_no_say_yet() -> None:
    """What a drafter drew last may still be drawn again: how long it took must not show in the next lengths."""
    one, other = learnt(None, 20 * MS, 2 * MS, count=4), learnt(None, 20 * MS, 2 * MS, count=4)
    for size in [1, 2, 4, 6] * (PERIOD // 4):
        one.observe(1, size, (20 + 2 * size) * MS)
        other.observe(1, size, 9e9)
        assert one.verify_ns(1, 6) == other.verify_ns(1, 6)
    for size in [1, 2, 4, 6] * (PERIOD // 4):
        one.observe(1, size, (20 + 2 * size) * MS)
        other.observe(1, size, 9e9)
    assert one.verify_ns(1, 6) != other.verify_ns(1, 6)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    start_up = StartUpCosts(CostTable((1,), (((1.0, 5.0), (2.0, 7.0)),)), straight(1.0, 0.0))
    assert learnt(start_up, 0.0, 0.0).verify_ns(1, 2) == 7.0
