"""The law of accept's output is exactly the target's: every cell of the noise is enumerated, for every rule.

Target and draft probabilities are multiples of 1/12, so that with twelve equal cells per uniform number the enumeration
is exact: no sampling error, no tolerance beyond float64 rounding.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.accept import accept
from engine.noise import Purpose
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST, inverse_cdf_draw

CELLS = 12
Law = dict[tuple[int, ...], float]

# Rows by last token; each sums to 12.
TARGET = {3: [[6, 3, 3], [3, 6, 3], [0, 6, 6]], 4: [[4, 2, 4, 2], [6, 6, 0, 0], [2, 4, 2, 4], [3, 3, 3, 3]]}
CLOSE = {3: [[3, 6, 3], [6, 3, 3], [6, 6, 0]], 4: [[2, 4, 2, 4], [0, 0, 6, 6], [4, 2, 4, 2], [3, 3, 3, 3]]}
ONE_HOT = {3: [[0, 0, 12], [0, 12, 0], [12, 0, 0]], 4: [[12, 0, 0, 0], [0, 0, 12, 0], [0, 12, 0, 0], [0, 0, 0, 12]]}
DRAFTS = {"close": CLOSE, "same": TARGET, "one-hot": ONE_HOT}


def product_law(table: Sequence[Sequence[int]], root: int, length: int) -> Law:
    """Every sequence of `length` tokens behind `root` with its probability under the target."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*run, token): mass * weight / CELLS
            for run, mass in law.items()
            for token, weight in enumerate(table[run[-1] if run else root])
            if weight
        }
    return law


def extended(law: Law, table: Sequence[Sequence[int]], root: int, length: int) -> Law:
    """The law of whole sequences when plain decoding goes on behind what a verdict emitted."""
    result: Law = defaultdict(float)
    for run, mass in law.items():
        for rest, rest_mass in product_law(table, run[-1] if run else root, length - len(run)).items():
            result[(*run, *rest)] += mass * rest_mass
    return result


def assert_same_law(got: Law, expected: Law) -> None:
    assert set(got) == set(expected)
    for run, mass in expected.items():
        assert got[run] == pytest.approx(mass, abs=1e-12), run


