"""Draft lengths that follow what was accepted leave the target's law exact: every text and verdict is enumerated.

The lengths are those of the engine's own policy (--adaptive-draft, --draft-len-by-batch), the verdicts those of `accept`,
over whole texts of several rounds. What a length may not do, look at the tokens it cuts, is shown to be noticed.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.accept import accept
from engine.draft_lengths import DraftLengths
from engine.intake import PolicySettings
from engine.sampling import SamplingRows
from engine.sequence import Committed, Outcome
from engine.speculation.batch_table import BatchTable, parse_batch_table
from engine.speculation.draft import Draft
from engine.speculation.step_cost import StartUpCosts, straight
from protocol.messages import Capacity
from protocol.sampling import SamplingParams
from tests.engine.test_accept_law import (
    CELLS,
    CLOSE,
    TARGET,
    Cells,
    Law,
    assert_same_law,
    drafted_chains,
    emitted,
    logits_of,
    product_law,
    states_of,
)
from tests.speculation.reference import HOST, inverse_cdf_draw

ROOT, WIDTH, NUM_TOKENS, VOCAB = 1, 2, 6, 3
UNLIKELY = 6  # of CELLS: what a drafter that judges its own draft would call a doubtful token

Chain = tuple[int, ...]
Outcomes = tuple[tuple[int, int], ...]  # (drafted, accepted) of each round so far
Planned = Callable[[Outcomes], int]
Cut = Callable[[int, Chain], int]  # (root, what was drawn) -> how much of it is put to the target


def whole(root: int, chain: Chain) -> int:
    return len(chain)


def planned_by_the_engine(
    num_rows: int, adaptive: bool, table: BatchTable, costs: StartUpCosts | None = None
) -> Planned:
    """The engine's lengths for one of `num_rows` rows, from its own verdicts; all others have one token to go."""
    capacity = Capacity(100, 16, 256, 4, 100, 10, 1000, True)
    settings = PolicySettings(
        capacity, WIDTH, VOCAB, frozenset(), draft_len_by_batch=table, adaptive_draft=adaptive, start_up_costs=costs
    )
    others = [SimpleNamespace(sim=object(), num_remaining=1, token_ids=[0]) for _ in range(num_rows - 1)]

    @functools.cache
    def planned(outcomes: Outcomes) -> int:
        lengths = DraftLengths(settings, _Roomy(), lambda: 0)  # type: ignore[arg-type]
        row: Any = SimpleNamespace(sim=None, num_prompt=2, token_ids=[0, ROOT], block_ids=range(9), draft_memory=None)
        row.sampling = SamplingParams(max_tokens=NUM_TOKENS)
        for drafted, accepted in outcomes:
            assert lengths.reserve([row, *others], spare=100)[0] == drafted
            row.token_ids += [0] * (accepted + 1)
            tokens = (0,) * (accepted + 1)
            lengths.end_step([Committed(row, Outcome.ADVANCED, True, 0, tokens, None, drafted, drafted, accepted)])
        return lengths.reserve([row, *others], spare=100)[0]

    return planned


class _Roomy:
    """A cache in which there is always room."""

    block_size = 4

    def room(self, sequence: Any) -> int:
        return 1000

    def grow(self, sequence: Any, num_tokens: int) -> bool:
        return True


