"""What a drafter hands to the engine: a value, never a side effect. B = rows asked for, W = max_draft_len, V = vocabulary."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Draft:
    """Proposed tokens for B rows. `lengths`, `parents` and `sources` may stay on the host when the rest is on a device.

    `lengths` are the REAL lengths: no padding is ever counted. Row b's entries at and beyond lengths[b] are undefined.
    Nodes of a tree are numbered in topological order, so any prefix of a draft is a draft. A row's own root comes before
    its draft and takes one of the row's slots: with it at most budget - 1 tokens are drafted.
    """

    tokens: torch.Tensor  # int32 [B, W]
    lengths: torch.Tensor  # int32 [B], 0..W
    parents: torch.Tensor | None  # int32 [B, W], parents[b, i] < i, -1 = the root; None = chain
    probs: torch.Tensor | None  # float32 [B, W, V], what tokens were drawn from; None = deterministic draft
    roots: torch.Tensor | None  # int32 [B], a token of the target's own that drafting produced (UNO); -1 = none
    sources: torch.Tensor  # int8 [B], index into the speculator's source names
    num_forwards: int  # draft model forwards this took
    accepted: torch.Tensor | None = None  # int32 [B], so many tokens stay whatever the target says (synthetic only)
    # bool [B] on the host, which must know how many tokens a row feeds; with `roots`. A row that has one and drew -1 fails.
    has_root: torch.Tensor | None = None


def empty_draft(num_rows: int, max_draft_len: int, device: torch.device) -> Draft:
    """A draft of length zero for every row: plain decoding."""
    return Draft(
        tokens=torch.zeros(num_rows, max_draft_len, dtype=torch.int32, device=device),
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=device),
        parents=None,
        probs=None,
        roots=None,
        sources=torch.zeros(num_rows, dtype=torch.int8, device=device),
        num_forwards=0,
    )


def host_draft(proposals: Sequence[Sequence[int]], max_draft_len: int, probs: torch.Tensor | None = None) -> Draft:
    """A chain per row from lists on the host; `probs` float32 [B, W, V] or None. Entries past a length are zero."""
    if not proposals:
        return replace(empty_draft(0, max_draft_len, torch.device("cpu")), probs=probs)
    # One buffer for all rows: a tensor for each of them cost some 20 us a row.
    tokens = array("i", bytes(4 * len(proposals) * max_draft_len))
    for index, proposed in enumerate(proposals):
        if proposed:
            first = index * max_draft_len
            tokens[first : first + len(proposed)] = array("i", proposed)
    return Draft(
        tokens=torch.frombuffer(tokens, dtype=torch.int32).view(len(proposals), max_draft_len),
        lengths=torch.frombuffer(array("i", map(len, proposals)), dtype=torch.int32),
        parents=None,
        probs=probs,
        roots=None,
        sources=torch.zeros(len(proposals), dtype=torch.int8),
        num_forwards=0,
    )
