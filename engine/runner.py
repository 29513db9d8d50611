"""Runs the target over one batch and gives the logits somebody asked for.

Owns the model, its pool and its attention; never samples and never knows a request. Called by `engine.model_executor`.
T = tokens of the step, R = logits rows, V = vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Batch, PromptRows
from engine.kv.pool import KVPool
from engine.model.attention import PagedAttention
from engine.model.decoder import DecoderModel

# Prompt logprobs need logits of every position; in slices, so that 8192 positions of a 150k vocabulary cost 39 MB.
PROMPT_SLICE_ROWS = 64


@dataclass(frozen=True)
class TargetOutput:
    logits: torch.Tensor  # float32 [R, V]
    hidden: torch.Tensor  # [T, hidden], before the final norm
    taps: torch.Tensor | None  # [T, taps, hidden]


class Runner:
    def __init__(
        self, model: DecoderModel, pool: KVPool, attention: PagedAttention[Any], taps: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        self.pool = pool
        self._attention = attention
        self._taps = taps

    def forward(self, batch: Batch) -> TargetOutput:
        """Compute the batch's tokens, writing their keys and values, and the logits of `batch.logit_index`."""
        if batch.stale_slots:
            self.pool.clear(self.pool.slots_tensor(batch.stale_slots))
        layout = self._attention.layout(batch.layouts)
        hidden, taps = self.model.forward(batch.step, self._attention, layout, self._taps)
        logits = self.model.logits(hidden.index_select(0, batch.logit_index))
        return TargetOutput(logits, hidden, taps)

    def prompt_logits(self, output: TargetOutput, prompt: PromptRows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(logits float32 [n, V], target ids int64 [n]) in slices over the prompt's positions."""
        targets = self.pool.slots_tensor(prompt.target_ids)
        for first in range(0, len(prompt.target_ids), PROMPT_SLICE_ROWS):
            chosen = targets[first : first + PROMPT_SLICE_ROWS]
            start = prompt.first + first
            yield self.model.logits(output.hidden[start : start + chosen.shape[0]]), chosen
