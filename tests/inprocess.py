"""The real engine in one process and without sockets: core, scheduler, ledger and model executor, filled and read by hand.

Owns the assembly and the reading of what was published; never decides what a test claims. Every step checks the laws of
the published counters and the blocks of every live sequence. Used by tests that need a model behind the whole engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.accounts import EngineIdentity
from engine.construction import ExecutorSettings, build_executor
from engine.core import EngineCore
from engine.executor import Executor
from engine.intake import PolicySettings
from engine.kv.pool import KVPool, KVShape
from engine.ledger import Ledger
from engine.model.attention import SpanLayout
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.device import choose_device, choose_dtype
from engine.model.grouped import GroupedAttention
from engine.model.weights import load_model
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.speculation.batch_table import NO_TABLE, BatchTable
from engine.speculation.names import PREDICTION
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.speculator import Speculator
from protocol.counters import Counters
from protocol.messages import Capacity, Close, Finish, Load, SequenceOutput, Submit, TokenLogprobs
from protocol.model_files import resolve
from protocol.reasons import CloseReason
from tests.draft_files import draft_files
from tests.fakes import FakeClock, FakeInbox, FakePublisher

FRONTEND = "f"
MAX_STEPS = 5000

ChildId = tuple[int, int]  # (request_id, child)


@dataclass(frozen=True)
class Shape:
    """What an engine is given to work with. Sizes in tokens unless named otherwise."""

    max_num_seqs: int = 6
    max_num_batched_tokens: int = 256
    block_size: int = 4
    num_blocks: int = 144
    prefix_caching: bool = True
    device: str = "cpu"
    dtype: str = "fp32"
    draft_len_by_batch: BatchTable = NO_TABLE
    adaptive_draft: bool = False


@dataclass(frozen=True)
class Drafter:
    """A drafter setting: a name of the registry with its settings, or a speculator that a test made itself."""

    label: str
    name: str = "none"
    settings: SpeculationSettings = field(default_factory=SpeculationSettings)
    oracle: Speculator | None = None


@dataclass(frozen=True)
class Answer:
    """All that one child's client received."""

    token_ids: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


