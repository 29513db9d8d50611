"""What a drafter draws is drawn from what it hands over, and follows the request's own temperature and truncation."""

import torch

from engine.speculation.choice import Chooser
from engine.speculation.speculator import DraftRow
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST

V = 7
LOGITS = torch.tensor([0.0, 1.0, 2.0, 2.5, -1.0, 0.5, 1.5])
CRITICAL_1E_6 = 41.3  # chi-square, 6 degrees of freedom: exceeded by chance once in about 4 million


def rows_of(*params: SamplingParams) -> list[DraftRow]:
    return [DraftRow(index, (1,), 4, 1, one, seed=100 + index) for index, one in enumerate(params)]


def test_greedy_rows_take_the_argmax_and_say_so_whatever_their_neighbours_do() -> None:
    rows = rows_of(SamplingParams(max_tokens=9, temperature=0.0), SamplingParams(max_tokens=9, temperature=1.0))
    tokens, probs = Chooser(rows, V, HOST).choose(LOGITS.expand(2, V), torch.tensor([5, 5]))
    assert tokens[0] == 3 and probs[0].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert torch.allclose(probs[1], LOGITS.softmax(dim=0)) and probs[1, tokens[1]] > 0


def test_each_rows_truncation_cuts_its_own_distribution() -> None:
    rows = rows_of(
        SamplingParams(max_tokens=9, temperature=0.5, top_k=2),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.5),
        SamplingParams(max_tokens=9, temperature=2.0, top_k=2),
    )
    _, probs = Chooser(rows, V, HOST).choose(LOGITS.expand(3, V), torch.tensor([1, 2, 3]))
    assert [(row > 0).nonzero().flatten().tolist() for row in probs] == [[2, 3], [2, 3], [2, 3]]
    expected = torch.stack([(LOGITS[2:4] / temperature).softmax(dim=0) for temperature in (0.5, 1.0, 2.0)])
    assert torch.allclose(probs[:, 2:4], expected)


def test_draws_follow_the_distribution_and_repeat_with_seed_and_position() -> None:
    count = 20_000
    chooser = Chooser(rows_of(*[SamplingParams(max_tokens=9, temperature=1.0)] * 4), V, HOST)
    seen = torch.zeros(V)
    for position in range(count // 4):
        tokens, probs = chooser.choose(LOGITS.expand(4, V), torch.full((4,), position))
        seen += torch.bincount(tokens, minlength=V)
    expected = probs[0] * count
    assert ((seen - expected) ** 2 / expected).sum() < CRITICAL_1E_6
    again = chooser.choose(LOGITS.expand(4, V), torch.full((4,), position))[0]
    assert torch.equal(tokens, again)
