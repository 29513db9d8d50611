"""Log-probabilities of the raw target distribution, and the one tensor in which a step's answer leaves the device.

Owns the numbers behind `TokenLogprobs` and the packing. Never sees transformed logits, never synchronises (except
`unpack`, which reads a host tensor). Called by the model executor:

    asked = verdict_logprobs(logits, verdict, rows)
    packed, layout = pack(verdict, asked, prompt_parts)
    verdicts, prompt_logprobs = unpack(packed.cpu(), layout)   # the step's one device-to-host copy

B = spans that sample, W = max_draft_len, N = positions asked for, K = top entries, V = vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from engine.accept import Verdict
from engine.sampling import SamplingRows
from protocol.messages import TokenLogprobs

_Item = TypeVar("_Item")

NON_FINITE = "the model produced non-finite logits for this sequence"
NO_CHOICE = "the request's allowed_token_ids, bad_words, min_tokens and logit_bias leave no token to choose"


@dataclass(frozen=True)
class Logprobs:
    """N positions of one request, with as many top entries as it asked for (K may be 0)."""

    logprobs: torch.Tensor  # float32 [N], of the chosen token, natural log
    ranks: torch.Tensor  # int32 [N], 1 + the number of strictly more likely tokens
    top_ids: torch.Tensor  # int32 [N, K], most likely first
    top_logprobs: torch.Tensor  # float32 [N, K]


@dataclass(frozen=True)
class SpanVerdict:
    """One span's verdict on the host."""

    accepted: int
    non_draft: int
    tokens: tuple[int, ...]  # accepted + non_draft entries
    path: tuple[int, ...] | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, when the row asked
    failure: str | None  # a sentence for the client; everything else is then zero or None


