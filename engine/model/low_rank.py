"""Low-rank additions to a decoder's projections, for some of a step's rows (LoRA, arXiv 2106.09685).

Owns the arithmetic: the model's weights stay as they are, so that an adapter is on for one forward and off for the next at
no cost. Never reads files, never decides which rows. Called by `engine.model.decoder`. T = tokens, n = adapted rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engine.model.layers import project

Part = Literal["qkv", "out", "gate_up", "down"]  # a fused projection of `LayerWeights`


@dataclass(frozen=True)
class Raise:
    """The second factor of one projection: what it adds begins at output `first` and reads the reduced `first_rank` on."""

    first: int
    first_rank: int
    weight: torch.Tensor  # [out, rank], the adapter's scale included


@dataclass(frozen=True)
class LowRank:
    """What is added to one fused projection. First factors are stacked: they read the same input."""

    reduce: torch.Tensor  # [sum of ranks, in]
    raises: tuple[Raise, ...]

    @property
    def num_bytes(self) -> int:
        tensors = [self.reduce, *(part.weight for part in self.raises)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def add_to(self, product: torch.Tensor, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        """Change rows int64 [n] of `product` [T, out] in place, given what it was made from, [T, in]."""
        reduced = project(inputs.index_select(0, rows), self.reduce)
        for part in self.raises:
            out, rank = part.weight.shape
            raised = project(reduced[:, part.first_rank : part.first_rank + rank], part.weight)
            product[:, part.first : part.first + out].index_add_(0, rows, raised)


LayerAdapter = Mapping[Part, LowRank]  # parts that are not there are left alone


@dataclass(frozen=True)
class RowAdapter:
    """An adapter on rows of one step; everything else of the step runs as without it, bit for bit."""

    layers: tuple[LayerAdapter, ...]
    rows: torch.Tensor  # int64 [n], flat indices into the step

    def add(self, layer: int, part: Part, product: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add to a product that was just made, in place."""
        low_rank = self.layers[layer].get(part)
        if low_rank is not None:
            low_rank.add_to(product, inputs, self.rows)
