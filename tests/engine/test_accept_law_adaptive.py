"""Draft lengths that follow acceptance leave the target's law in a running engine, with its own random numbers.

tests/engine/test_accept_law_lengths.py enumerates the same claim; here a token that was drawn behind a rejection is drawn
again with the same number, by the drafter, the scheduler and the executor of production.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.speculation.batch_table import parse_batch_table
from engine.speculation.draft import Draft
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from tests.inprocess import Drafter, InProcessEngine, Logits, Shape
from tests.lossless import request
from tests.tiny import write_noisy_copy, write_tiny_model

PROMPT, NUM_TOKENS, WIDTH, TOP_K = [5, 9, 70, 5, 9, 70, 5], 5, 3, 2
SAMPLING = {"temperature": 2.5, "top_k": TOP_K, "max_tokens": NUM_TOKENS, "ignore_eos": True}
CRITICAL = 87.0  # chi-square with 31 degrees of freedom: exceeded with probability 3e-7
SHAPE = Shape(max_num_seqs=6, num_blocks=120, adaptive_draft=True, draft_len_by_batch=parse_batch_table("1:3,6:2"))


class LeavesOutTheUnlikely(Speculator):
    """A drafter whose drafts end before the first token it gave less than an even chance: a length that peeks."""

    def __init__(self, inner: Speculator) -> None:
        self.capabilities = inner.capabilities
        self._inner = inner

    def begin(self, start: SequenceStart) -> None:
        self._inner.begin(start)

    def end(self, row: int) -> None:
        self._inner.end(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self._inner.observe(spans)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = self._inner.propose(rows)
        assert draft.probs is not None
        chances = draft.probs.gather(2, draft.tokens.long()[:, :, None]).squeeze(2)
        likely = (chances >= 0.5).int().cumprod(dim=1).sum(dim=1)
        return replace(draft, lengths=torch.minimum(draft.lengths, likely.to(draft.lengths.dtype)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("law") / "target", seed=5, num_layers=1)


@pytest.fixture(scope="module")
def law(target: Path) -> dict[tuple[int, ...], float]:
    """Every text of NUM_TOKENS tokens with its probability."""
    logits = Logits(target, "cpu", "fp32")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for path, mass in law.items():
            best = logits([*PROMPT, *path])[-1].double().topk(TOP_K)
            shares = (best.values / SAMPLING["temperature"]).softmax(dim=0)
            for token, share in zip(best.indices.tolist(), shares.tolist(), strict=True):
                longer[(*path, token)] = mass * share
        law = longer
    assert len(law) == TOP_K**NUM_TOKENS
    return law


def chi_square(engine: InProcessEngine, law: dict[tuple[int, ...], float], count: int) -> float:
    """Of `count` answers of the engine, each with a seed of its own."""
    seen = dict.fromkeys(law, 0)
    for number in range(count):
        engine.submit(request(number, PROMPT, {**SAMPLING, "seed": number}))
    engine.run_dry(checks=False)
    for answer in engine.answers().values():
        seen[answer.token_ids] += 1
    return sum((seen[text] - count * mass) ** 2 / (count * mass) for text, mass in law.items())


def engine_of(target: Path, noise: float) -> InProcessEngine:
    draft = target.with_name(f"draft-{noise}")
    if not draft.exists():
        write_noisy_copy(draft, target, noise)
    settings = SpeculationSettings(draft_model=str(draft), num_draft_tokens=WIDTH, draft_sampling="sampled")
    return InProcessEngine(target, SHAPE, Drafter("sampled", "draft_model", settings))


def test_lengths_that_follow_acceptance_leave_the_law(target: Path, law: dict[tuple[int, ...], float]) -> None:
    """All 32 answers of five tokens against their exact probabilities: false alarm three times in ten million."""
    engine, budgets = engine_of(target, noise=0.05), set()
    engine.executor.before = lambda plan: budgets.update(span.budget for span in plan.spans if span.kind.is_round)
    assert chi_square(engine, law, count=400) < CRITICAL
    counters = engine.counters
    assert 0.1 < counters.accepted_tokens / counters.draft_tokens < 0.9, "both verdicts must be frequent"
    assert budgets >= {0, 1, 2}, "the lengths must differ"


def test_a_length_that_looks_at_its_own_draft_is_noticed(target: Path, law: dict[tuple[int, ...], float]) -> None:
    """What the test above would see."""
    engine = engine_of(target, noise=0.05)
    inner = engine.executor._inner
    inner._speculator = LeavesOutTheUnlikely(inner._speculator)
    assert chi_square(engine, law, count=400) > CRITICAL