class WatchedExecutor(Executor):
    """An executor under observation: `before` and `during` run around every plan, the latter while the step is open.

    What they raise looks to the engine like a failure of the executor: let them note, and judge later.
    """

    def __init__(self, inner: Executor) -> None:
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.during: Callable[[StepPlan], None] = lambda plan: None
        self._inner = inner

    def execute(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        result = self._inner.execute(plan)
        self.during(plan)
        return result


class InProcessEngine:
    """One engine over the model in `directory`."""

    def __init__(self, directory: Path, shape: Shape, drafter: Drafter) -> None:
        built = build_executor(
            resolve(str(directory)),
            ExecutorSettings(
                dtype=shape.dtype,
                device=shape.device,
                kv_cache_tokens=shape.num_blocks * shape.block_size,
                block_size=shape.block_size,
                max_num_seqs=shape.max_num_seqs,
                speculator=drafter.name,
                speculation=settings_for(drafter, directory),
            ),
        )
        if drafter.oracle is not None:
            built.executor._speculator = drafter.oracle  # oracles are not in the registry: no user can start them
        self.capabilities = built.capabilities if drafter.oracle is None else drafter.oracle.capabilities
        self.executor = WatchedExecutor(built.executor)
        self.inbox, self.publisher, clock = FakeInbox(), FakePublisher([FRONTEND]), FakeClock()
        width, num_sources = self.capabilities.max_draft_len, len(self.capabilities.sources)
        policy = PolicySettings(
            _capacity(shape, built.max_model_len),
            width,
            built.arch.vocab_size,
            frozenset(built.eos_token_ids),
            self.capabilities.unsupported_sampling,
            lookahead=self.capabilities.lookahead,
            takes_predictions=PREDICTION in self.capabilities.sources,
            drafts_trees=self.capabilities.tree,
            draft_len_by_batch=shape.draft_len_by_batch,
            adaptive_draft=shape.adaptive_draft,
        )
        ledger = Ledger(EngineIdentity("0", 7), width, num_sources, clock, check_laws=True)
        self.scheduler = Scheduler(policy, ledger, clock, _no_seed)
        self._core = EngineCore(self.inbox, self.publisher, self.scheduler, ledger, self.executor, clock)

    @property
    def counters(self) -> Counters:
        """As published by the last step; before the first one, as they begin."""
        if self.publisher.snapshots:
            return self.publisher.counters()
        return Counters.zero(self.capabilities.max_draft_len, len(self.capabilities.sources))

    @property
    def load(self) -> Load:
        return self.publisher.snapshots[-1].load

    @property
    def is_busy(self) -> bool:
        return self.scheduler.has_work or bool(self.inbox.arrivals)

    @property
    def num_steps(self) -> int:
        return len(self.publisher.steps)

    def submit(self, submit: Submit) -> None:
        self.inbox.put(submit, FRONTEND)

    def leave(self, request_id: int) -> None:
        """The client of all the request's children goes away."""
        self.inbox.put(Close(request_id, -1, CloseReason.CLIENT_GONE, 0), FRONTEND)

    def step(self) -> None:
        self._core.step()
        self.counters.check()
        self.scheduler.check_integrity()

    def run_dry(self, checks: bool = True) -> None:
        """Step until nothing runs, waits or arrives; without `checks` at full speed."""
        last = self.num_steps + MAX_STEPS
        step = self.step if checks else self._core.step
        while self.is_busy:
            if self.num_steps > last:
                raise AssertionError(f"still busy after {MAX_STEPS} steps")
            step()

    def forget(self) -> None:
        """Drop what was published; request ids may be used again."""
        self.publisher.steps.clear()

    def outputs(self) -> dict[ChildId, list[SequenceOutput]]:
        """Everything published so far, per child, in order."""
        outputs: dict[ChildId, list[SequenceOutput]] = {}
        for output in self.publisher.outputs(FRONTEND):
            outputs.setdefault((output.request_id, output.index), []).append(output)
        return outputs

    def answers(self) -> dict[ChildId, Answer]:
        """What every child's client received; a gap, a repetition or more after the end is an AssertionError."""
        return {child: answer_of(outputs) for child, outputs in self.outputs().items()}


def settings_for(drafter: Drafter, target: Path) -> SpeculationSettings:
    """The drafter's settings, with tiny files next to the target's where it needs some and the test names none."""
    if drafter.settings.draft_model is not None:
        return drafter.settings
    names = drafter.name.removeprefix("first_of:").split(",")
    paths = [draft_files(name, target.with_name(f"{target.name}-{name}"), target) for name in names]
    found = [path for path in paths if path is not None]
    return replace(drafter.settings, draft_model=str(found[0])) if found else drafter.settings


def answer_of(outputs: Sequence[SequenceOutput]) -> Answer:
    """One child's outputs put together, up to the one that ends it.

    A Close that crossed the last output on its way is answered as well, by an output that says nothing new.
    """
    ends = [index for index, output in enumerate(outputs) if output.finish is not None]
    for output in outputs[ends[0] + 1 :] if ends else ():
        assert not (output.token_ids or output.round or output.prompt), f"something came after the end: {outputs}"
    outputs = outputs[: ends[0] + 1] if ends else outputs
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    for output in outputs:
        if output.token_ids:
            assert output.first_index == len(token_ids), f"a gap or a repetition: {outputs}"
        token_ids += output.token_ids
        logprobs += output.logprobs or ()
        if output.prompt is not None and output.prompt.logprobs is not None:
            prompt_logprobs = output.prompt.logprobs
    return Answer(tuple(token_ids), outputs[-1].finish, tuple(logprobs), prompt_logprobs)


class Logits:
    """The model alone, one forward over a whole text: the logits that `EngineCore` never shows."""

    def __init__(self, directory: Path, device: str, dtype: str) -> None:
        self.device = choose_device(device)
        self.model: DecoderModel = load_model(resolve(str(directory)), choose_dtype(dtype, self.device), self.device)

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 [len(token_ids), V] on the CPU: row i follows token i."""
        arch, count = self.model.arch, len(token_ids)
        shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, count, self.model.dtype)
        pool = KVPool(shape, 1, self.device)
        attention = GroupedAttention(pool, arch.num_heads)
        tokens, positions = pool.slots_tensor(token_ids), pool.slots_tensor(range(count))
        with torch.inference_mode():
            layout = attention.layout([SpanLayout(0, count, (0,))])
            hidden, _ = self.model.forward(ForwardInput(tokens, positions, positions), attention, layout, ())
            return self.model.logits(hidden).float().cpu()


def _capacity(shape: Shape, max_model_len: int) -> Capacity:
    return Capacity(
        max_model_len=max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        max_num_queued_requests=1000,
        max_num_queued_tokens=1_000_000,
        prefix_caching=shape.prefix_caching,
    )


def _no_seed() -> int:
    raise AssertionError("a request without a seed cannot be compared")
