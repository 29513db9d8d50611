"""Stand-ins for the engine's neighbours, and an engine put together from its real policy and these.

`FakeExecutor` is a strict one: it keeps a KV store indexed by block and refuses any plan that a real executor could not
run (wrong row changes, wrong positions, slots not covered, a slot whose content is not the row's own history).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.accounts import EngineIdentity
from engine.core import EngineCore
from engine.executor import Executor
from engine.intake import PolicySettings
from engine.ledger import Ledger
from engine.plan import RowBegin, Span, SpanKind, SpanResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Arrival
from engine.speculation.batch_table import NO_TABLE, BatchTable
from protocol.codec import decode_counters
from protocol.counters import Counters
from protocol.messages import Capacity, Close, PhaseTimes, SequenceOutput, SimScript, StepOutput, Submit
from protocol.reasons import CloseReason
from protocol.sampling import SamplingParams

EOS = 2
VOCAB = 1000


class FakeClock:
    """A monotonic clock that moves 1000 ns per reading, and further when told."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        self.now += 1_000
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


class FakeInbox:
    """An inbox that is filled by hand."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.paused_frontends: frozenset[str] = frozenset()
        self.waits: list[float | None] = []
        self.on_wait: Callable[[], bool] | None = None

    def put(self, message: object, frontend_id: str = "f") -> None:
        self.arrivals.append((frontend_id, message))  # type: ignore[arg-type]

    def drain(self) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        if self.on_wait is not None:
            return self.on_wait()
        return bool(self.arrivals)

    def wake(self) -> None:
        pass

    def peek_closes(self) -> set[tuple[str, int, int]]:
        return {(f, m.request_id, m.index) for f, m in self.arrivals if isinstance(m, Close)}

    def paused(self) -> frozenset[str]:
        return self.paused_frontends


class FakePublisher:
    """Remembers every step."""

    def __init__(self, frontend_ids: Sequence[str] = ("f",)) -> None:
        self.frontend_ids = list(frontend_ids)
        self.steps: list[dict[str, StepOutput]] = []
        self.snapshots: list[StepOutput] = []
        self.refused_messages = 0
        self.frontends_cut_off = 0
        self.has_announced_drain = False

    def announce_drain(self) -> None:
        self.has_announced_drain = True

    def frontends(self) -> list[str]:
        return list(self.frontend_ids)

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        self.steps.append(outputs)
        self.snapshots.append(snapshot)

    def outputs(self, frontend_id: str = "f") -> list[SequenceOutput]:
        return [output for step in self.steps if frontend_id in step for output in step[frontend_id].outputs]

    def counters(self) -> Counters:
        return decode_counters(self.snapshots[-1].counters)


def next_token(seed: int, history: Sequence[int], eos_every: int = 0) -> int:
    """The fake target: a function of the seed and the whole history; EOS about once in `eos_every` tokens."""
    word = hash((seed, *history))
    if eos_every and word % eos_every == 0:
        return EOS
    return 10 + word % (VOCAB - 10)


class FakeExecutor(Executor):
    """A target that is `next_token`, and a drafter that is right as often as `acceptance` says."""

    def __init__(self, block_size: int, max_draft_len: int, acceptance: float = 0.6, seed: int = 0) -> None:
        self.max_draft_len = max_draft_len
        self.acceptance = acceptance
        self.eos_every = 0
        self.plans: list[StepPlan] = []
        self.fail_if: Callable[[Span], Exception | None] = lambda span: None
        self.retract_if: Callable[[Span], bool] = lambda span: False
        self.during: Callable[[], None] = lambda: None
        self.rows: dict[int, RowBegin] = {}
        self.history: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self._block_size = block_size
        self._random = random.Random(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._apply(plan)
        for span in plan.spans:
            error = self.fail_if(span)
            if error is not None:
                raise error
        results = tuple(self._run(span) for span in plan.spans)
        self.during()
        return StepResult(results, PhaseTimes(((0, 0), (10, 20), (20, 90), (90, 100)), False), bool(results), 0)

    def _apply(self, plan: StepPlan) -> None:
        for commit in plan.commits:
            self.history[commit.row].extend(commit.token_ids)
            self.computed[commit.row] = commit.num_computed
        for row in plan.ends:
            del self.rows[row], self.history[row], self.computed[row]
        for begin in plan.begins:
            assert begin.row not in self.rows, f"row {begin.row} begins twice"
            self.rows[begin.row] = begin
            self.history[begin.row] = list(begin.token_ids)
            self.computed[begin.row] = -1  # the first span says what the prefix cache gave
        assert len({span.row for span in plan.spans}) == len(plan.spans), "a row has two spans"

    def _run(self, span: Span) -> SpanResult:
        history, end = self.history[span.row], span.start + len(span.token_ids)
        assert list(span.token_ids) == history[span.start : end], "the span's tokens are not the row's history"
        assert self.computed[span.row] in (-1, span.start), "the span does not start behind what is computed"
        assert (end == len(history)) == span.kind.samples
        assert span.budget == 0 or span.kind is SpanKind.ROUND
        self._write(span, span.start, span.token_ids)
        for position in range(end):
            assert self._kv[self._slot(span, position)] == history[position], f"foreign KV at position {position}"
        self.computed[span.row] = end if not span.kind.samples else self.computed[span.row]
        if not span.kind.samples:
            return SpanResult(0, 0, 0, 0, 0, (), None, None, None)
        return self._sample(span, history)

    def _sample(self, span: Span, history: list[int]) -> SpanResult:
        seed = self.rows[span.row].seed
        drafted = self._random.randint(0, min(span.budget, self.max_draft_len))
        tokens: list[int] = []
        draft: list[int] = []
        for _ in range(drafted):
            token = next_token(seed, history + tokens, self.eos_every)
            if len(tokens) == len(draft) and self._random.random() < self.acceptance:
                tokens.append(token)
                draft.append(token)
            else:
                draft.append(5)  # never what the target wants
        accepted = len(tokens)
        tokens.append(next_token(seed, history + tokens, self.eos_every))
        self._write(span, len(history), draft)
        if self.retract_if(span):
            return SpanResult(0, 0, 0, 0, 0, (), None, None, None, retracted=True)
        return SpanResult(drafted, drafted, 0, accepted, 1, tuple(tokens), None, None, None)

    def _write(self, span: Span, start: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, start=start):
            self._kv[self._slot(span, position)] = token_id

    def _slot(self, span: Span, position: int) -> tuple[int, int]:
        return span.block_ids[position // self._block_size], position % self._block_size


@dataclass
class Engine:
    """An engine of real policy over fakes, or over another executor."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    block_size: int = 4
    num_blocks: int = 64
    max_model_len: int = 200
    max_draft_len: int = 4
    prefix_caching: bool = True
    max_num_queued_requests: int = 100
    max_num_queued_tokens: int = 10_000
    unsupported_sampling: frozenset[str] = frozenset()
    executor: Executor | None = None
    takes_scripts: bool = False
    queue_timeout_ns: int | None = None
    drafts_trees: bool = False
    draft_len_by_batch: BatchTable = NO_TABLE
    adaptive_draft: bool = False
    frontends: Sequence[str] = ("f",)
    check_laws: bool = True
    clock: FakeClock = field(default_factory=FakeClock)
    inbox: FakeInbox = field(default_factory=FakeInbox)

    def __post_init__(self) -> None:
        capacity = Capacity(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_queued_requests=self.max_num_queued_requests,
            max_num_queued_tokens=self.max_num_queued_tokens,
            prefix_caching=self.prefix_caching,
        )
        settings = PolicySettings(
            capacity,
            self.max_draft_len,
            VOCAB,
            frozenset({EOS}),
            self.unsupported_sampling,
            self.takes_scripts,
            self.queue_timeout_ns,
            drafts_trees=self.drafts_trees,
            draft_len_by_batch=self.draft_len_by_batch,
            adaptive_draft=self.adaptive_draft,
        )
        self.fake = FakeExecutor(self.block_size, self.max_draft_len)
        self.publisher = FakePublisher(self.frontends)
        self.ledger = Ledger(EngineIdentity("0", 7), self.max_draft_len, 1, self.clock, self.check_laws)
        seeds = random.Random(5)
        self.scheduler = Scheduler(settings, self.ledger, self.clock, lambda: seeds.getrandbits(63))
        executor = self.executor or self.fake
        self.core = EngineCore(self.inbox, self.publisher, self.scheduler, self.ledger, executor, self.clock)

    @property
    def counters(self) -> Counters:
        return self.ledger.counters

    def submit(self, request_id: int, prompt: Sequence[int] = (10, 11, 12), **options: object) -> None:
        frontend_id = str(options.pop("frontend_id", "f"))
        self.inbox.put(submit(request_id, prompt, **options), frontend_id)

    def close(
        self, request_id: int, index: int = 0, reason: CloseReason = CloseReason.CLIENT_GONE, kept: int = 0
    ) -> None:
        self.inbox.put(Close(request_id, index, reason, kept))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
            self.scheduler.check_integrity()

    def run_dry(self, max_steps: int = 2000) -> None:
        """Step until nothing runs, waits or arrives."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work or self.inbox.arrivals):
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: int, child: int = 0, frontend_id: str = "f") -> list[int]:
        """The child's tokens as its client gets them; fails on a gap."""
        tokens: list[int] = []
        for output in self.child_outputs(request_id, child, frontend_id):
            if output.token_ids:
                assert output.first_index == len(tokens), "the stream has a gap or a repetition"
                tokens.extend(output.token_ids)
        return tokens

    def child_outputs(self, request_id: int, child: int = 0, frontend_id: str = "f") -> list[SequenceOutput]:
        outputs = self.publisher.outputs(frontend_id)
        return [output for output in outputs if output.request_id == request_id and output.index == child]

    def finishes(self, request_id: int, child: int = 0, frontend_id: str = "f") -> list[object]:
        return [o.finish for o in self.child_outputs(request_id, child, frontend_id) if o.finish is not None]


def submit(
    request_id: int,
    prompt: Sequence[int] = (10, 11, 12),
    *,
    n: int = 1,
    remaining_ns: int | None = None,
    priority: int = 0,
    trace_level: int = 0,
    awaits_close: bool = False,
    sim: SimScript | None = None,
    **sampling: object,
) -> Submit:
    """A Submit whose other options are sampling parameters; max_tokens 8 and seed = request_id unless given."""
    options = {"max_tokens": 8, "seed": request_id, **sampling}
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Submit(request_id, tuple(prompt), params, n, remaining_ns, priority, trace_level, awaits_close, sim)


def plain_tokens(prompt: Sequence[int], seed: int, max_tokens: int, eos_every: int = 0) -> list[int]:
    """What the fake target says without speculation, one token at a time."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(next_token(seed, [*prompt, *tokens], eos_every))
        if tokens[-1] == EOS:
            break
    return tokens
