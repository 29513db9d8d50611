"""How many tokens a row may draft: one pure policy for every drafter. Without torch.

Owns the limits of one row, not the drafting. Called by engine.draft_lengths; a drafter never decides its own budget.
"""

from dataclasses import dataclass

from protocol.sampling import SamplingParams

_DEFAULTS = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class DraftLimits:
    """What does not change from step to step."""

    max_draft_len: int  # W
    max_model_len: int
    unsupported_sampling: frozenset[str]  # SamplingParams fields with which a row runs at k = 0


def draft_budget(
    limits: DraftLimits, sampling: SamplingParams, num_tokens: int, num_prompt_tokens: int, room: int
) -> int:
    """Most draft tokens for one row this step; 0 is plain decoding.

    `num_tokens`: the committed history, the root included. `room`: tokens the step's batch has left behind the root.
    A draft of k ends in k + 1 tokens at most, so neither max_tokens nor the model's length is ever overrun.
    """
    remaining = sampling.max_tokens - (num_tokens - num_prompt_tokens)
    length_left = limits.max_model_len - num_tokens
    budget = min(limits.max_draft_len, remaining - 1, length_left - 1, room)
    if budget <= 0 or uses_any(sampling, limits.unsupported_sampling):
        return 0
    return budget


def uses_any(sampling: SamplingParams, fields: frozenset[str]) -> bool:
    """Whether the request sets one of `fields` to something other than its default. Raises AttributeError if unknown."""
    return any(getattr(sampling, field) != getattr(_DEFAULTS, field) for field in fields)
