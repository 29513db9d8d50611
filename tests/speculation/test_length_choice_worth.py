"""What the engine's draft lengths are worth: never 5 % slower than no drafts, nor than the best fixed length known afterwards.

Over cost tables of several machines and drafters, acceptance of several texts, and 1, 4 and 16 streams, in modelled time:
nothing is measured, so the numbers are the same everywhere.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from engine.speculation.step_cost import StartUpCosts, measured_table
from tests.speculation.simulated_rounds import WIDTH, Adaptive, Costs, Place, Policy, World, lookup, steady

MS = 1e6
NUM_TOKENS = {1: 1500, 4: 1500, 16: 2400}
MIDDLING = [0.7, 0.65, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3]
MACHINES: Mapping[str, Costs] = {
    "a CPU, drafts looked up": Costs(lambda rows, tokens: (117 + 17.7 * tokens) * MS, lambda rows, depth: 3e4 * rows),
    "a GPU, drafted token by token": Costs(
        lambda rows, tokens: (8 + 0.005 * tokens + 0.05 * max(0, tokens - 64)) * MS,
        lambda rows, depth: 0.8 * depth * MS,
    ),
    "cheap single tokens, drafted in one pass": Costs(
        lambda rows, tokens: (30 if tokens == 1 else 55 + 2.5 * tokens) * MS, lambda rows, depth: (4 + 0.2 * rows) * MS
    ),
}
TEXTS: Mapping[str, Callable[[random.Random, int], list[Place]]] = {
    "nearly always right": lambda generator, number: steady(generator, [0.9] * WIDTH),
    "middling": lambda generator, number: steady(generator, MIDDLING),
    "never right": lambda generator, number: steady(generator, [0.0] * WIDTH),
    "copied in runs": lambda generator, number: lookup(generator, 0.1, 0.3),
    "good and bad in turn": lambda generator, number: steady(generator, [0.9 if number % 2 else 0.1] * WIDTH),
    "bad, then good": lambda generator, number: steady(generator, [0.85 if number >= 16 else 0.05] * WIDTH),
}


def texts_of(name: str) -> list[list[Place]]:
    generator = random.Random(1)
    return [TEXTS[name](generator, number) for number in range(32)]


def profile(costs: Costs, wrong: float = 1.0) -> StartUpCosts:
    """What a start-up profile would have measured; `wrong`: how many times dearer drafted tokens looked."""
    sizes = [(rows, each) for rows in (1, 4, 16) for each in (1, 2, 4, WIDTH + 1)]
    return StartUpCosts(
        measured_table({(r, n): costs.verify(r, r * n) * (wrong if n > 1 else 1.0) for r, n in sizes}),
        measured_table({(r, n): costs.draft(r, n) for r in (1, 4, 16) for n in (1, WIDTH)}),
    )


def share(texts: Sequence[Sequence[Place]], streams: int, costs: Costs, start_up: StartUpCosts | None) -> float:
    """Throughput with the engine's lengths, as a share of that with the best fixed length, none included."""
    world = World(texts, streams, costs, NUM_TOKENS[streams])
    fixed = {length: world.tokens_per_s(Policy(length)) for length in (0, 1, 2, 3, 5, WIDTH)}
    adaptive = world.tokens_per_s(Adaptive(start_up))
    print(streams, {length: round(rate / fixed[0], 2) for length, rate in fixed.items()}, round(adaptive / fixed[0], 2))
    return adaptive / max(fixed.values())


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_length_is_5_percent_faster(machine: str, texts: str) -> None:
    costs, written = MACHINES[machine], texts_of(texts)
    for streams in (1, 4, 16):
        assert share(written, streams, costs, profile(costs)) >= 0.95, f"{streams} streams"


def test_where_texts_differ_no_fixed_length_is_as_fast() -> None:
    costs = MACHINES["a CPU, drafts looked up"]
    assert share(texts_of("good and bad in turn"), 4, costs, profile(costs)) > 1.1


@pytest.mark.parametrize("wrong", [0.3, 1.5])
def test_a_profile_that_was_disturbed_is_put_right_by_steps(wrong: float) -> None:
    costs = MACHINES["a GPU, drafted token by token"]
    assert share(texts_of("middling"), 4, costs, profile(costs, wrong)) >= 0.9


def test_without_a_profile_steps_alone_teach_it() -> None:
    costs = MACHINES["a CPU, drafts looked up"]
    assert share(texts_of("never right"), 4, costs, None) >= 0.95
