"""How often synthetic drafts are accepted: the spelling of --synthetic-acceptance and what it means. Without torch.

Owns the rates; never draws. Read by engine.config (spelling), engine.assembly (what every frontend is told) and the
recipe of the synthetic drafter. W = max_draft_len.
"""

import math
from dataclasses import dataclass

DEFAULT_NUM_DRAFT_TOKENS = 5
DEFAULT_TOKEN_RATE = 0.7  # given that the tokens before it were accepted, as a simulated engine has it


@dataclass(frozen=True)
class SyntheticRates:
    """`by_position[i]`: the share of drafts of more than i tokens in which token i is accepted. Never rises."""

    by_position: tuple[float, ...]  # W entries in [0, 1]

    @property
    def mean_accepted(self) -> float:
        """Draft tokens accepted of a draft of W tokens, on average."""
        return math.fsum(self.by_position)

    def __str__(self) -> str:
        return ",".join(f"{rate:.6g}" for rate in self.by_position)


def parse_synthetic_rates(text: str | None, num_draft_tokens: int | None) -> SyntheticRates:
    """Read rates by position ("0.8,0.6,0.4") or one mean number of accepted draft tokens ("2.4").

    A mean is met with the least variance: as many tokens as it has whole ones always, one more with the probability that
    is left. None: every token is accepted at `DEFAULT_TOKEN_RATE` while those before it are. Raises ValueError with a
    sentence naming the option. Source of both forms: vLLM's synthetic acceptance; its mean counts the bonus token too.
    """
    if text is None:
        count = num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
        return SyntheticRates(tuple(DEFAULT_TOKEN_RATE ** (position + 1) for position in range(count)))
    numbers = [_number(entry) for entry in text.split(",")]
    if len(numbers) == 1:
        return _of_mean(numbers[0], num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS)
    return _of_positions(numbers, num_draft_tokens)


def _number(entry: str) -> float:
    try:
        number = float(entry)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"--synthetic-acceptance: {entry!r:.40} is no rate and no mean, as in 0.8,0.6,0.4 or 2.4")
    return number


def _of_mean(mean: float, count: int) -> SyntheticRates:
    if mean > count:
        raise ValueError(
            f"--synthetic-acceptance {mean:g} accepts more than the {count} draft tokens of a round (--num-draft-tokens)"
        )
    return SyntheticRates(tuple(min(1.0, max(0.0, mean - position)) for position in range(count)))


def _of_positions(rates: list[float], num_draft_tokens: int | None) -> SyntheticRates:
    if num_draft_tokens is not None and num_draft_tokens != len(rates):
        raise ValueError(
            f"--synthetic-acceptance has rates for {len(rates)} draft tokens; --num-draft-tokens says {num_draft_tokens}"
        )
    before = 1.0
    for rate in rates:
        if rate > before:
            raise ValueError(
                f"--synthetic-acceptance: rates are at most 1 and never rise, for a token is accepted only behind those "
                f"before it; {rate:g} does not fit"
            )
        before = rate
    return SyntheticRates(tuple(rates))
