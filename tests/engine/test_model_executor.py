"""The executor turns plans into results: tokens equal transformers', rows fail alone, changes apply exactly once."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.construction import BuiltExecutor, ExecutorSettings, build_executor
from engine.executor import DeviceFailure
from engine.model_executor import ModelExecutor
from engine.plan import RowBegin, RowCommit, Span, SpanKind, SpanResult, StepPlan, StepResult
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.messages import Phase
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.tiny import EOS_TOKEN_IDS, write_tiny_model

BLOCK_SIZE = 8
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=31)


@pytest.fixture(scope="module")
def reference(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def build(directory: Path, drafter: Speculator | None = None, **options: Any) -> BuiltExecutor:
    settings = ExecutorSettings(dtype="fp32", device="cpu", kv_cache_tokens=1024, block_size=BLOCK_SIZE, **options)
    built = build_executor(resolve(str(directory)), settings)
    if drafter is not None:
        built.executor._speculator = drafter
    return built


def greedy_continuation(reference: torch.nn.Module, token_ids: Sequence[int], count: int) -> list[int]:
    history = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        for _ in range(count):
            history = torch.cat((history, reference(history).logits[:, -1:].argmax(dim=-1)), dim=1)
    return history[0, len(token_ids) :].tolist()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """The least a scheduler must do: rows with fixed blocks, one span per row and step."""

    def __init__(self, executor: ModelExecutor, blocks_per_row: int = 12) -> None:
        self.executor = executor
        self.histories: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.results: dict[int, list[SpanResult]] = {}
        self._blocks_per_row = blocks_per_row
        self._ends: list[int] = []
        self._begins: list[RowBegin] = []
        self._commits: dict[int, RowCommit] = {}
        self._step_id = 0

    def begin(self, row: int, token_ids: Sequence[int], params: SamplingParams = GREEDY, seed: int = 7) -> None:
        self.histories[row], self.prompts[row] = list(token_ids), len(token_ids)
        self.computed[row], self.results[row] = 0, []
        self._begins.append(RowBegin(row, tuple(token_ids), len(token_ids), params, seed, None))

    def resume(self, row: int, params: SamplingParams = GREEDY, seed: int = 7) -> None:
        """Preempt the row and recompute it from its history."""
        self._ends.append(row)
        self._commits.pop(row, None)
        self.computed[row] = 0
        self._begins.append(RowBegin(row, tuple(self.histories[row]), self.prompts[row], params, seed, None))

    def end(self, row: int) -> None:
        self._ends.append(row)
        self._commits.pop(row, None)
        del self.histories[row]

    def plan(self, budget: int = 0, chunk: int = 1000, rows: Sequence[int] | None = None) -> StepPlan:
        spans = tuple(self._span(row, budget, chunk) for row in (self.histories if rows is None else rows))
        plan = StepPlan(self._step_id, tuple(self._ends), tuple(self._begins), tuple(self._commits.values()), spans)
        self._ends, self._begins, self._commits = [], [], {}
        self._step_id += 1
        return plan

    def step(self, budget: int = 0, chunk: int = 1000, rows: Sequence[int] | None = None) -> StepResult:
        plan = self.plan(budget, chunk, rows)
        result = self.executor.execute(plan)
        self.settle(plan, result)
        return result

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        for span, outcome in zip(plan.spans, result.spans, strict=True):
            history = self.histories[span.row]
            self.results[span.row].append(outcome)
            if outcome.failure is not None:
                continue
            history += outcome.tokens
            self.computed[span.row] = len(history) - 1 if span.kind.samples else span.start + len(span.token_ids)
            self._commits[span.row] = RowCommit(span.row, outcome.tokens, self.computed[span.row], outcome.path)

    def generated(self, row: int) -> list[int]:
        return self.histories[row][self.prompts[row] :]

    def _span(self, row: int, budget: int, chunk: int) -> Span:
        history, start = self.histories[row], self.computed[row]
        first_block = row * self._blocks_per_row
        blocks = tuple(range(first_block, first_block + self._blocks_per_row))
        end = min(len(history), start + chunk)
        if end < len(history):
            kind = SpanKind.CHUNK
        elif len(history) == self.prompts[row]:
            kind = SpanKind.LAST_CHUNK
        else:
            kind = SpanKind.ROUND if end - start == 1 else SpanKind.LAST_RECOMPUTE
        return Span(row, start, tuple(history[start:end]), kind, budget if kind is SpanKind.ROUND else 0, blocks)


class Oracle(Speculator):
    """Drafts from a table of true continuations, every `wrong`-th token wrong; hears everything."""

    def __init__(self, texts: dict[int, list[int]], width: int = 4, wrong: int = 0) -> None:
        self.capabilities = Capabilities(max_draft_len=width, sources=("oracle", "other"), drafts_on_host=True)
        self.observed: list[CommittedSpan] = []
        self.began: list[int] = []
        self.ended: list[int] = []
        self._texts, self._width, self._wrong = texts, width, wrong

    def begin(self, start: SequenceStart) -> None:
        self.began.append(start.row)

    def end(self, row: int) -> None:
        self.ended.append(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self.observed += spans

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = empty_draft(len(rows), self._width, torch.device("cpu"))
        for index, row in enumerate(rows):
            text = self._texts[row.row][len(row.token_ids) :][: min(row.budget, self._width)]
            if self._wrong:
                text = [
                    (token + 1) % 320 if (place + 1) % self._wrong == 0 else token for place, token in enumerate(text)
                ]
            draft.tokens[index, : len(text)] = torch.tensor(text, dtype=torch.int32)
            draft.lengths[index] = len(text)
            draft.sources[index] = 1
        return draft


# ---- tokens ----


def test_plain_decoding_equals_transformers_over_mixed_rows(directory: Path, reference: torch.nn.Module):
    driver = Driver(build(directory).executor)
    prompts = {row: prompt(length, seed=row) for row, length in enumerate((3, 40, 17, 1))}
    driver.begin(0, prompts[0])
    driver.step()
    driver.begin(1, prompts[1])
    driver.begin(2, prompts[2])
    driver.step(chunk=16)  # chunks, a last chunk and a decode in one step
    driver.begin(3, prompts[3])
    for _ in range(12):
        driver.step(chunk=16)
    for row, token_ids in prompts.items():
        generated = driver.generated(row)
        assert len(generated) >= 10
        assert generated == greedy_continuation(reference, token_ids, len(generated))


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_drafts_change_the_number_of_steps_but_no_token(directory: Path, reference: torch.nn.Module, wrong: int):
    prompts = {row: prompt(length, seed=50 + row) for row, length in enumerate((9, 30, 5))}
    texts = {row: [*ids, *greedy_continuation(reference, ids, 30)] for row, ids in prompts.items()}
    oracle = Oracle(texts, wrong=wrong)
    driver = Driver(build(directory, oracle).executor)
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    driver.step(budget=4)
    for _ in range(4):
        driver.step(budget=4)
    for row in prompts:
        generated = driver.generated(row)
        assert generated == texts[row][len(prompts[row]) :][: len(generated)]
        per_round = {0: 5, 1: 1, 2: 2, 3: 3}[wrong]
        rounds = driver.results[row][1:]
        assert all((r.drafted, r.depth, r.source, r.non_draft) == (4, 4, 1, 1) for r in rounds)
        assert all(r.accepted == per_round - 1 and len(r.tokens) == per_round for r in rounds)


def test_budgets_differ_per_row_and_rows_without_one_decode_plainly(directory: Path, reference: torch.nn.Module):
    prompts = {row: prompt(12, seed=70 + row) for row in range(3)}
    texts = {row: [*ids, *greedy_continuation(reference, ids, 20)] for row, ids in prompts.items()}
    driver = Driver(build(directory, Oracle(texts)).executor)
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    driver.step()
    plan = driver.plan(budget=4)
    budgets = (0, 4, 2)
    spans = tuple(
        Span(s.row, s.start, s.token_ids, s.kind, budget, s.block_ids) for s, budget in zip(plan.spans, budgets)
    )
    result = driver.executor.execute(StepPlan(plan.step_id, plan.ends, plan.begins, plan.commits, spans))
    assert [span.drafted for span in result.spans] == [0, 4, 2]
    assert [span.accepted for span in result.spans] == [0, 4, 2]
    for row, span in enumerate(result.spans):
        assert list(span.tokens) == texts[row][13 : 13 + len(span.tokens)]


def test_recompute_after_preemption_continues_the_same_text(directory: Path, reference: torch.nn.Module):
    token_ids = prompt(20, seed=80)
    driver = Driver(build(directory).executor)
    driver.begin(0, token_ids)
    for _ in range(6):
        driver.step()
    driver.resume(0)
    kinds = []
    for _ in range(6):
        plan = driver.plan(chunk=16)
        kinds.append(plan.spans[0].kind)
        driver.settle(plan, driver.executor.execute(plan))
    assert kinds[:3] == [SpanKind.CHUNK, SpanKind.LAST_RECOMPUTE, SpanKind.ROUND]
    assert driver.generated(0) == greedy_continuation(reference, token_ids, len(driver.generated(0)))


@pytest.mark.parametrize("speculator", ["none", "ngram"])
def test_seeded_sampling_is_the_same_with_and_without_drafts(directory: Path, speculator: str):
    # Three tokens to choose from, so that pairs recur and the drafter has something to look up.
    allowed = (10, 20, 30)
    params = SamplingParams(max_tokens=64, temperature=0.7, presence_penalty=0.2, allowed_token_ids=allowed)
    token_ids = prompt(6, seed=90) * 4
    driver = Driver(build(directory, speculator=speculator).executor, blocks_per_row=64)
    driver.begin(0, token_ids, params, seed=123)
    driver.begin(1, token_ids, GREEDY)
    while len(driver.generated(0)) < 40 or len(driver.generated(1)) < 40:
        driver.step(budget=5)
    plain = Driver(build(directory).executor)
    plain.begin(0, token_ids, params, seed=123)
    for _ in range(40):
        plain.step()
    assert driver.generated(0)[:40] == plain.generated(0)[:40]
    if speculator == "ngram":
        assert sum(result.drafted for row in (0, 1) for result in driver.results[row]) > 0


# ---- logprobs ----


def test_logprobs_and_prompt_logprobs_equal_transformers(directory: Path, reference: torch.nn.Module):
    token_ids = prompt(150, seed=95)  # longer than one slice of prompt rows
    params = SamplingParams(max_tokens=64, temperature=0.0, logprobs=2, prompt_logprobs=3)
    driver = Driver(build(directory).executor, blocks_per_row=24)
    driver.begin(0, token_ids, params)
    for _ in range(4):
        driver.step(chunk=100)
    prompts = [entry for result in driver.results[0] for entry in (result.prompt_logprobs or ())]
    with torch.inference_mode():
        expected = reference(torch.tensor([driver.histories[0]])).logits[0].log_softmax(dim=-1)
    assert len(prompts) == 149
    assert len(driver.results[0][0].prompt_logprobs or ()) == 100
    for position, entry in enumerate(prompts, start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[token_ids[position]]), abs=2e-4)
        assert list(entry.top_ids) == row.topk(3).indices.tolist()
    sampled = [entry for result in driver.results[0] for entry in (result.logprobs or ())]
    assert len(sampled) == len(driver.generated(0)) == 3
    for offset, entry in enumerate(sampled):
        row = expected[149 + offset]
        assert (entry.rank, len(entry.top_ids)) == (1, 2)
        assert entry.logprob == pytest.approx(float(row.max()), abs=2e-4)


# ---- failure ----


def test_a_row_with_non_finite_logits_fails_alone_and_leaves_nothing_behind(
    directory: Path, reference: torch.nn.Module
):
    built = build(directory)
    driver = Driver(built.executor)
    prompts = {row: prompt(10, seed=200 + row) for row in range(2)}
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    driver.step()
    pool = built.executor._runner.pool
    pool.values[:, 0] = torch.nan  # a block of row 0
    result = driver.step()
    assert result.spans[0].failure is not None and "non-finite" in result.spans[0].failure
    assert result.spans[0].tokens == ()
    assert result.spans[1].failure is None
    driver.end(0)
    driver.begin(0, prompts[1][:9])  # the poisoned block is used again
    for _ in range(5):
        driver.step()
    assert driver.generated(0) == greedy_continuation(reference, prompts[1][:9], len(driver.generated(0)))
    assert driver.generated(1) == greedy_continuation(reference, prompts[1], len(driver.generated(1)))


class Failing(Oracle):
    """Raises in the named method for row 0."""

    def __init__(self, texts: dict[int, list[int]], method: str) -> None:
        super().__init__(texts)
        self._method = method

    def begin(self, start: SequenceStart) -> None:
        super().begin(start)
        self._fail("begin", start.row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        super().observe(spans)
        self._fail("observe", *(span.row for span in spans))

    def end(self, row: int) -> None:
        super().end(row)
        self._fail("end", row)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self._fail("propose", *(row.row for row in rows))
        return super().propose(rows)

    def _fail(self, method: str, *rows: int) -> None:
        if method == self._method and 0 in rows:
            raise ZeroDivisionError(f"{method} of row 0")


@pytest.mark.parametrize("method", ["begin", "observe"])
def test_a_drafter_that_raises_in_a_row_change_fails_that_row_only(
    directory: Path, reference: torch.nn.Module, method: str, caplog: pytest.LogCaptureFixture
):
    prompts = {row: prompt(10, seed=210 + row) for row in range(2)}
    texts = {row: [*ids, *greedy_continuation(reference, ids, 20)] for row, ids in prompts.items()}
    drafter = Failing(texts, method)
    driver = Driver(build(directory, drafter).executor)
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    with caplog.at_level(logging.CRITICAL):
        results = [driver.step(budget=4) for _ in range(3)]
    assert "ZeroDivisionError" in (results[-1].spans[0].failure or "")
    assert all(result.spans[1].failure is None for result in results)
    assert driver.generated(1) == texts[1][10:][: len(driver.generated(1))]
    driver.end(0)
    drafter._method = "none"
    driver.begin(0, prompts[0])
    driver.step(budget=4)
    driver.step(budget=4)
    assert driver.generated(0) == texts[0][10:][: len(driver.generated(0))]


def test_after_an_exception_the_retry_of_each_span_alone_fails_the_guilty_one(
    directory: Path, reference: torch.nn.Module
):
    prompts = {row: prompt(10, seed=220 + row) for row in range(2)}
    texts = {row: [*ids, *greedy_continuation(reference, ids, 20)] for row, ids in prompts.items()}
    drafter = Failing(texts, "propose")
    driver = Driver(build(directory, drafter).executor)
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    driver.step(budget=4)
    plan = driver.plan(budget=4)
    with pytest.raises(ZeroDivisionError):
        driver.executor.execute(plan)
    with pytest.raises(ZeroDivisionError):
        driver.executor.execute(plan.only(plan.spans[0]))
    alone = driver.executor.execute(plan.only(plan.spans[1]))
    assert list(alone.spans[0].tokens) == texts[1][11:16]
    assert drafter.began == [0, 1]
    assert [(span.row, span.start, list(span.token_ids)) for span in drafter.observed] == [
        (0, 0, prompts[0]),
        (1, 0, prompts[1]),
    ], "row changes were applied once, not once per try"


@pytest.mark.parametrize(
    ("length", "token", "named"), [(5, 0, "budget"), (1, 320, "vocabulary"), (1, -1, "vocabulary"), (-1, 0, "budget")]
)
def test_a_draft_that_breaks_the_contract_is_met_where_it_is_made(directory: Path, length: int, token: int, named: str):
    class Careless(Oracle):
        def propose(self, rows: Sequence[DraftRow]) -> Draft:
            draft = empty_draft(len(rows), 8, torch.device("cpu"))
            draft.lengths.fill_(length)
            draft.tokens.fill_(token)
            return draft

    driver = Driver(build(directory, Careless({})).executor)
    driver.begin(0, prompt(5, seed=1))
    driver.step(budget=4)
    with pytest.raises(ValueError, match=named):
        driver.step(budget=4)


def test_a_device_error_ends_the_engine_and_running_out_of_memory_does_not(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = Driver(build(directory).executor)
    driver.begin(0, prompt(5, seed=1))
    plan = driver.plan()

    def fail(error: Exception) -> None:
        def forward(batch: object) -> object:
            raise error

        monkeypatch.setattr(driver.executor._runner, "forward", forward)

    fail(RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines"))
    with pytest.raises(DeviceFailure, match="illegal memory access") as failure:
        driver.executor.execute(plan)
    assert "\n" not in str(failure.value)
    fail(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        driver.executor.execute(plan.only(plan.spans[0]))


def test_a_span_of_a_row_nobody_holds_or_without_room_raises(directory: Path):
    executor = build(directory).executor
    with pytest.raises(KeyError, match="row 5 holds no sequence"):
        executor.execute(StepPlan(0, (), (), (), (Span(5, 0, (1,), SpanKind.CHUNK, 0, (0,)),)))
    begin = RowBegin(0, tuple(prompt(9, 1)), 9, GREEDY, 1, None)
    span = Span(0, 0, begin.token_ids, SpanKind.LAST_CHUNK, 0, (0,))
    with pytest.raises(ValueError, match="1 blocks were reserved"):
        executor.execute(StepPlan(0, (), (begin,), (), (span,)))


# ---- the step ----


def test_phases_that_ran_are_ordered_and_the_others_are_zero(directory: Path, reference: torch.nn.Module):
    token_ids = prompt(10, seed=230)
    texts = {0: [*token_ids, *greedy_continuation(reference, token_ids, 10)]}
    driver = Driver(build(directory, Oracle(texts)).executor)
    empty = driver.executor.execute(driver.plan())
    assert (empty.spans, empty.target_forwards, empty.phases.spans) == ((), 0, ((0, 0),) * 4)
    driver.begin(0, token_ids)
    prefill = driver.step(budget=4)
    assert prefill.phases.spans[Phase.DRAFT] == (0, 0)
    phases = driver.step(budget=4).phases
    ends = [end for _, end in phases.spans]
    assert all(0 <= start < end for start, end in phases.spans) and ends == sorted(ends)
    driver.begin(1, prompt(20, seed=231))
    chunk = driver.step(chunk=8, rows=[1])
    assert chunk.phases.spans[Phase.ACCEPT] == (0, 0)
    assert (chunk.target_forwards, chunk.draft_forwards) == (1, 0)


def test_a_step_brings_its_answer_back_in_one_copy(directory: Path, monkeypatch: pytest.MonkeyPatch):
    driver = Driver(build(directory, speculator="ngram").executor)
    params = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5, prompt_logprobs=1)
    copies: list[int] = []
    original = torch.Tensor.cpu

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counting)
    driver.begin(0, prompt(4, seed=1) * 5, params)
    driver.begin(1, prompt(30, seed=2))
    for step in range(5):
        driver.step(budget=5)
        assert len(copies) == step + 1


def test_the_drafter_hears_every_computed_position_once_in_order(directory: Path, reference: torch.nn.Module):
    token_ids = prompt(20, seed=240)
    texts = {0: [*token_ids, *greedy_continuation(reference, token_ids, 30)]}
    oracle = Oracle(texts, wrong=3)
    driver = Driver(build(directory, oracle).executor)
    driver.begin(0, token_ids)
    for _ in range(8):
        driver.step(budget=4, chunk=7)
    heard: list[int] = []
    for span in oracle.observed:
        assert span.start == len(heard)
        heard += span.token_ids
    assert heard == driver.histories[0][: len(heard)]
    assert len(heard) >= 20 + 3
    driver.end(0)
    driver.step()
    assert (oracle.began, oracle.ended) == ([0], [0])


class TreeDrafter(Oracle):
    """Two branches from the root, the second being the truth: nodes 0-1 wrong, 2-4 right."""

    def __init__(self, texts: dict[int, list[int]], taps: tuple[int, ...] = ()) -> None:
        super().__init__(texts)
        self.capabilities = Capabilities(max_draft_len=5, sources=("tree",), tree=True, drafts_on_host=True, taps=taps)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = empty_draft(len(rows), 5, torch.device("cpu"))
        parents = torch.full((len(rows), 5), -1, dtype=torch.int32)
        for index, row in enumerate(rows):
            true = self._texts[row.row][len(row.token_ids) :][:3]
            wrong = [(true[0] + 1) % 320, (true[0] + 2) % 320]
            draft.tokens[index] = torch.tensor([*wrong, *true], dtype=torch.int32)
            parents[index] = torch.tensor([-1, 0, -1, 2, 3])
            draft.lengths[index] = 5
        return Draft(draft.tokens, draft.lengths, parents, None, None, draft.sources, 0)


def test_accepted_tree_nodes_are_moved_into_line_and_the_text_stays_the_targets(
    directory: Path, reference: torch.nn.Module
):
    prompts = {row: prompt(length, seed=250 + row) for row, length in enumerate((10, 23))}
    texts = {row: [*ids, *greedy_continuation(reference, ids, 40)] for row, ids in prompts.items()}
    drafter = TreeDrafter(texts)
    driver = Driver(build(directory, drafter).executor)
    for row, token_ids in prompts.items():
        driver.begin(row, token_ids)
    for _ in range(6):
        driver.step(budget=5)
    for row in prompts:
        rounds = driver.results[row][1:]
        assert all((r.drafted, r.depth, r.accepted, r.path) == (5, 3, 3, (2, 3, 4)) for r in rounds)
        assert driver.generated(row) == texts[row][len(prompts[row]) :][: len(driver.generated(row))]


# ---- building ----


def test_defaults_and_limits_are_derived_or_refused_by_name(directory: Path):
    built = build(directory)
    assert (built.num_blocks, built.max_model_len, built.eos_token_ids) == (128, 512, EOS_TOKEN_IDS)
    assert built.kv_bytes == 1024 * 2 * 2 * 2 * 16 * 4
    assert build(directory, max_model_len=100).max_model_len == 100
    for options, named in [
        ({"max_model_len": 513}, "--max-model-len 513"),
        ({"max_model_len": 400, "kv_cache_tokens": 64}, "--kv-cache-tokens"),
        ({"kv_cache_tokens": 4}, "--block-size"),
        ({"device": "tpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"speculator": "psychic"}, "psychic"),
    ]:
        settings = {"dtype": "fp32", "device": "cpu", "kv_cache_tokens": 1024, "block_size": BLOCK_SIZE, **options}
        with pytest.raises(ValueError, match=named):
            build_executor(resolve(str(directory)), ExecutorSettings(**settings))  # type: ignore[arg-type]


def test_cuda_without_a_device_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda"):
        build_executor(resolve(str(directory)), ExecutorSettings(device="cuda"))


@pytest.mark.parametrize("options", [{"max_model_len": 10**8}, {"max_model_len": 64, "kv_cache_tokens": 32}])
def test_a_context_that_cannot_be_is_refused_before_any_weight_is_read(directory: Path, options: dict[str, int]):
    progress: list[int] = []
    with pytest.raises(ValueError, match="--max-model-len"):
        build_executor(
            resolve(str(directory)),
            ExecutorSettings(speculator="none", **options),  # type: ignore[arg-type]
            lambda done, total: progress.append(done),
        )
    assert progress == []