class Cells:
    """Stands in for `uniforms`: the seed's digits in base CELLS choose each number's cell; its middle is the number.

    Digit 0 decides SAMPLE at the first position, digit 1 at the second and so on; ACCEPT digits follow.
    """

    def __init__(self, first_position: int, num_sample: int) -> None:
        self._first, self._num_sample = first_position, num_sample

    def __call__(self, seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        digit = (positions - self._first).clamp(min=0)
        digit = digit.clamp(max=self._num_sample - 1) if purpose is Purpose.SAMPLE else digit + self._num_sample
        return ((seeds // CELLS**digit) % CELLS + 0.5) / CELLS


def logits_of(table: Sequence[Sequence[int]], path: Sequence[int]) -> torch.Tensor:
    return torch.tensor(table[path[-1]], dtype=torch.float32).log().clamp(min=-200.0)


def states_of(seeds: Sequence[int], vocab_size: int, root: int) -> list[SamplingState]:
    model = SamplingModel(vocab_size, (), HOST)
    params = SamplingParams(max_tokens=99)
    return [SamplingState(params, seed, (0, root), 1, model) for seed in seeds]


def emitted(tokens: torch.Tensor, accepted: torch.Tensor, extra: int = 1) -> Iterator[tuple[int, ...]]:
    for row, count in zip(tokens.tolist(), accepted.tolist(), strict=True):
        yield tuple(row[: count + extra])


def drafted_chains(table: Sequence[Sequence[int]], root: int, length: int) -> list[tuple[tuple[int, ...], float]]:
    return list(product_law(table, root, length).items())


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_one_hot_chains_have_the_targets_law(vocab_size: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chain is drafted: the law given that very chain is the target's."""
    table, root = TARGET[vocab_size], 1
    num_numbers = length + 1
    monkeypatch.setattr("engine.accept.uniforms", Cells(2, num_numbers))
    monkeypatch.setattr("engine.accept.draw", inverse_cdf_draw)
    seeds = list(range(CELLS**num_numbers))
    for chain in itertools.product(range(vocab_size), repeat=length):
        logits = torch.stack([logits_of(table, (root, *chain[:step])) for step in range(length + 1)])
        draft = Draft(
            tokens=torch.tensor([chain], dtype=torch.int32).expand(len(seeds), -1),
            lengths=torch.full((len(seeds),), length, dtype=torch.int32),
            parents=None,
            probs=None,
            roots=None,
            sources=torch.zeros(len(seeds), dtype=torch.int8),
            num_forwards=0,
        )
        rows = SamplingRows.build(states_of(seeds, vocab_size, root), [length + 1] * len(seeds), HOST)
        verdict = accept(logits.repeat(len(seeds), 1), draft, rows)
        law: Law = defaultdict(float)
        for run in emitted(verdict.tokens, verdict.accepted):
            law[run] += 1 / len(seeds)
        assert_same_law(extended(law, table, root, length + 1), product_law(table, root, length + 1))


@pytest.mark.parametrize("draft_name", list(DRAFTS))
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_rejection_sampling_has_the_targets_law(
    vocab_size: int, draft_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged over what the drafter draws, at full length, with spans of length 0, 1 and 2 in one batch."""
    table, draft_table, root = TARGET[vocab_size], DRAFTS[draft_name][vocab_size], 1
    monkeypatch.setattr("engine.accept.uniforms", Cells(2, 1))
    monkeypatch.setattr("engine.accept.draw", inverse_cdf_draw)
    for length in (0, 1, 2):
        law: Law = defaultdict(float)
        for chain, weight in drafted_chains(draft_table, root, length):
            seeds = list(range(CELLS ** (1 + length)))
            tokens = torch.zeros(len(seeds), 2, dtype=torch.int32)
            tokens[:, :length] = torch.tensor(chain, dtype=torch.int32)
            path = (root, *chain)
            probs = torch.stack(
                [torch.tensor(draft_table[path[min(step, length)]], dtype=torch.float32) / CELLS for step in range(2)]
            )
            draft = Draft(
                tokens=tokens,
                lengths=torch.full((len(seeds),), length, dtype=torch.int32),
                parents=None,
                probs=probs.expand(len(seeds), -1, -1),
                roots=None,
                sources=torch.zeros(len(seeds), dtype=torch.int8),
                num_forwards=0,
            )
            logits = torch.stack([logits_of(table, path[: step + 1]) for step in range(length + 1)])
            rows = SamplingRows.build(states_of(seeds, vocab_size, root), [length + 1] * len(seeds), HOST)
            verdict = accept(logits.repeat(len(seeds), 1), draft, rows)
            for run in emitted(verdict.tokens, verdict.accepted):
                law[run] += weight / len(seeds)
        assert_same_law(extended(law, table, root, length + 1), product_law(table, root, length + 1))


TREES = {  # (tokens, parents) over vocabulary 3
    "siblings": ([0, 1], [-1, -1]),
    "all children": ([0, 1, 2], [-1, -1, -1]),
    "deep and wide": ([1, 2, 0, 1, 2], [-1, -1, 0, 0, 1]),
    "chain": ([1, 0], [-1, 0]),
    "twins": ([1, 1, 2], [-1, -1, 1]),
}


@pytest.mark.parametrize("tree", list(TREES))
def test_trees_have_the_targets_law(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, parents = TREES[tree]
    table, root, width = TARGET[3], 1, len(tokens)
    monkeypatch.setattr("engine.accept.uniforms", Cells(2, 3))
    monkeypatch.setattr("engine.accept.draw", inverse_cdf_draw)
    seeds = list(range(CELLS**3))
    draft = Draft(
        tokens=torch.tensor([tokens], dtype=torch.int32).expand(len(seeds), -1),
        lengths=torch.full((len(seeds),), width, dtype=torch.int32),
        parents=torch.tensor([parents], dtype=torch.int32).expand(len(seeds), -1),
        probs=None,
        roots=None,
        sources=torch.zeros(len(seeds), dtype=torch.int8),
        num_forwards=0,
    )
    logits = torch.stack([logits_of(table, (root,)), *(logits_of(table, (token,)) for token in tokens)])
    rows = SamplingRows.build(states_of(seeds, 3, root), [width + 1] * len(seeds), HOST)
    verdict = accept(logits.repeat(len(seeds), 1), draft, rows)
    law: Law = defaultdict(float)
    for run in emitted(verdict.tokens, verdict.accepted):
        law[run] += 1 / len(seeds)
    depth = 1 + int(max(len(run) for run in law) - 1)
    assert_same_law(extended(law, table, root, depth), product_law(table, root, depth))


def test_drafts_with_a_root_have_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNO: drafting already produced the token at position 2; verification goes on behind it."""
    table, root = TARGET[3], 1
    monkeypatch.setattr("engine.accept.uniforms", Cells(3, 1))
    monkeypatch.setattr("engine.accept.draw", inverse_cdf_draw)
    seeds = list(range(CELLS**2))
    law: Law = defaultdict(float)
    for first, weight in enumerate(table[root]):
        for token, draft_weight in enumerate(CLOSE[3][first]):
            draft = Draft(
                tokens=torch.full((len(seeds), 1), token, dtype=torch.int32),
                lengths=torch.ones(len(seeds), dtype=torch.int32),
                parents=None,
                probs=(torch.tensor(CLOSE[3][first], dtype=torch.float32) / CELLS).expand(len(seeds), 1, -1),
                roots=torch.full((len(seeds),), first, dtype=torch.int32),
                sources=torch.zeros(len(seeds), dtype=torch.int8),
                num_forwards=1,
            )
            logits = torch.stack([logits_of(table, (first,)), logits_of(table, (token,))])
            rows = SamplingRows.build(states_of(seeds, 3, root), [2] * len(seeds), HOST)
            verdict = accept(logits.repeat(len(seeds), 1), draft, rows)
            assert verdict.num_non_draft.tolist() == [2] * len(seeds)
            for run in emitted(verdict.tokens, verdict.accepted, extra=2):
                law[run] += weight / CELLS * draft_weight / CELLS / len(seeds)
    assert_same_law(extended(law, table, root, 3), product_law(table, root, 3))
