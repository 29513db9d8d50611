"""Equality up to rounding: two answers may part only where the model itself could not tell the two tokens apart.

Owns the rule for devices and number formats whose sums depend on how much is computed together. Used where exact
equality cannot be asked for; needs nothing that only tests install.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.noise import Purpose, uniforms
from engine.race import WIDTH, Heat, in_blocks, scores
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.inprocess import Answer, Logits
from tests.lossless import SEED_RANGE, assert_close_logprobs, first_difference
from tests.speculation.reference import reference_logits, reference_probs


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may carry, for logits whose spread is about 3."""

    logits: float  # between the best token and another that a greedy row may take instead
    logprobs: float


FP32 = Tolerance(logits=1e-3, logprobs=1e-3)
BF16 = Tolerance(logits=0.5, logprobs=0.5)


class NearTies:
    """A comparison for `tests.lossless.check` that counts the answers that parted, all of them at a near tie."""

    def __init__(self, logits: Logits, eos_token_ids: Sequence[int], tolerance: Tolerance) -> None:
        self.num_compared = 0
        self.num_parted = 0
        self._logits, self._eos, self._tolerance = logits, eos_token_ids, tolerance

    def __call__(self, single: Submit, wanted: Answer, got: Answer) -> None:
        self.num_compared += 1
        if got.token_ids == wanted.token_ids:
            assert got.finish == wanted.finish, f"{single.sampling}: {got.finish} instead of {wanted.finish}"
            assert_close_logprobs(wanted.logprobs, got.logprobs, self._tolerance.logprobs)
            return
        at = first_difference(wanted, got)
        assert at < min(len(wanted.token_ids), len(got.token_ids)), (
            f"{single.sampling}: {len(got.token_ids)} tokens instead of {len(wanted.token_ids)}, the same so far"
        )
        miss = self.miss(single, wanted.token_ids[:at], got.token_ids[at])
        limit = self._tolerance.logits
        assert miss <= limit, (
            f"request {single.request_id} ({single.sampling}) parts at token {at} with {got.token_ids[at]} instead of "
            f"{wanted.token_ids[at]}, {miss:.5f} from a tie (limit {limit})"
        )
        self.num_parted += 1

    def miss(self, single: Submit, before: Sequence[int], token: int) -> float:
        """How far `token` is from being the model's own choice behind `before` (generated tokens); 0 if it is."""
        history = [*single.prompt_token_ids, *before]
        logits = self._logits(history)[-1].tolist()
        num_prompt = len(single.prompt_token_ids)
        if single.sampling.is_greedy:
            scores = reference_logits(logits, single.sampling, history, num_prompt, self._eos)
            return max(scores) - scores[token]
        probs = reference_probs(logits, single.sampling, history, num_prompt, self._eos)
        return _lost_by(probs, _number(single.sampling, len(history)), token)


def _lost_by(probs: Sequence[float], number: float, token: int) -> float:
    """By how much `token` lost its race, or its block did: a difference of log-weights, as rounding would have to be."""
    numbers = torch.tensor([number], dtype=torch.float64)
    blocks = in_blocks(torch.tensor([probs], dtype=torch.float64))
    block, lane = divmod(token, WIDTH)
    between = scores(blocks.sum(dim=2), numbers, Heat.BLOCK)[0]
    within = scores(blocks[:, block], numbers, Heat.TOKEN)[0]
    return float(max(between.max() - between[block], within.max() - within[lane]))


def _number(sampling: SamplingParams, position: int) -> float:
    """The uniform number that decides the token at `position`."""
    seed = torch.tensor((sampling.seed or 0) % SEED_RANGE, dtype=torch.int64)
    return float(uniforms(seed, torch.tensor(position), Purpose.SAMPLE))
