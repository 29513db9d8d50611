"""Medusa heads: each looks at one hidden state of the target and names the token one place further ahead.

Owns their weights, filling them from a checked checkpoint, and their arithmetic; never decides what is drafted. Made by
`medusa_recipe`, run by `medusa`. n = rows, h = target's width, V = target's vocabulary, D = the heads' (D <= V).
Source: Medusa (arXiv 2401.10774, section 2.1.1): x + SiLU(W x + b) once or more, then a product with the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by

from engine.model.decoder import DecoderModel
from engine.model.layers import project, rms_norm
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.medusa_layout import MedusaShape, read_token_map


@dataclass(frozen=True)
class MedusaHead:
    """Matrices in the target's dtype."""

    blocks: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]  # weight [h, h] and bias [h]
    output: torch.Tensor  # [D, h]


class MedusaHeads:
    def __init__(self, heads: Sequence[MedusaHead], target: DecoderModel, target_ids: torch.Tensor | None) -> None:
        """`target_ids` int64 [D]: the target's token for each of the heads'; None when they are the same tokens."""
        self.vocab_size = target.arch.vocab_size
        self.device = target.device
        self._heads = tuple(heads)
        self._final_norm = target.weights.final_norm
        self._eps = target.arch.norm_eps
        self._target_ids = target_ids

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """What every head reads [n, h], from hidden states behind the target's last layer, before its final norm."""
        return rms_norm(states, self._final_norm, self._eps)

    def logits(self, head: int, read: torch.Tensor) -> torch.Tensor:
        """float32 [n, D] for the token `head` + 1 places behind the root. Finite: what overflowed poisons no choice."""
        for weight, bias in self._heads[head].blocks:
            read = read + F.silu(project(read, weight, bias))
        return project(read, self._heads[head].output).float().nan_to_num_(nan=0.0)

    def target_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's tokens for the heads', int64 of any shape."""
        return token_ids if self._target_ids is None else self._target_ids[token_ids]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [n, D] to [n, V]: tokens the heads do not know are impossible."""
        if self._target_ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
        return spread.index_copy_(1, self._target_ids, logits)


def load_heads(tensors: DrafterTensors, shape: MedusaShape, num_heads: int, target: DecoderModel) -> MedusaHeads:
    """The first `num_heads` heads, in the target's dtype on its device; a draft that stops short needs no more."""
    token_map = read_token_map(tensors, shape)
    read = _Reader(tensors, token_map, target)
    heads = []
    for head, output in enumerate(read.outputs(shape, num_heads)):
        blocks = tuple(read.linear(shape.linear(head, block), shape.has_bias) for block in range(shape.num_blocks))
        heads.append(MedusaHead(blocks, output))
    return MedusaHeads(heads, target, None if token_map is None else token_map.to(target.device))


def num_weight_bytes(shape: MedusaShape, num_heads: int, dtype: torch.dtype) -> int:
    """Of `num_heads` heads in memory."""
    per_block = shape.width * (shape.width + (1 if shape.has_bias else 0))
    num_outputs = num_heads if shape.own_outputs else 1
    if not shape.own_outputs and shape.shared_output is None and not shape.has_map:
        num_outputs = 0  # the target's own
    elements = num_heads * shape.num_blocks * per_block + num_outputs * shape.draft_vocab_size * shape.width
    return elements * dtype.itemsize


class _Reader:
    """Tensors in the target's dtype on its device."""

    def __init__(self, tensors: DrafterTensors, token_map: torch.Tensor | None, target: DecoderModel) -> None:
        self._tensors = tensors
        self._token_map = token_map
        self._target = target

    def linear(self, name: str, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._filled(f"{name}.weight"), self._filled(f"{name}.bias") if has_bias else None

    def outputs(self, shape: MedusaShape, num_heads: int) -> list[torch.Tensor]:
        """[D, h] for each head; of a file that keeps all V rows those of the map."""
        names = [shape.output(head) for head in range(num_heads)]
        if shape.own_outputs:
            return [self._chosen(self._filled(name)) for name in names if name is not None]
        return [self._chosen(self._shared(names[0]))] * num_heads

    def _shared(self, name: str | None) -> torch.Tensor:
        """What all heads end in: the target's own output, also where the file merely repeats it."""
        own = self._target.weights.output
        if name is None:
            return own
        read = self._filled(name)
        return own if read.shape == own.shape and torch.equal(read, own) else read

    def _chosen(self, output: torch.Tensor) -> torch.Tensor:
        if self._token_map is None or output.shape[0] == len(self._token_map):
            return output
        return output[self._token_map.to(output.device)]

    def _filled(self, name: str) -> torch.Tensor:
        shape = self._tensors.shape(name)
        assert shape is not None, name
        filled = torch.empty(shape, dtype=self._target.dtype, device=self._target.device)
        self._tensors.copy(name, filled)
        return filled
