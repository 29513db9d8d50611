"""Rotary position embedding: the frequencies of each scaling rule, and the rotation.

Owns the formulas; never reads files. Called by `engine.model.arch` (types), `engine.model.weights` and
`engine.model.decoder`. T = tokens, D = head dimension.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between. Source: Llama 3.1's reference code."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True)
class YarnScaling:
    """Source: arXiv 2309.00071. `attention_factor` multiplies cos and sin; `truncate` rounds the ramp's ends outwards."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_context_length: int
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | None


@dataclass(frozen=True)
class RopeConfig:
    base: float
    scaling: RopeScaling


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [D / 2] on the CPU: radians per position of each rotated pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (config.base**exponents)
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, config.scaling)
        case YarnScaling():
            return _yarn(config.base, exponents, config.scaling)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    return config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, D] by cos and sin [T, 1, D / 2]: element i pairs with i + D / 2 (the halves convention)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    low_wavelength = scaling.original_context_length / scaling.low_freq_factor
    high_wavelength = scaling.original_context_length / scaling.high_freq_factor
    scaled = torch.where(wavelengths > low_wavelength, plain / scaling.factor, plain)
    smooth = scaling.original_context_length / wavelengths - scaling.low_freq_factor
    smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(is_between, blended, scaled)


def _yarn(base: float, exponents: torch.Tensor, scaling: YarnScaling) -> torch.Tensor:
    num_pairs = exponents.numel()
    head_dim = 2 * num_pairs

    def correction_dim(num_rotations: float) -> float:
        turns = scaling.original_context_length / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(base))

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the reference's guard against a division by zero
    ramp = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = base**exponents
    interpolated, extrapolated = 1.0 / (scaling.factor * frequencies), 1.0 / frequencies
    return interpolated * ramp + extrapolated * (1 - ramp)
