"""Log-probabilities of the raw target distribution, and the one tensor in which a step's answer leaves the device.

Owns the numbers behind `TokenLogprobs` and the packing. Never sees transformed logits. Called by the model executor.
B = spans that sample, W = max_draft_len, N = positions asked for, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.accept import Verdict
from engine.sampling import SamplingRows
from protocol.messages import TokenLogprobs


@dataclass(frozen=True)
class Logprobs:
    """N positions of one request; top-k as asked by that request (k may be 0)."""

    logprobs: torch.Tensor  # float32 [N], of the chosen token, natural log
    ranks: torch.Tensor  # int32 [N], 1 + the number of strictly more likely tokens
    top_ids: torch.Tensor  # int32 [N, k]
    top_logprobs: torch.Tensor  # float32 [N, k]


@dataclass(frozen=True)
class SpanVerdict:
    """One span's verdict on the host."""

    accepted: int
    non_draft: int
    tokens: tuple[int, ...]  # accepted + non_draft entries
    path: tuple[int, ...] | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, when the row asked
    failure: str | None  # a sentence; everything else is then zero


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids`, int64 [N], under raw `logits`, float32 [N, V]. Also for prompt positions."""
    raise NotImplementedError


def verdict_logprobs(logits: torch.Tensor, verdict: Verdict, rows: SamplingRows) -> tuple[Logprobs | None, ...]:
    """One entry per span: None unless it asked for logprobs, else N = rows.counts[b] positions (undefined past accepted)."""
    raise NotImplementedError


def pack(
    verdict: Verdict, span_logprobs: Sequence[Logprobs | None], prompt_logprobs: Sequence[Logprobs] = ()
) -> torch.Tensor:
    """Everything a step answers as one int32 vector on the device; floats travel as their bits."""
    raise NotImplementedError


@dataclass(frozen=True)
class Packed:
    """The shapes needed to read a packed vector; take it from the device tensors before the copy, costs no sync."""

    num_spans: int
    max_draft_len: int
    is_tree: bool
    span_shapes: tuple[tuple[int, int] | None, ...]  # (N, k) per span, None: not asked
    prompt_shapes: tuple[tuple[int, int], ...]  # (N, k) in the order packed


def unpack(host: torch.Tensor, shapes: Packed) -> tuple[list[SpanVerdict], list[tuple[TokenLogprobs, ...]]]:
    """Read a packed vector on the host: one verdict per span, one tuple per packed prompt part."""
    raise NotImplementedError
