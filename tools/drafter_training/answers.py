"""The text drafters are trained on: answers that the target wrote itself, with the hidden states it had meanwhile.

Owns the writing (many answers at a time, a new prompt wherever one ends) and what is kept of it; never trains. Called by
`tools.train_drafter`. Half of the answers are greedy, half are drawn at `TEMPERATURE`: drafters are asked about both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import SpanLayout
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention

TEMPERATURE = 0.7
BLOCK_SIZE = 16
STATE_DTYPE = torch.bfloat16  # half the memory; hidden states reach values that float16 does not


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target made of it. L tokens; the last was never run, hence L - 1 states."""

    token_ids: torch.Tensor  # int64 [L]
    num_prompt_tokens: int
    states: torch.Tensor  # STATE_DTYPE [L - 1, taps, hidden]


@dataclass
class _Row:
    """One answer being written."""

    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    most_tokens: int
    num_run: int = 0
    states: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class WritingLimits:
    """Sizes in tokens unless named."""

    answer_tokens: int = 176  # of one answer
    total_tokens: int = 80_000  # of all answers; what is begun is finished
    max_prompt_tokens: int = 256  # longer prompts are left out
    rows: int = 64  # answers at a time


class AnswerWriter:
    def __init__(
        self, model: DecoderModel, eos_token_ids: Sequence[int], taps: tuple[int, ...], limits: WritingLimits, seed: int
    ) -> None:
        arch = model.arch
        shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE, model.dtype)
        self._blocks_per_row = -(-(limits.max_prompt_tokens + limits.answer_tokens) // BLOCK_SIZE)
        self._pool = KVPool(shape, limits.rows * self._blocks_per_row, model.device)
        self._attention = GroupedAttention(self._pool, arch.num_heads)
        self._model, self._eos, self._taps, self._limits = model, frozenset(eos_token_ids), taps, limits
        self._generator = torch.Generator().manual_seed(seed)

    def write(self, prompts: Sequence[Sequence[int]], on_progress: Callable[[int, int], None]) -> Iterator[Answer]:
        """Answers in the order in which they end, until prompts or `total_tokens` are used up."""
        waiting = [(index, list(prompt)) for index, prompt in enumerate(prompts)]
        waiting = [(i, prompt) for i, prompt in waiting if len(prompt) <= self._limits.max_prompt_tokens][::-1]
        rows: dict[int, _Row] = {}
        written = 0
        while rows or (waiting and written < self._limits.total_tokens):
            for slot in range(self._limits.rows):
                if slot not in rows and waiting and written < self._limits.total_tokens:
                    index, prompt = waiting.pop()
                    rows[slot] = _Row(index, prompt, len(prompt), len(prompt) + self._limits.answer_tokens)
            self._step(rows)
            written += len(rows)
            on_progress(min(written, self._limits.total_tokens), self._limits.total_tokens)
            for slot in [slot for slot, row in rows.items() if self._has_ended(row)]:
                row = rows.pop(slot)
                yield Answer(torch.tensor(row.token_ids), row.num_prompt_tokens, torch.cat(row.states))

    def _has_ended(self, row: _Row) -> bool:
        return row.token_ids[-1] in self._eos or len(row.token_ids) == row.most_tokens

    def _step(self, rows: dict[int, _Row]) -> None:
        """One more token for every row: new ones run their prompt."""
        counts = [len(row.token_ids) - row.num_run for row in rows.values()]
        per_row = self._blocks_per_row
        layout = self._attention.layout(
            [
                SpanLayout(row.num_run, n, tuple(range(slot * per_row, (slot + 1) * per_row)))
                for n, (slot, row) in zip(counts, rows.items(), strict=True)
            ]
        )
        positions = torch.cat([torch.arange(row.num_run, len(row.token_ids)) for row in rows.values()])
        first = torch.tensor(list(rows)).repeat_interleave(torch.tensor(counts)) * (per_row * BLOCK_SIZE)
        tokens = torch.tensor([token for row in rows.values() for token in row.token_ids[row.num_run :]])
        hidden, states = self._model.forward(
            ForwardInput(tokens, positions, first + positions), self._attention, layout, self._taps
        )
        assert states is not None
        for row, new in zip(rows.values(), torch.split_with_sizes(states, counts), strict=True):
            row.num_run = len(row.token_ids)
            row.states.append(new.to(STATE_DTYPE))
        last = torch.tensor(counts).cumsum(0) - 1
        for row, token_id in zip(rows.values(), self._choose(self._model.logits(hidden[last]), rows), strict=True):
            row.token_ids.append(token_id)

    def _choose(self, logits: torch.Tensor, rows: dict[int, _Row]) -> list[int]:
        drawn = (logits / TEMPERATURE).softmax(dim=1).multinomial(1, generator=self._generator)[:, 0]
        is_greedy = torch.tensor([row.index % 2 == 0 for row in rows.values()])
        return torch.where(is_greedy, logits.argmax(dim=1), drawn).tolist()


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for index, answer in enumerate(answers):
        tensors[f"{index}.token_ids"] = answer.token_ids
        tensors[f"{index}.states"] = answer.states
        tensors[f"{index}.num_prompt_tokens"] = torch.tensor(answer.num_prompt_tokens)
    save_file(tensors, str(path))


def load_answers(path: Path) -> list[Answer]:
    with safe_open(str(path), framework="pt") as file:
        count = sum(1 for name in file.keys() if name.endswith(".token_ids"))  # noqa: SIM118  # it is no dict
        return [
            Answer(
                file.get_tensor(f"{index}.token_ids"),
                int(file.get_tensor(f"{index}.num_prompt_tokens")),
                file.get_tensor(f"{index}.states"),
            )
            for index in range(count)
        ]
