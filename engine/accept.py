"""The verdict on a draft: which tokens the target itself would have emitted. Pure; no host synchronisation.

Owns the acceptance rules, chosen only from (greedy, draft probabilities present, tree), never from the drafter.
Never counts, never stops a sequence (EOS, stops and max_tokens are the ledger's), never changes its arguments.
Called by the model executor once per step. B = spans that sample, W = max_draft_len, R = logits rows, V = vocabulary.

    state = SamplingState(params, seed, token_ids, num_prompt_tokens, model)     # when the row begins
    rows = SamplingRows.build(states, [1 + drafted for drafted in lengths], device)  # B states, every sampling span
    verdict = accept(logits, place_draft(draft, indices, len(states)), rows)     # draft rows sit at `indices` of B
    packed = pack(verdict, logprobs).cpu()                                       # engine.logprobs: the one copy
    state.commit(committed_tokens)                                               # what the ledger kept
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling import SamplingRows
from engine.speculation.draft import Draft


@dataclass(frozen=True)
class Verdict:
    """What each span came to. Entries of `tokens` at and beyond accepted + num_non_draft are zero."""

    tokens: torch.Tensor  # int32 [B, W + 2], accepted draft tokens, then the target's own; in sequence order
    accepted: torch.Tensor  # int32 [B]
    num_non_draft: torch.Tensor  # int32 [B]: 1, or 2 when drafting produced a root (UNO: it comes first in `tokens`)
    path: torch.Tensor | None  # int32 [B, W], accepted tree nodes in order (then -1); None for chains
    rows: torch.Tensor  # int64 [B, W + 1], the logits row that decided the i-th verified token; valid to `accepted`
    finite: torch.Tensor  # bool [B], raw logits on the accepted path were finite; False: every other field is garbage
    has_choice: torch.Tensor  # bool [B], the request's own bans left a token to choose; False: garbage as well


def accept(logits: torch.Tensor, draft: Draft, rows: SamplingRows) -> Verdict:
    """Judge the drafts of B spans against raw target logits, float32 [R, V]. Draft's B follows `rows.states`."""
    raise NotImplementedError


def place_draft(draft: Draft, indices: Sequence[int], num_spans: int) -> Draft:
    """Spread a draft of `len(indices)` rows over `num_spans` spans; the other spans get length zero."""
    raise NotImplementedError
