"""The counter-based random numbers: known values, uniformity, independence of purposes, positions and seeds."""

import pytest
import torch

from engine.noise import Purpose, uniforms

_MASK = 2**64 - 1
KNOWN = [0.7347204584623639, 0.3974607487537346, 0.42750516215561674]


def splitmix_uniform(seed: int, position: int, purpose: Purpose) -> float:
    """The same numbers by Python's big integers."""

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    key = mix((seed + gamma * purpose) & _MASK)
    return (mix((key + (position + 1) * gamma) & _MASK) >> 11) * 2.0**-53


@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_equal_big_integer_arithmetic(purpose: Purpose) -> None:
    seeds = [0, 1, 2, 42, 2**31, 2**62 + 12345, 2**63 - 1]
    positions = [0, 1, 7, 8191, 2**31]
    got = uniforms(torch.tensor(seeds)[:, None], torch.tensor(positions), purpose)
    assert got.dtype == torch.float64
    assert got.tolist() == [[splitmix_uniform(seed, at, purpose) for at in positions] for seed in seeds]


def test_numbers_have_known_values() -> None:
    # Seeded answers are promised across releases and machines, so a change of the hash must be seen.
    seed, position = torch.tensor([42]), torch.tensor([7])
    got = [uniforms(seed, position, purpose).item() for purpose in (Purpose.SAMPLE, Purpose.ACCEPT, Purpose.DRAFT)]
    assert got == KNOWN


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count, cells = 200_000, 64
    many, one = torch.arange(count), torch.tensor([5])
    for seeds, positions in ((one, many), (many, one)):
        numbers = uniforms(seeds, positions, Purpose.SAMPLE)
        assert float(numbers.min()) >= 0.0
        assert float(numbers.max()) < 1.0
        expected = count / cells
        chi_square = float(((torch.histc(numbers, cells, 0.0, 1.0) - expected) ** 2 / expected).sum())
        assert chi_square < 120.0  # 63 degrees of freedom: exceeded by chance with p < 1e-4; inputs are fixed


@pytest.mark.parametrize("shift", [1, 2, 64])
def test_neighbouring_numbers_are_uncorrelated(shift: int) -> None:
    count = 100_000
    seeds, positions = torch.tensor([9]), torch.arange(count + shift)
    numbers = uniforms(seeds, positions, Purpose.SAMPLE) - 0.5
    pairs = [
        (numbers[:-shift], numbers[shift:]),
        (numbers, uniforms(seeds, positions, Purpose.ACCEPT) - 0.5),
        (numbers, uniforms(seeds, positions, Purpose.DRAFT) - 0.5),
        (numbers, uniforms(seeds + shift, positions, Purpose.SAMPLE) - 0.5),
    ]
    for left, right in pairs:
        correlation = float((left * right).mean() * 12)
        assert abs(correlation) < 5 / count**0.5  # five standard deviations; inputs are fixed
