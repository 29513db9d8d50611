"""Draft lengths in a running engine: every limit holds, and with --adaptive-draft they follow what is accepted."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.plan import Span, SpanKind, SpanResult, StepPlan, StepResult
from engine.sequence import Committed, Outcome
from engine.simulate import SimExecutor, SimSettings, _Row
from engine.speculation.batch_table import parse_batch_table
from tests.fakes import VOCAB, Engine, plain_tokens

W = 5
FIXED_S, EACH_S = 0.010, 0.002  # what the simulated steps below cost: a fixed part and a part for every token


class CostlySteps(SimExecutor):
    """A simulated executor whose steps take time by the tokens in them, and whose acceptance may change."""

    def __init__(self, acceptance: float) -> None:
        super().__init__(SimSettings(W, VOCAB, tuple(range(10, VOCAB)), acceptance))
        self.engine: Engine | None = None
        self.plans: list[StepPlan] = []
        self.by_prompt_length: dict[int, float] = {}  # acceptance of rows whose prompt is that long

    def accept(self, acceptance: float) -> None:
        self._settings = replace(self._settings, acceptance=acceptance)

    def _run(self, row: _Row, span: Span) -> SpanResult:
        if row.num_prompt in self.by_prompt_length:
            self.accept(self.by_prompt_length[row.num_prompt])
        return super()._run(row, span)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        result = super().execute(plan)
        assert self.engine is not None
        num_tokens = sum(len(span.token_ids) for span in plan.spans) + sum(span.drafted for span in result.spans)
        self.engine.clock.advance(FIXED_S + EACH_S * num_tokens)
        return result


def costly(acceptance: float, adaptive: bool, table: str = "1:5", trees: bool = False) -> tuple[Engine, CostlySteps]:
    executor = CostlySteps(acceptance)
    engine = Engine(
        executor=executor, max_draft_len=W, max_num_batched_tokens=64, num_blocks=1600, block_size=16,
        max_model_len=25_000, adaptive_draft=adaptive, draft_len_by_batch=parse_batch_table(table),
        drafts_trees=trees, check_laws=False,
    )  # fmt: skip
    executor.engine = engine
    return engine, executor


def budgets(plans: Sequence[StepPlan]) -> list[int]:
    return [span.budget for plan in plans for span in plan.spans if span.kind is SpanKind.ROUND]


def seconds(acceptance: float, adaptive: bool, table: str = "1:5") -> float:
    """What four requests of 1 000 tokens take."""
    engine, _ = costly(acceptance, adaptive, table)
    for request_id in range(4):
        engine.submit(request_id, max_tokens=1000, seed=request_id, temperature=1.0)
    began = engine.clock.now
    while engine.scheduler.has_work or engine.inbox.arrivals:
        engine.core.step()
    return (engine.clock.now - began) / 1e9


# ---- limits ----


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_draft_exceeds_any_limit(seed: int, adaptive: bool) -> None:
    """Over random shapes; the strict executor refuses a draft whose slots are not covered."""
    print("seed", seed)
    generator = random.Random(seed)
    table = parse_batch_table(generator.choice(["1:4", "1:3,3:1", "2:2,4:0", "1:0,2:4", "3:0"]))
    engine = Engine(
        max_num_batched_tokens=generator.choice([7, 12, 40]), num_blocks=generator.choice([14, 20, 64]),
        max_model_len=generator.choice([30, 60]), draft_len_by_batch=table, adaptive_draft=adaptive,
    )  # fmt: skip
    engine.fake.acceptance = generator.choice([0.0, 0.4, 1.0])
    wanted: dict[int, tuple[range, int]] = {}
    for request_id in range(7):
        prompt, max_tokens = range(10, 12 + generator.randrange(12)), generator.randint(1, 18)
        wanted[request_id] = (prompt, min(max_tokens, engine.max_model_len - len(prompt)))
        engine.submit(request_id, prompt, max_tokens=max_tokens)
        engine.step(generator.randint(1, 6))
        engine.scheduler.check_integrity()
    engine.run_dry()
    for plan in engine.fake.plans:
        rounds = [span for span in plan.spans if span.kind is SpanKind.ROUND]
        assert sum(len(span.token_ids) + span.budget for span in plan.spans) <= engine.max_num_batched_tokens
        for span in rounds:
            assert 0 <= span.budget <= table.most(len(rounds), engine.max_draft_len)
            assert span.start + 1 + span.budget < engine.max_model_len
    for request_id, (prompt, max_tokens) in wanted.items():
        assert engine.tokens(request_id) == plain_tokens(prompt, request_id, max_tokens)


def test_the_table_goes_by_the_rows_that_decode() -> None:
    engine, executor = costly(1.0, adaptive=False, table="1:5,2:3,3:0")
    for request_id, max_tokens in enumerate((400, 200, 60)):
        engine.submit(request_id, max_tokens=max_tokens)
    engine.run_dry()
    seen: dict[int, set[int]] = {}
    for plan in executor.plans:
        rounds = budgets([plan])
        if rounds and all(span.kind is SpanKind.ROUND for span in plan.spans):
            seen.setdefault(len(rounds), set()).update(rounds)
    assert {size: max(lengths) for size, lengths in seen.items()} == {1: 5, 2: 3, 3: 0}


def test_a_table_that_allows_more_than_the_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--draft-len-by-batch 1:5 allows more"):
        Engine(max_draft_len=4, draft_len_by_batch=parse_batch_table("1:5"))


# ---- adaptive ----


def test_lengths_fall_to_probes_when_nothing_is_accepted_and_come_back_when_it_is() -> None:
    engine, executor = costly(1.0, adaptive=True)
    engine.submit(1, max_tokens=20_000)
    engine.step(100)
    assert budgets(executor.plans[-50:]) == [W] * 50
    executor.accept(0.0)
    engine.step(400)
    quiet = budgets(executor.plans[-100:])
    assert set(quiet) == {0, 1}
    assert quiet.count(1) * EACH_S <= 0.025 * 100 * (FIXED_S + EACH_S), "probes are to take about 2 % of the time"
    assert quiet.count(1) >= 10
    executor.accept(1.0)
    engine.step(72)
    assert budgets(executor.plans[-5:]) == [W] * 5


def test_each_row_has_a_length_of_its_own() -> None:
    """Good and bad rows side by side: what fails for one does not end the other's drafts."""
    engine, executor = costly(1.0, adaptive=True)
    executor.by_prompt_length.update({4: 1.0, 5: 0.0})
    engine.submit(1, range(10, 14), max_tokens=10_000)
    engine.submit(2, range(10, 15), max_tokens=10_000)
    engine.step(250)
    rows = {row: sequence.num_prompt for row, sequence in engine.scheduler.rows.items()}
    late: dict[int, list[int]] = {4: [], 5: []}
    for plan in executor.plans[-100:]:
        for span in plan.spans:
            late[rows[span.row]].append(span.budget)
    assert min(late[4]) >= W - 1
    assert 0 < sum(late[5]) <= 20


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_trees_are_drafted_whole_or_not_at_all(acceptance: float) -> None:
    engine, executor = costly(acceptance, adaptive=True, trees=True)
    engine.submit(1, max_tokens=20_000)
    engine.step(300)
    late = budgets(executor.plans[-100:])
    assert set(late) <= {0, W}
    assert late.count(W) == (100 if acceptance else pytest.approx(3, abs=1))


