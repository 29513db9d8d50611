"""What a step costs besides its tokens, learnt from steps."""

import random

import pytest

from engine.speculation.step_cost import FIRST_GUESS, MOST, PERIOD, StepCost


def measured(fixed: float, each: float, sizes: list[int], noise: float = 0.0, seed: int = 0) -> StepCost:
    """A cost that saw steps of `sizes` tokens whose duration is fixed + each * tokens, with relative noise."""
    generator = random.Random(seed)
    cost = StepCost()
    for size in sizes:
        cost.observe(size, (fixed + each * size) * (1 + noise * generator.uniform(-1, 1)))
    return cost


def spread(count: int = 20 * PERIOD, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice([1, 2, 4, 6]) for _ in range(count)]


@pytest.mark.parametrize(("fixed", "each"), [(20e6, 2e6), (4e6, 4e6), (90e6, 1e6)])
def test_the_ratio_of_fixed_part_and_token_is_found(fixed: float, each: float) -> None:
    assert measured(fixed, each, spread()).fixed_tokens == pytest.approx(fixed / each, rel=0.15)


def test_it_is_found_in_noise() -> None:
    print("seed 1")
    assert measured(20e6, 2e6, spread(), noise=0.2).fixed_tokens == pytest.approx(10, rel=0.4)


def test_steps_of_one_size_say_nothing() -> None:
    for fixed in (0.0, 20e6):
        assert measured(fixed, 2e6, [3] * 1000).fixed_tokens == pytest.approx(FIRST_GUESS)


def test_tokens_that_cost_nothing_are_free_and_a_fixed_part_is_never_negative() -> None:
    assert measured(20e6, 0.0, spread(60 * PERIOD)).fixed_tokens > 60
    assert measured(20e6, -1e6, spread()).fixed_tokens == MOST
    assert measured(-1e6, 4e6, spread()).fixed_tokens == 0.0


def test_a_step_that_was_held_up_counts_little() -> None:
    sizes = spread()
    cost = StepCost()
    for number, size in enumerate(sizes):
        cost.observe(size, 1e12 if number % 300 == 299 else 20e6 + 2e6 * size)
    assert cost.fixed_tokens == pytest.approx(10, rel=0.5)


def test_it_follows_a_machine_that_changes() -> None:
    cost = measured(20e6, 2e6, spread())
    for size in spread(20 * PERIOD):
        cost.observe(size, 4e6 + 2e6 * size)
    assert cost.fixed_tokens == pytest.approx(2, abs=1)


def test_the_newest_steps_have_no_say_yet() -> None:
    """What a drafter drew last may still be drawn again: how long it took must not show in the next lengths."""
    one = measured(20e6, 2e6, spread(4 * PERIOD))
    other = measured(20e6, 2e6, spread(4 * PERIOD))
    for size in [1, 2, 4, 6] * (PERIOD // 4):
        one.observe(size, 20e6 + 2e6 * size)
        other.observe(size, 9e9)
        assert one.fixed_tokens == other.fixed_tokens
    assert one.fixed_tokens != measured(20e6, 2e6, spread(8 * PERIOD)).fixed_tokens


def test_a_clock_that_stands_still_changes_nothing() -> None:
    assert measured(0.0, 0.0, spread()).fixed_tokens == FIRST_GUESS
