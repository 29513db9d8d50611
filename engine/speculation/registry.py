"""The drafters by name. A new drafter is one line of `_FACTORIES`, and the conformance tests find it there.

Owns the table and the start-up checks of its settings. Called once, while an engine is being built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from engine.speculation.ngram import DEFAULT_NUM_DRAFT_TOKENS, NgramSpeculator
from engine.speculation.speculator import NoSpeculator, Speculator

MAX_NUM_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class SpeculationSettings:
    """What a user may say about drafting, whichever drafter reads it."""

    num_draft_tokens: int | None = None  # None: the drafter's own default
    lookup_min: int = 2
    lookup_max: int = 4


def build(name: str, settings: SpeculationSettings, device: torch.device, vocab_size: int) -> Speculator:
    """The named speculator. Raises ValueError with a sentence naming the option that cannot work."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"--speculator {name!r} is not known; known speculators are {', '.join(names())}")
    _check(settings)
    return factory(settings, device, vocab_size)


def names() -> tuple[str, ...]:
    """Every registered name, in the order of the table."""
    return tuple(_FACTORIES)


def _check(settings: SpeculationSettings) -> None:
    num = settings.num_draft_tokens
    if num is not None and not 1 <= num <= MAX_NUM_DRAFT_TOKENS:
        raise ValueError(f"--num-draft-tokens must be between 1 and {MAX_NUM_DRAFT_TOKENS}, got {num}")
    if settings.lookup_min < 1:
        raise ValueError(f"--lookup-min must be at least 1, got {settings.lookup_min}")
    if settings.lookup_max < settings.lookup_min:
        raise ValueError(
            f"--lookup-max ({settings.lookup_max}) must not be smaller than --lookup-min ({settings.lookup_min})"
        )


def _no_speculator(settings: SpeculationSettings, device: torch.device, vocab_size: int) -> Speculator:
    return NoSpeculator(device)


def _ngram(settings: SpeculationSettings, device: torch.device, vocab_size: int) -> Speculator:
    num_draft_tokens = settings.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
    return NgramSpeculator(num_draft_tokens, settings.lookup_min, settings.lookup_max, vocab_size)


_FACTORIES: Mapping[str, Callable[[SpeculationSettings, torch.device, int], Speculator]] = MappingProxyType(
    {
        "none": _no_speculator,
        "ngram": _ngram,
    }
)
