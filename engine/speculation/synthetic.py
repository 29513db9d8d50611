"""Synthetic acceptance: drafts whose fate is drawn instead of judged, to measure an engine without a drafter's weights.

Owns the draw, and the tokens that stand in for a drafter's. What comes out is NOT the target's text: every place that
shows it says so (docs/decisions, 9). The rest is real: drafts of these lengths are verified in full, with their keys and
their place in the batch. Built by the registry.

Source: the synthetic acceptance of vLLM and SGLang, by description. As in vLLM an accepted token is the draft's own and
the last one the target's.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.noise import Purpose, uniforms
from engine.speculation.draft import Draft, host_draft
from engine.speculation.names import SYNTHETIC
from engine.speculation.recipe import Ready, Recipe, SpeculationSettings, TargetFacts
from engine.speculation.speculator import Capabilities, DraftRow, SequenceStart, Speculator
from engine.speculation.synthetic_rates import SyntheticRates, parse_synthetic_rates
from protocol.model_files import read_eos_token_ids

logger = logging.getLogger(__name__)

# What a request forbids is forbidden to a token that nobody judges too. Only tokens it allows are drafted, and none that
# ends a sequence, on which min_tokens depends; what depends on the tokens before, or on a weight, is decoded plainly.
UNSUPPORTED_SAMPLING = frozenset({"bad_words", "logit_bias"})
_KEY_BITS = 63


def prepare_synthetic(settings: SpeculationSettings, facts: TargetFacts) -> Recipe:
    """Raises ValueError for rates that cannot be. Warns: whoever starts this must not take its text for the model's."""
    rates = parse_synthetic_rates(settings.synthetic_acceptance, settings.num_draft_tokens)
    eos_token_ids = () if facts.files is None else read_eos_token_ids(facts.files)
    logger.warning(
        "synthetic acceptance: drafts are accepted whatever the model says, so the text is NOT the model's and no output "
        "of this engine is worth reading; for measuring speed only rates=%s mean_accepted=%.6g",
        rates, rates.mean_accepted,
    )  # fmt: skip
    return Ready(SyntheticSpeculator(rates, facts.vocab_size, frozenset(eos_token_ids)))


class SyntheticSpeculator(Speculator):
    """Drafts a row's own prompt again and again, which is text as good as any and inside the vocabulary."""

    def __init__(self, rates: SyntheticRates, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.capabilities = Capabilities(
            max_draft_len=len(rates.by_position),
            sources=(SYNTHETIC,),
            drafts_on_host=True,
            unsupported_sampling=UNSUPPORTED_SAMPLING,
            synthetic=str(rates),
        )
        self._rates = torch.tensor(rates.by_position, dtype=torch.float64)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._keys: dict[int, int] = {}  # row -> what tells its draws from those of other prompts with the same seed

    def begin(self, start: SequenceStart) -> None:
        # Benchmarks give every request the same seed; their fates must not be one. Whole numbers hash alike everywhere.
        self._keys[start.row] = hash(tuple(start.token_ids[: start.num_prompt_tokens]))

    def end(self, row: int) -> None:
        self._keys.pop(row, None)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = self.capabilities.max_draft_len
        draft = host_draft([self._tokens(row, min(row.budget, width)) for row in rows], width)
        return replace(draft, accepted=torch.minimum(self._wanted(rows), draft.lengths))

    def _wanted(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        """Int32 [B]: tokens accepted of a draft of W.

        One number decides the whole round: token i is accepted when it is below the i-th rate. As rates never rise,
        accepted tokens are a beginning of the draft, and each rate holds exactly.
        """
        keys = [(row.seed ^ self._keys.get(row.row, 0)) & (2**_KEY_BITS - 1) for row in rows]
        positions = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64)
        numbers = uniforms(torch.tensor(keys, dtype=torch.int64), positions, Purpose.ACCEPT)
        return (numbers[:, None] < self._rates).sum(dim=1, dtype=torch.int32)

    def _tokens(self, row: DraftRow, count: int) -> list[int]:
        """`count` tokens that may be drafted, from where the answer so far ends if it were the prompt over and over."""
        ends = self._eos_token_ids.union(row.sampling.stop_token_ids)
        allowed = row.sampling.allowed_token_ids or range(self._vocab_size)
        length, start = row.num_prompt_tokens, len(row.token_ids) - row.num_prompt_tokens
        tokens: list[int] = []
        for offset in range(length + count):
            if len(tokens) == count:
                break
            token_id = row.token_ids[(start + offset) % length]
            if token_id in allowed and token_id not in ends:
                tokens.append(token_id)
        missing = count - len(tokens)
        if not missing:
            return tokens
        other = next((token_id for token_id in allowed if token_id not in ends), None)
        return tokens if other is None else tokens + [other] * missing