def test_a_preempted_sequence_keeps_its_memory_and_a_finished_one_leaves_none() -> None:
    engine = Engine(num_blocks=12, adaptive_draft=True, prefix_caching=False)
    engine.fake.acceptance = 0.0
    for request_id in range(4):
        engine.submit(request_id, range(10, 15 + request_id), max_tokens=28)
    memories: dict[int, object] = {}
    while engine.scheduler.has_work or engine.inbox.arrivals:
        engine.step()
        for sequence in engine.scheduler._live.values():
            memory = sequence.draft_memory
            assert memories.setdefault(sequence.key.request_id, memory) in (None, memory)
            memories[sequence.key.request_id] = memory
    assert engine.counters.num_preemptions > 0 and len(memories) == 4
    assert not engine.scheduler._live


def test_only_what_was_judged_is_heard() -> None:
    """How far a draft went behind its first rejection is drawn again in the next round, and must not decide about it."""
    engine = Engine()
    engine.submit(1)
    engine.step(2)
    (sequence,) = engine.scheduler.rows.values()

    def judged(depth: int, accepted: int) -> int:
        return Committed(sequence, Outcome.ADVANCED, True, 5, (7,), None, depth, depth, accepted).judged

    assert [judged(depth, 1) for depth in (2, 3, 5)] == [2, 2, 2]
    assert (judged(0, 0), judged(1, 1), judged(4, 4), judged(4, 0)) == (0, 1, 4, 1)


def test_without_the_option_nothing_is_remembered() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=40)
    engine.step(6)
    assert [sequence.draft_memory for sequence in engine.scheduler.rows.values()] == [None]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_adapting_costs_little_against_the_best_fixed_length(acceptance: float) -> None:
    """Time of 4 000 simulated tokens against every fixed length, known only afterwards; 5 % for probes and doubt."""
    fixed = {length: seconds(acceptance, adaptive=False, table=f"1:{length}") for length in range(W + 1)}
    adaptive = seconds(acceptance, adaptive=True)
    print(acceptance, {length: round(took, 2) for length, took in fixed.items()}, round(adaptive, 2))
    assert adaptive <= 1.05 * min(fixed.values())
