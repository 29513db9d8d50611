"""What a step costs on this machine, timed before the first request: the target over rows and tokens, and drafting.

Owns the made-up requests, the grid and its time limit; leaves no row behind. The keys it wrote lie in blocks that nobody
holds, where whoever gets them next writes first. Called by engine.construction with --adaptive-draft; the numbers are
read by engine.speculation.step_cost, and corrected there by the steps that run.

Contexts are short: a step over long ones takes longer by what their keys cost to read, which a draft token hardly adds
to. Drafters that look up are not timed: what they take depends on the text, and is little.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.clock import PhaseClock
from engine.model_executor import ModelExecutor
from engine.plan import RowBegin, RowCommit, Span, SpanKind, StepPlan
from engine.runner import Runner
from engine.sampling import SamplingModel
from engine.speculation.draft import Draft, host_draft
from engine.speculation.speculator import Capabilities, DraftRow, Speculator
from engine.speculation.step_cost import GUESSED_COSTS, CostTable, StartUpCosts, measured_table
from protocol.messages import Phase
from protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64)
PROMPT_TOKENS = 2
TIME_LIMIT_S = 1.5  # for each of the two tables; the forward under way is finished
REPEATS = 3  # the fastest counts: what disturbs a timing only ever lengthens it
SCOPE = "start-up profile"  # a drafter that learns from answers must not draft from these for anybody
STRIDE = 7919  # between made-up token ids, a prime: they differ, and no drafter finds them repeated


@dataclass(frozen=True)
class ProfileLimits:
    """What a step of this engine may hold."""

    max_num_seqs: int
    max_num_tokens: int  # of a step
    num_blocks: int
    max_model_len: int


def measure_costs(
    runner: Runner, speculator: Speculator, sampling: SamplingModel, clock: PhaseClock, limits: ProfileLimits
) -> StartUpCosts | None:
    """Time both tables and say in the log what it came to; None where no made-up request fits."""
    started_s = time.perf_counter()
    capabilities = speculator.capabilities
    width = min(capabilities.max_draft_len, limits.max_model_len - PROMPT_TOKENS - 2)
    grid = _Grid(limits, runner.pool.block_size, width)
    if width < 1 or not grid.num_rows:
        return None
    stand_in = _StandIn(width)
    verify = _Profile(ModelExecutor(runner, stand_in, sampling, clock), sampling.vocab_size, grid)
    verify_table = verify.run(sorted({1, 2, 4, 1 + width}), draft_is_timed=False)
    draft_table = None
    if not capabilities.drafts_on_host:
        draft = _Profile(ModelExecutor(runner, speculator, sampling, clock), sampling.vocab_size, grid)
        draft_table = draft.run(sorted({2, 1 + width}), draft_is_timed=True)
    costs = StartUpCosts(verify_table or GUESSED_COSTS.verify, draft_table or GUESSED_COSTS.draft)
    one, most = costs.verify.at(1, 1), costs.verify.at(1, 1 + width)
    logger.info(
        "start_up_profile points=%d step_ms=%.2f with_%d_draft_tokens_ms=%.2f draft_ms=%.2f took_s=%.1f",
        costs.num_points, one / 1e6, width, most / 1e6, costs.draft.at(1, width) / 1e6, time.perf_counter() - started_s,
    )  # fmt: skip
    return costs


@dataclass(frozen=True)
class _Grid:
    """Which sizes are timed, and where their rows lie."""

    limits: ProfileLimits
    block_size: int
    width: int  # W

    @property
    def blocks_per_row(self) -> int:
        return -(-(PROMPT_TOKENS + 2 + self.width) // self.block_size)

    @property
    def num_rows(self) -> int:
        fitting = min(self.limits.max_num_seqs, self.limits.num_blocks // self.blocks_per_row)
        return max(
            (rows for rows in ROWS if rows <= fitting and PROMPT_TOKENS * rows <= self.limits.max_num_tokens), default=0
        )

    def block_ids(self, row: int) -> tuple[int, ...]:
        first = row * self.blocks_per_row
        return tuple(range(first, first + self.blocks_per_row))

    def sizes(self, tokens_per_row: Sequence[int]) -> list[tuple[int, int]]:
        """(rows, tokens per row), the small first: where time runs out, the large are left to extrapolation."""
        sizes = [(rows, each) for rows in ROWS if rows <= self.num_rows for each in tokens_per_row]
        return sorted((size for size in sizes if _num_tokens(size) <= self.limits.max_num_tokens), key=_num_tokens)


class _Profile:
    """Times one executor over the grid."""

    def __init__(self, executor: ModelExecutor, vocab_size: int, grid: _Grid) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._grid = grid
        self._begun = 0  # rows that hold a prompt

    def run(self, tokens_per_row: Sequence[int], *, draft_is_timed: bool) -> CostTable | None:
        """The table of what was reached in time; None when not a single size was. By rows and tokens of the step, or,
        when drafting is timed, by rows and draft slots."""
        deadline_s = time.perf_counter() + TIME_LIMIT_S
        fastest: dict[tuple[int, int], float] = {}
        num_single = sum(rows == 1 for rows, _ in self._grid.sizes(tokens_per_row))
        try:
            self._begin(1)
            self._time(1, min(tokens_per_row) - 1, draft_is_timed)  # warms up
            for rows, each in self._schedule(tokens_per_row):
                # A line of one point would say that further tokens are free: the single row's is always finished.
                if len(fastest) >= num_single and time.perf_counter() >= deadline_s:
                    break
                self._begin(rows)
                took_ns = self._time(rows, each - 1, draft_is_timed)
                key = (rows, each - 1 if draft_is_timed else each)
                if took_ns is not None:
                    fastest[key] = min(took_ns, fastest.get(key, took_ns))
        finally:
            self._end()
        return measured_table(fastest) if fastest else None

    def _schedule(self, tokens_per_row: Sequence[int]) -> Iterator[tuple[int, int]]:
        """A single row first, which is most of the truth; then all, again and again."""
        sizes = self._grid.sizes(tokens_per_row)
        single = [size for size in sizes if size[0] == 1]
        yield from single
        for _ in range(REPEATS):
            yield from sizes

    def _time(self, rows: int, num_draft: int, draft_is_timed: bool) -> float | None:
        """Of one step, or of its drafting; None when a row failed."""
        spans = tuple(
            Span(row, PROMPT_TOKENS, (self._token(row, PROMPT_TOKENS),), SpanKind.ROUND, num_draft, self._grid.block_ids(row))
            for row in range(rows)
        )  # fmt: skip
        started_ns = time.perf_counter_ns()
        result = self._executor.execute(StepPlan(0, (), (), (), spans))
        took_ns = time.perf_counter_ns() - started_ns
        if any(span.failure is not None for span in result.spans):
            return None
        if not draft_is_timed:
            return float(took_ns)
        start_ns, end_ns = result.phases.spans[Phase.DRAFT]
        return float(end_ns - start_ns)

    def _begin(self, rows: int) -> None:
        """Give the first `rows` rows a prompt and a token behind it, which the drafter hears of."""
        new = range(self._begun, rows)
        if not new:
            return
        prompts = {row: tuple(self._token(row, place) for place in range(PROMPT_TOKENS)) for row in new}
        params = SamplingParams(max_tokens=self._grid.width + 2, temperature=0.0, ignore_eos=True)
        begins = tuple(RowBegin(row, prompts[row], PROMPT_TOKENS, params, 0, None, SCOPE) for row in new)
        spans = tuple(Span(row, 0, prompts[row], SpanKind.LAST_CHUNK, 0, self._grid.block_ids(row)) for row in new)
        self._executor.execute(StepPlan(0, (), begins, (), spans))
        self._begun = rows
        roots = {row: (self._token(row, PROMPT_TOKENS),) for row in new}
        commits = tuple(RowCommit(row, roots[row], PROMPT_TOKENS, None) for row in new)
        self._executor.execute(StepPlan(0, (), (), commits, ()))

    def _end(self) -> None:
        self._executor.execute(StepPlan(0, tuple(range(self._begun)), (), (), ()))
        self._begun = 0

    def _token(self, row: int, place: int) -> int:
        return (STRIDE * (row * (PROMPT_TOKENS + 1) + place + 1)) % self._vocab_size


class _StandIn(Speculator):
    """Drafts as many tokens as it may, at no cost: what is timed with it is the target."""

    def __init__(self, width: int) -> None:
        self.capabilities = Capabilities(max_draft_len=width, sources=("profile",), drafts_on_host=True)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return host_draft(
            [[1 % (index + 2)] * row.budget for index, row in enumerate(rows)], self.capabilities.max_draft_len
        )


def _num_tokens(size: tuple[int, int]) -> int:
    return size[0] * size[1]