class Rounds:
    """The law of one round of rejection sampling, by the real `accept`."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._laws: dict[tuple[int, int], Law] = {}

    def law(self, root: int, length: int) -> Law:
        """What is emitted behind `root` when `length` tokens are drawn."""
        if (root, length) not in self._laws:
            law: Law = defaultdict(float)
            for chain, weight in drafted_chains(CLOSE[VOCAB], root, length):
                for run, mass in _verdicts(root, chain[: self._cut(root, chain)]).items():
                    law[run] += weight * mass
            self._laws[root, length] = law
        return self._laws[root, length]


@functools.cache
def _verdicts(root: int, chain: Chain) -> Law:
    """Every verdict on `chain`, drawn from CLOSE, with its probability."""
    path, length = (root, *chain), len(chain)
    seeds = list(range(CELLS ** (1 + length)))
    tokens = torch.zeros(len(seeds), WIDTH, dtype=torch.int32)
    tokens[:, :length] = torch.tensor(chain, dtype=torch.int32)
    drawn_from = [torch.tensor(CLOSE[VOCAB][path[min(step, length)]]) / CELLS for step in range(WIDTH)]
    draft = Draft(
        tokens=tokens,
        lengths=torch.full((len(seeds),), length, dtype=torch.int32),
        parents=None,
        probs=torch.stack(drawn_from).expand(len(seeds), -1, -1),
        roots=None,
        sources=torch.zeros(len(seeds), dtype=torch.int8),
        num_forwards=0,
    )
    logits = torch.stack([logits_of(TARGET[VOCAB], path[: step + 1]) for step in range(length + 1)])
    rows = SamplingRows.build(states_of(seeds, VOCAB, root), [length + 1] * len(seeds), HOST)
    verdict = accept(logits.repeat(len(seeds), 1), draft, rows)
    law: Law = defaultdict(float)
    for run in emitted(verdict.tokens, verdict.accepted):
        law[run] += 1 / len(seeds)
    return law


def law_of_texts(planned: Planned, cut: Cut = whole) -> tuple[Law, set[int]]:
    """The law of NUM_TOKENS tokens behind ROOT, and the lengths that were planned where the text's end allowed WIDTH."""
    rounds, law, lengths = Rounds(cut), defaultdict(float), set()
    open_texts: dict[tuple[Chain, Outcomes], float] = {((), ()): 1.0}
    while open_texts:
        grown: dict[tuple[Chain, Outcomes], float] = defaultdict(float)
        for (run, outcomes), mass in open_texts.items():
            length = planned(outcomes)
            if NUM_TOKENS - len(run) > WIDTH:
                lengths.add(length)
            for tokens, share in rounds.law(run[-1] if run else ROOT, length).items():
                text, heard = (*run, *tokens), (*outcomes, (length, len(tokens) - 1))
                if len(text) == NUM_TOKENS:
                    law[text] += mass * share
                else:
                    grown[text, heard] += mass * share
        open_texts = grown
    return law, lengths


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.accept.uniforms", Cells(2, 1))
    monkeypatch.setattr("engine.accept.draw", inverse_cdf_draw)


@pytest.mark.parametrize(
    ("num_rows", "fixed_ns", "table", "expected"),
    [(1, 1.6, "1:2", {0, 1, 2}), (2, 3.2, "1:2", {0, 1, 2}), (2, 3.2, "1:2,2:1", {0, 1})],
)
def test_lengths_that_follow_acceptance_leave_the_law(
    num_rows: int, fixed_ns: float, table: str, expected: set[int]
) -> None:
    """Steps cost `fixed_ns` and 1 ns for every token."""
    costs = StartUpCosts(straight(fixed_ns, 1.0), straight(0.0, 0.0))
    law, lengths = law_of_texts(planned_by_the_engine(num_rows, True, parse_batch_table(table), costs))
    assert lengths == expected, "other lengths than these would prove something else"
    assert_same_law(law, product_law(TARGET[VOCAB], ROOT, NUM_TOKENS))


@pytest.mark.parametrize(("num_rows", "length"), [(1, 2), (3, 1), (9, 0)])
def test_lengths_by_batch_size_leave_the_law(num_rows: int, length: int) -> None:
    law, lengths = law_of_texts(planned_by_the_engine(num_rows, False, parse_batch_table("1:2,3:1,9:0")))
    assert lengths == {length}
    assert_same_law(law, product_law(TARGET[VOCAB], ROOT, NUM_TOKENS))


def doubtful(root: int, chain: Chain) -> list[int]:
    """Places in `chain` whose token the drafter itself found unlikely."""
    before = (root, *chain)
    return [place for place, token in enumerate(chain) if CLOSE[VOCAB][before[place]][token] < UNLIKELY]


def test_a_draft_may_end_behind_an_unlikely_token() -> None:
    """A length may depend on all that was drawn before the first token it leaves out."""

    def cut(root: int, chain: Chain) -> int:
        return min([place + 1 for place in doubtful(root, chain)], default=len(chain))

    law, _ = law_of_texts(lambda outcomes: min(WIDTH, NUM_TOKENS - 1 - sum(kept + 1 for _, kept in outcomes)), cut)
    assert_same_law(law, product_law(TARGET[VOCAB], ROOT, NUM_TOKENS))


def test_a_draft_that_leaves_out_an_unlikely_token_is_noticed() -> None:
    """What the tests above would see of a length that looks at the token it cuts."""

    def cut(root: int, chain: Chain) -> int:
        return min(doubtful(root, chain), default=len(chain))

    law, _ = law_of_texts(lambda outcomes: min(WIDTH, NUM_TOKENS - 1 - sum(kept + 1 for _, kept in outcomes)), cut)
    wanted = product_law(TARGET[VOCAB], ROOT, NUM_TOKENS)
    assert sum(law.values()) == pytest.approx(1.0)
    assert sum(abs(law.get(text, 0.0) - mass) for text, mass in wanted.items()) / 2 > 0.05