@dataclass(frozen=True)
class PackLayout:
    """The shapes needed to read a packed vector back; known without a synchronisation."""

    num_spans: int
    max_draft_len: int
    is_tree: bool
    span_shapes: tuple[tuple[int, int] | None, ...]  # (N, K) per span; None: not asked
    prompt_shapes: tuple[tuple[int, int], ...]  # (N, K) in the order packed


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids`, int64 [N], under raw logits, float32 [N, V]. Prompt positions use it directly.

    The normaliser is float32 `logsumexp`; no [N, V] tensor of log-probabilities is made. O(N V).
    """
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return Logprobs(
        logprobs=(chosen - normaliser).squeeze(1),
        ranks=((logits > chosen).sum(dim=1) + 1).to(torch.int32),
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values - normaliser,
    )


def verdict_logprobs(logits: torch.Tensor, verdict: Verdict, rows: SamplingRows) -> tuple[Logprobs | None, ...]:
    """Per span None, or the log-probabilities of its tokens when its request asked: N = rows.counts[b], raw logits [R, V].

    Entries past the accepted run are undefined (their number is not known on the host yet) and `unpack` drops them.
    A root that drafting produced has no logits here: such drafts must not be asked for logprobs.
    """
    parts: list[Logprobs | None] = []
    for index, (state, count) in enumerate(zip(rows.states, rows.counts, strict=True)):
        if state.params.logprobs is None:
            parts.append(None)
            continue
        num_positions = min(count, verdict.rows.shape[1])
        deciding = logits[verdict.rows[index, :num_positions]]
        token_ids = verdict.tokens[index, :num_positions].to(torch.int64)
        parts.append(token_logprobs(deciding, token_ids, state.params.logprobs))
    return tuple(parts)


def pack(
    verdict: Verdict, span_logprobs: Sequence[Logprobs | None], prompt_logprobs: Sequence[Logprobs] = ()
) -> tuple[torch.Tensor, PackLayout]:
    """Everything a step answers as one int32 vector on the device (floats travel as their bits), and how to read it."""
    parts = [verdict.accepted, verdict.num_non_draft, verdict.finite, verdict.has_choice, verdict.tokens]
    if verdict.path is not None:
        parts.append(verdict.path)
    for one in (*span_logprobs, *prompt_logprobs):
        if one is not None:
            parts += [
                one.logprobs.view(torch.int32),
                one.ranks,
                one.top_ids,
                one.top_logprobs.contiguous().view(torch.int32),
            ]
    layout = PackLayout(
        num_spans=verdict.tokens.shape[0],
        max_draft_len=verdict.tokens.shape[1] - 2,
        is_tree=verdict.path is not None,
        span_shapes=tuple(None if one is None else _shape(one) for one in span_logprobs),
        prompt_shapes=tuple(_shape(one) for one in prompt_logprobs),
    )
    return torch.cat([part.to(torch.int32).reshape(-1) for part in parts]), layout


def unpack(host: torch.Tensor, layout: PackLayout) -> tuple[list[SpanVerdict], list[tuple[TokenLogprobs, ...]]]:
    """Read a packed vector on the host: one verdict per span, one tuple per packed prompt part.

    Raises ValueError when vector and layout do not belong together.
    """
    reader = _Reader(host)
    num_spans, width = layout.num_spans, layout.max_draft_len
    accepted, non_draft, finite, has_choice = (reader.ints(num_spans) for _ in range(4))
    tokens = reader.table(num_spans, width + 2)
    paths = reader.table(num_spans, width) if layout.is_tree else [None] * num_spans
    span_logprobs = [None if shape is None else reader.logprobs(shape) for shape in layout.span_shapes]
    prompt_logprobs = [reader.logprobs(shape) for shape in layout.prompt_shapes]
    reader.finish()
    verdicts = []
    for index, logprobs in enumerate(span_logprobs):
        failure = None if finite[index] and has_choice[index] else NON_FINITE if not finite[index] else NO_CHOICE
        if failure is not None:
            verdicts.append(SpanVerdict(0, 0, (), None, None, failure))
            continue
        path = paths[index]
        verdicts.append(
            SpanVerdict(
                accepted=accepted[index],
                non_draft=non_draft[index],
                tokens=tuple(tokens[index][: accepted[index] + non_draft[index]]),
                path=None if path is None else tuple(path[: accepted[index]]),
                logprobs=None if logprobs is None else logprobs[: accepted[index] + 1],
                failure=None,
            )
        )
    return verdicts, prompt_logprobs


def _shape(one: Logprobs) -> tuple[int, int]:
    num_positions, num_top = one.top_ids.shape
    return num_positions, num_top


class _Reader:
    """Reads a packed vector front to back."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self._at = 0

    def ints(self, count: int) -> list[int]:
        return [int(value) for value in self._take(count).tolist()]

    def floats(self, count: int) -> list[float]:
        return [float(value) for value in self._take(count).view(torch.float32).tolist()]

    def table(self, num_rows: int, num_columns: int) -> list[list[int]]:
        return list(_rows(self.ints(num_rows * num_columns), num_rows, num_columns))

    def logprobs(self, shape: tuple[int, int]) -> tuple[TokenLogprobs, ...]:
        num_positions, num_top = shape
        chosen = self.floats(num_positions)
        ranks = self.ints(num_positions)
        top_ids = _rows(self.ints(num_positions * num_top), num_positions, num_top)
        top_logprobs = _rows(self.floats(num_positions * num_top), num_positions, num_top)
        return tuple(
            TokenLogprobs(logprob, rank, tuple(ids), tuple(values))
            for logprob, rank, ids, values in zip(chosen, ranks, top_ids, top_logprobs, strict=True)
        )

    def finish(self) -> None:
        if self._at != len(self._host):
            raise ValueError(f"packed vector has {len(self._host)} entries, its layout reads {self._at}")

    def _take(self, count: int) -> torch.Tensor:
        part = self._host[self._at : self._at + count]
        if len(part) != count:
            raise ValueError(f"packed vector ends at {len(self._host)}, its layout reads to {self._at + count}")
        self._at += count
        return part


def _rows(values: list[_Item], num_rows: int, num_columns: int) -> Iterator[list[_Item]]:
    return (values[row * num_columns : (row + 1) * num_columns] for row in range(num_rows))
