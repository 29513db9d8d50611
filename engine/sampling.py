"""What one step needs to know to sample: each sequence's parameters and counts, and which logits rows are whose.

Owns `SamplingState` (one sequence's life in a row) and `SamplingRows` (one step). Never looks at logits
(engine.transforms does) and never decides a token (engine.accept does). The batch keeps a state per row and builds
`SamplingRows` once per step. B = spans that sample, R = logits rows of all of them, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from protocol.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingModel:
    """What sampling must know of the target; fixed for the life of an engine."""

    vocab_size: int  # columns of the logits
    eos_token_ids: tuple[int, ...]
    device: torch.device


class PenaltyCounts:
    """Token counts of one sequence, kept on the device and updated with what is committed, never rebuilt."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int, model: SamplingModel) -> None:
        self.output = torch.zeros(model.vocab_size, dtype=torch.int32, device=model.device)  # [V], output only
        self.in_prompt = torch.zeros(model.vocab_size, dtype=torch.bool, device=model.device)  # [V]
        self.seen = torch.zeros(0, dtype=torch.int64, device=model.device)  # [distinct tokens], prompt and output
        self._known: set[int] = set()
        prompt = token_ids[:num_prompt_tokens]
        self._see(prompt)
        self.in_prompt[self.seen] = True
        self.commit(token_ids[num_prompt_tokens:])

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count output tokens that became permanent: small uploads, O(len(token_ids)) on the host."""
        if not token_ids:
            return
        self._see(token_ids)
        ids = torch.tensor(token_ids, dtype=torch.int64).to(self.output.device, non_blocking=True)
        self.output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _see(self, token_ids: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(token_ids) if token not in self._known]
        if new:
            self._known.update(new)
            self.seen = torch.cat(
                [self.seen, torch.tensor(new, dtype=torch.int64).to(self.seen.device, non_blocking=True)]
            )


class SamplingState:
    """One sequence's sampling, from begin to end of its row.

    `token_ids` is the whole committed history (on a resume after preemption: the generated tokens too). Device tensors
    exist only for what the parameters ask. Call `commit` with every token that becomes permanent.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        model: SamplingModel,
    ) -> None:
        self.params = params
        self.seed = seed  # in [0, 2**63)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = len(token_ids)
        self.penalties = PenaltyCounts(token_ids, num_prompt_tokens, model) if _has_penalties(params) else None
        self.allowed = _mask(params.allowed_token_ids, model)  # bool [V], or None: all
        self.floor_ids = _floor_ids(params, model)  # int64 [n] banned below min_tokens, or None
        self.bias = _bias(params, model)  # (int64 [n], float32 [n]), or None
        self.bad_words = BadWords(params.bad_words, model) if params.bad_words else None
        self._output_tail: list[int] = []
        self._remember(token_ids[num_prompt_tokens:])

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def has_masks_or_bias(self) -> bool:
        """Some logits of this sequence are changed one by one (penalties aside)."""
        has_floor = self.floor_ids is not None and self.num_generated < self.params.min_tokens
        return has_floor or any(part is not None for part in (self.allowed, self.bias, self.bad_words))

    @property
    def output_tail(self) -> Sequence[int]:
        """The last output tokens, as many as the longest bad word needs; read-only."""
        return self._output_tail

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed output tokens."""
        self.num_tokens += len(token_ids)
        if self.penalties is not None:
            self.penalties.commit(token_ids)
        self._remember(token_ids)

    def _remember(self, token_ids: Sequence[int]) -> None:
        if self.bad_words is not None and self.bad_words.max_prefix:
            kept = [*self._output_tail, *token_ids]
            self._output_tail = kept[-self.bad_words.max_prefix :]


class BadWords:
    """Token sequences whose last token is banned when the output ends in the others; on the device."""

    def __init__(self, words: Sequence[Sequence[int]], model: SamplingModel) -> None:
        self.max_prefix = max(len(word) for word in words) - 1
        self.last = torch.tensor([word[-1] for word in words], dtype=torch.int64).to(
            model.device, non_blocking=True
        )  # [n]
        # int64 [n, max_prefix], the token next to the last first; -1 matches anything (the word is shorter)
        reversed_prefixes = [[*reversed(word[:-1]), *([-1] * (self.max_prefix + 1 - len(word)))] for word in words]
        self.prefixes = (
            torch.tensor(reversed_prefixes, dtype=torch.int64)
            .reshape(len(words), -1)
            .to(model.device, non_blocking=True)
        )


@dataclass(frozen=True)
class SamplingRows:
    """Which logits row belongs to whom, for one step. Span b owns `counts[b]` rows from `offsets[b]`.

    A span's first row follows its last committed token; row 1 + i follows draft node i (for a chain: d_1 .. d_{i+1}).
    """

    states: tuple[SamplingState, ...]  # B
    offsets: tuple[int, ...]  # B
    counts: tuple[int, ...]  # B, at least 1 + the span's draft length
    first_row: torch.Tensor  # int64 [B]: `offsets` on the device
    last_row: torch.Tensor  # int64 [B]
    span: torch.Tensor  # int64 [R]
    step: torch.Tensor  # int64 [R], 0 = the span's first row
    num_tokens: torch.Tensor  # int64 [R], committed tokens of the row's sequence
    seeds: torch.Tensor  # int64 [R]

    @classmethod
    def build(cls, states: Sequence[SamplingState], counts: Sequence[int], device: torch.device) -> "SamplingRows":
        """Lay spans out one behind the other: span b has `counts[b]` logits rows. One upload."""
        ends = list(accumulate(counts))
        offsets = [end - count for end, count in zip(ends, counts, strict=True)]
        if any(count < 1 for count in counts):
            raise ValueError(f"every span that samples has at least one logits row, got {tuple(counts)}")
        table = [
            (index, step, state.num_tokens, state.seed)
            for index, (state, count) in enumerate(zip(states, counts, strict=True))
            for step in range(count)
        ]
        host = [*offsets, *(end - 1 for end in ends), *chain.from_iterable(table)]
        uploaded = torch.tensor(host, dtype=torch.int64).to(device, non_blocking=True)
        first_row, last_row = uploaded[: len(states)], uploaded[len(states) : 2 * len(states)]
        span, step, num_tokens, seeds = uploaded[2 * len(states) :].reshape(len(table), 4).unbind(dim=1)
        return cls(tuple(states), tuple(offsets), tuple(counts), first_row, last_row, span, step, num_tokens, seeds)

    @property
    def num_rows(self) -> int:
        return sum(self.counts)


def _has_penalties(params: SamplingParams) -> bool:
    neutral = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    return not neutral


def _mask(token_ids: Sequence[int] | None, model: SamplingModel) -> torch.Tensor | None:
    if token_ids is None:
        return None
    mask = torch.zeros(model.vocab_size, dtype=torch.bool)
    mask[torch.tensor(token_ids, dtype=torch.int64)] = True
    return mask.to(model.device, non_blocking=True)


def _floor_ids(params: SamplingParams, model: SamplingModel) -> torch.Tensor | None:
    """The ids that would end the sequence, which min_tokens forbids; an EOS that is ignored ends nothing."""
    if params.min_tokens == 0:
        return None
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
    if not ending:
        return None
    return torch.tensor(sorted(ending), dtype=torch.int64).to(model.device, non_blocking=True)


def _bias(params: SamplingParams, model: SamplingModel) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not params.logit_bias:
        return None
    ids = torch.tensor(list(params.logit_bias), dtype=torch.int64).to(model.device, non_blocking=True)
    values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32).to(model.device, non_blocking=True)
    return ids, values
