"""Random numbers as a function of (seed, position, purpose): no generator, no state, the same on every device.

Owns the hash. Never knows what a number is for beyond its purpose. Called by accept and by drafters that sample.
Source: splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), used as a
counter-based generator: one round keys the seed with the purpose, one round mixes in the position.
"""

from enum import IntEnum

import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB
_MANTISSA_BITS = 53


class Purpose(IntEnum):
    """What a number decides. Two purposes never share a number, or a draft would choose its own verdict."""

    SAMPLE = 1  # the target's token at this position
    ACCEPT = 2  # whether a draft token drawn from probabilities stays
    DRAFT = 3  # the draft token itself
    NOISE = 4  # the token fed in place of one that nobody knows yet (UNO)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, of the broadcast shape of `seeds` and `positions` (int64).

    `positions` are indices of the token in the whole sequence, prompt included. Multiples of 2**-53.
    """
    key = _mix(seeds + _signed(_GOLDEN_GAMMA * int(purpose)))
    bits = _mix(key + (positions + 1) * _signed(_GOLDEN_GAMMA))
    return _shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) * 2.0**-_MANTISSA_BITS


def lanes(numbers: torch.Tensor, count: int, salt: int) -> torch.Tensor:
    """Float64 [n, count] in (0, 1): numbers of their own for `count` competitors, from one uniform number [n] per row.

    `numbers` as `uniforms` gives them; `salt` >= 1 tells uses of the same number apart.
    """
    key = _mix((numbers * 2.0**_MANTISSA_BITS).to(torch.int64) + _signed(_FIRST_MULTIPLIER * salt))
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=numbers.device) * _signed(_GOLDEN_GAMMA)
    bits = _mix(key[:, None] + steps)
    return (_shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) + 0.5) * 2.0**-_MANTISSA_BITS


def _mix(state: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser on int64 read as unsigned 64-bit; products wrap."""
    state = (state ^ _shift_right(state, 30)) * _signed(_FIRST_MULTIPLIER)
    state = (state ^ _shift_right(state, 27)) * _signed(_SECOND_MULTIPLIER)
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign, so the copies are masked off."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits as `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
