"""A draft model driven by hand: rows whose every accepted and rejected token a test decides."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.decoder import DecoderModel
from engine.model.weights import load_model
from engine.speculation.draft_model import DraftModelSpeculator
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart
from engine.speculation.vocabulary import SharedVocabulary, TokenMap
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST

BLOCK_SIZE, BLOCKS_PER_ROW = 4, 12
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)


def load(directory: Path, device: torch.device = HOST) -> DecoderModel:
    return load_model(resolve(str(directory)), torch.float32, device)


def same_vocabulary(size: int) -> SharedVocabulary:
    ids = tuple(range(size))
    return SharedVocabulary(size, size, ids, ids, ids, is_same=True)


class Drafted:
    """A speculator over a model, its pages, and every token it was made to compute."""

    def __init__(self, model: DecoderModel, width: int = 4, gives_probs: bool = False, num_blocks: int = 48) -> None:
        arch = model.arch
        shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE, model.dtype)
        self.pool = KVPool(shape, num_blocks, model.device)
        self.slots: list[list[int]] = []  # of each forward so far
        tokens = TokenMap(same_vocabulary(arch.vocab_size), model.device)
        capabilities = Capabilities(max_draft_len=width, sources=("draft_model",), gives_probs=gives_probs)
        self.speculator = DraftModelSpeculator(_Watched(model, self.slots), self.pool, tokens, capabilities)

    def keys(self, row: "Row", num_positions: int) -> torch.Tensor:
        """[2, layers, num_positions, heads, dim]: keys and values of the row's first positions."""
        slots = [self.pool.slot(row.block_ids, position) for position in range(num_positions)]
        flat = [pages.flatten(1, 2)[:, slots] for pages in (self.pool.keys, self.pool.values)]
        return torch.stack(flat)


class _Watched(DecoderModel):
    """The same model; notes where each forward writes."""

    def __init__(self, model: DecoderModel, slots: list[list[int]]) -> None:
        super().__init__(model.arch, model.weights)
        self._slots = slots

    def forward(self, step, attention, layout, taps=()):
        self._slots.append(step.slots.tolist())
        return super().forward(step, attention, layout, taps)


class Row:
    """One sequence and its blocks. Spans follow the executor's contract: root and accepted tokens, then the next root."""

    def __init__(self, number: int, prompt: Sequence[int], params: SamplingParams = GREEDY) -> None:
        self.number = number
        self.history = list(prompt)
        self.num_prompt = len(prompt)
        self.params = params
        self.block_ids = tuple(range(number * BLOCKS_PER_ROW, (number + 1) * BLOCKS_PER_ROW))
        self.computed = 0  # positions told to the speculator

    def begin(self, drafted: Drafted) -> None:
        drafted.speculator.begin(SequenceStart(self.number, self.history, self.num_prompt))

    def span(self, end: int) -> CommittedSpan:
        """What becomes permanent up to position `end`; the token there is known."""
        start, self.computed = self.computed, end
        return CommittedSpan(self.number, start, self.history[start:end], self.history[end], self.block_ids, None)

    def prompt(self, first_token: int) -> CommittedSpan:
        """The whole prompt; the target answered with `first_token`."""
        self.history.append(first_token)
        return self.span(self.num_prompt)

    def commit(self, accepted: Sequence[int], own: int) -> CommittedSpan:
        """A round that kept `accepted` and added the target's own token."""
        self.history += [*accepted, own]
        return self.span(len(self.history) - 1)

    def asks(self, budget: int = 4) -> DraftRow:
        return DraftRow(
            self.number, self.history, budget, self.num_prompt, self.params, 100 + self.number, self.block_ids
        )


def random_prompt(seed: int, length: int, vocab_size: int = 320) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(length)]
