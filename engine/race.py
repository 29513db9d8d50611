"""Drawing one token from a distribution so that rounding moves a draw only where two tokens were nearly tied.

Owns the draw; never the distribution. Called by accept. n = rows, V = vocabulary.

Source: the Gumbel-max trick (Gumbel 1954; Maddison et al., arXiv 1411.0030), raced twice: first between blocks of WIDTH
tokens by their mass, then within the winning block. P(block) * P(token | block) is the token's probability, so the law is
that of one race, for V / WIDTH + WIDTH hashes per row instead of V (448 instead of 49152). An inverse CDF needs a single
number, but each of its borders is a sum over up to V probabilities: logits that differed by 1e-5 in another batch shape
changed 0.65 to 2 % of the draws at temperature 1, and a seeded request would not have repeated its own text.
"""

from enum import IntEnum

import torch

from engine.noise import lanes

WIDTH = 256


class Heat(IntEnum):
    """Which of the two races a number is for."""

    BLOCK = 1
    TOKEN = 2


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Int64 [n]: an index drawn from float64 weights [n, V] (any positive sum, zeros never win).

    `numbers` float64 [n] in [0, 1), multiples of 2**-53: all randomness of the row. A row without weight is garbage.
    """
    blocks = in_blocks(weights)
    block = scores(blocks.sum(dim=2), numbers, Heat.BLOCK).argmax(dim=1)
    inside = blocks.take_along_dim(block[:, None, None], dim=1).squeeze(1)
    return block * WIDTH + scores(inside, numbers, Heat.TOKEN).argmax(dim=1)


def in_blocks(weights: torch.Tensor) -> torch.Tensor:
    """Float64 [n, blocks, WIDTH]; the last block is filled up with weight 0."""
    missing = -weights.shape[1] % WIDTH
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, WIDTH)


def scores(weights: torch.Tensor, numbers: torch.Tensor, heat: Heat) -> torch.Tensor:
    """Float64 [n, count]: log-weight plus Gumbel noise; the largest wins. -inf where the weight is 0."""
    uniform = lanes(numbers, weights.shape[1], int(heat))
    return weights.log() - (-uniform.log()).log()
