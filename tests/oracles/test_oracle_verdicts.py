"""The verdict on drafts that were drawn, against `dflash`'s own rejection sampling, given the same random numbers.

Whole texts (test_oracle_dflash_generate.py) seldom come near the edge of a verdict; here some two thousand random ones do.
"""

import pytest
import torch

from engine.accept import accept
from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft
from protocol.sampling import SamplingParams

dflash = pytest.importorskip("dflash.model")

HOST = torch.device("cpu")
NUM_SPANS, WIDTH, VOCAB, HISTORY = 500, 4, 12, (3, 4, 5)
TRUNCATIONS = {"plain": {}, "nucleus": {"top_p": 0.8}, "top_k": {"top_k": 5}, "both": {"top_p": 0.9, "top_k": 6}}


def numbers(seed: int, count: int, purpose: Purpose) -> torch.Tensor:
    """Ours for `count` tokens behind the history."""
    return uniforms(torch.tensor([seed]), torch.arange(len(HISTORY), len(HISTORY) + count), purpose)


def their_verdict(
    monkeypatch: pytest.MonkeyPatch, seed: int, tokens: torch.Tensor, logits: torch.Tensor, probs: torch.Tensor,
    params: SamplingParams,
) -> tuple[int, int]:  # fmt: skip
    """How many of `tokens` [k] stay, and the token behind them."""
    target = dflash._sampling_probs(logits[None], params.temperature, params.top_p, params.top_k)
    finals: list[torch.Tensor] = []

    def sample(mass: torch.Tensor) -> torch.Tensor:
        finals.append(mass)
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(torch, "rand_like", lambda like: numbers(seed, like.shape[1], Purpose.ACCEPT)[None])
    monkeypatch.setattr(dflash, "_sample_probs", sample)
    accepted, _ = dflash._rejection_sample(tokens[None], target, probs[None])
    number = numbers(seed, accepted + 1, Purpose.SAMPLE)[-1:]
    return accepted, int(draw(finals[-1].double(), number))


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_verdicts_are_those_of_dflash(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    params = SamplingParams(max_tokens=99, temperature=0.9, **TRUNCATIONS[name])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(17)
    logits = torch.randn(NUM_SPANS, WIDTH + 1, VOCAB, generator=generator) * 2
    drafted_from = logits[:, :WIDTH] + torch.randn(NUM_SPANS, WIDTH, VOCAB, generator=generator)
    probs = dflash._sampling_probs(drafted_from, params.temperature, params.top_p, params.top_k)
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(NUM_SPANS, WIDTH)
    model = SamplingModel(VOCAB, (VOCAB - 1,), HOST)
    states = [SamplingState(params, seed, HISTORY, len(HISTORY), model) for seed in range(NUM_SPANS)]
    lengths = torch.full((NUM_SPANS,), WIDTH, dtype=torch.int32)
    draft = Draft(tokens.int(), lengths, None, probs, None, torch.zeros(NUM_SPANS, dtype=torch.int8), num_forwards=1)
    rows = SamplingRows.build(states, [WIDTH + 1] * NUM_SPANS, HOST)
    verdict = accept(logits.flatten(0, 1), draft, rows)
    ours = [(count, int(said[count])) for count, said in zip(verdict.accepted.tolist(), verdict.tokens, strict=True)]
    theirs = [
        their_verdict(monkeypatch, seed, tokens[seed], logits[seed], probs[seed], params) for seed in range(NUM_SPANS)
    ]
    assert ours == theirs
    assert min(sum(count == wanted for count, _ in ours) for wanted in range(WIDTH + 1)) > 10, "some verdict is rare"
