"""The draw has the law of its weights, never picks what has none, and hardly moves when the weights do."""

import torch

from engine.noise import Purpose, lanes, uniforms
from engine.race import WIDTH, draw


def numbers(count: int, first_seed: int = 0) -> torch.Tensor:
    seeds = torch.arange(first_seed, first_seed + count)
    return uniforms(seeds, torch.zeros(count, dtype=torch.int64), Purpose.SAMPLE)


def test_draws_have_the_law_of_the_weights_over_several_blocks() -> None:
    """Chi-square over 700 tokens in three blocks, the last one partial; weights span nine orders of magnitude."""
    count, vocab_size = 100_000, 2 * WIDTH + 188
    weights = torch.rand(vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 6
    drawn = torch.zeros(vocab_size)
    for first in range(0, count, 10_000):
        tokens = draw(weights.expand(10_000, -1), numbers(10_000, first))
        drawn += torch.bincount(tokens, minlength=vocab_size)
    expected = weights / weights.sum() * count
    likely = expected > 20
    chi_square = float((((drawn - expected) ** 2) / expected)[likely].sum())
    degrees = int(likely.sum())
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5  # a fair draw fails with p < 1e-6; the seeds are fixed


def test_a_token_without_weight_is_never_drawn() -> None:
    weights = torch.zeros(2 * WIDTH, dtype=torch.float64)
    weights[[3, 300]] = torch.tensor([1e-300, 2e-300], dtype=torch.float64)
    assert set(draw(weights.expand(500, -1), numbers(500)).tolist()) == {3, 300}


def test_the_draw_of_a_row_does_not_depend_on_the_others() -> None:
    weights = torch.rand(5, 600, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together = draw(weights, numbers(5))
    alone = [int(draw(weights[row : row + 1], numbers(5)[row : row + 1])) for row in range(5)]
    assert together.tolist() == alone


def test_noise_of_another_batch_shape_does_not_change_a_draw() -> None:
    """Logits of a large vocabulary, disturbed as fp32 sums are: an inverse CDF changes some of these 400 draws."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 49152, generator=generator, dtype=torch.float64) * 2.0
    disturbed = logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64) * 2e-5
    for first in range(0, 400, 8):
        own = numbers(8, first)
        assert torch.equal(draw(logits.softmax(dim=1), own), draw(disturbed.softmax(dim=1), own))


def test_lanes_are_apart_and_uniform() -> None:
    values = lanes(numbers(2000), 50, salt=1)
    assert not torch.equal(values, lanes(numbers(2000), 50, salt=2))
    assert values.min() > 0.0
    assert values.max() < 1.0
    assert abs(float(values.mean()) - 0.5) < 5 * (1 / 12 / values.numel()) ** 0.5
    correlation = torch.corrcoef(values[:, :5].T) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 2000**0.5
