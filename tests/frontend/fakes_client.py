"""An engine for frontend tests: plays token lists through the production `Stream`, answers every Close, and remembers.

The rules of ending (EOS, stop tokens, max_tokens, closing outputs) are the engine's; the wire is left out.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from frontend.admission import Admission
from frontend.config import FrontendConfig
from frontend.engine_client import EngineLost
from frontend.engine_families import EngineStatus, EngineView
from frontend.metrics import FrontendMetrics
from frontend.request_trace import RequestTrace
from frontend.server import Server
from frontend.streams import ALL_CHILDREN, Stream
from frontend.text import Text, load_text
from protocol.codec import encode_counters
from protocol.counters import Counters
from protocol.messages import (
    SCHEMA_VERSION,
    Capacity,
    Finish,
    Hello,
    Load,
    ProfileAction,
    ProfileOutcome,
    ProfileReply,
    PromptReport,
    SequenceOutput,
    SimScript,
    TokenLogprobs,
)
from protocol.model_files import resolve
from protocol.reasons import CloseReason, FinishReason, RejectReason
from protocol.sampling import SamplingParams

EOS = 2
MODEL = "SmolLM2-135M-Instruct"
Runs = Sequence[Sequence[int]]


@functools.cache
def embedded_text() -> Text:
    return load_text(resolve("embedded"))


def hello(max_draft_len: int = 5, max_model_len: int = 128, executor: str = "sim", num_blocks: int = 100) -> Hello:
    capacity = Capacity(
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=16,
        num_blocks=num_blocks,
        max_num_queued_requests=16,
        max_num_queued_tokens=10_000,
        prefix_caching=True,
    )
    sources = ("ngram",) if max_draft_len else ()
    return Hello(
        engine_id="0",
        epoch=1_700_000_000_000_000_000,
        schema=SCHEMA_VERSION,
        model_name=MODEL,
        vocab_size=49152,
        vocabulary_hash="",
        capacity=capacity,
        speculator="ngram" if max_draft_len else "none",
        max_draft_len=max_draft_len,
        sources=sources,
        executor=executor,
        dtype="fp32",
        device="cpu",
        step_id=0,
        counters=encode_counters(Counters.zero(max_draft_len, len(sources))),
        load=load(),
        monotonic_ns=0,
        wall_ns=0,
    )


def load(**changes: int) -> Load:
    idle = Load(
        running=0,
        waiting=0,
        waiting_tokens=0,
        blocks_used=0,
        blocks_total=100,
        frontends=1,
        paused=0,
        draining=False,
    )
    return msgspec.structs.replace(idle, **changes)


@dataclass
class Submitted:
    """One request the fake engine was given, and what became of it."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int
    awaits_close: bool
    sim: SimScript | None
    priority: int
    stream: Stream
    prediction_token_ids: tuple[int, ...] = ()
    scope: str = ""
    closes: list[tuple[int, CloseReason, int]] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)

    def output(self, index: int, token_ids: Sequence[int] = (), **fields: object) -> None:
        """Deliver one step of one child."""
        first = self.sent.get(index, 0)
        self.sent[index] = first + len(token_ids)
        values: dict[str, object] = {"logprobs": None, "prompt": None, "round": None, "events": (), "finish": None}
        if self.sampling.logprobs is not None:
            values["logprobs"] = tuple(logprobs_of(token, self.sampling.logprobs) for token in token_ids)
        values.update(fields)
        output = SequenceOutput(
            request_id=self.stream.request_id,
            index=index,
            first_index=first,
            token_ids=tuple(token_ids),
            **values,  # type: ignore[arg-type]
        )
        self.stream.accept(output)


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is the likeliest; the others follow by id."""
    tops = tuple((token_id + offset) % 49152 for offset in range(count))
    return TokenLogprobs(-0.5, 1, tops, tuple(-0.5 - rank for rank in range(count)))


class FakeEngineClient:
    """`play` maps a submission to the runs its children emit; by default the runs of its `sim` field."""

    def __init__(self, engine_hello: Hello | None = None, play: Callable[[Submitted], Runs] | None = None) -> None:
        self.hello: Hello | None = hello() if engine_hello is None else engine_hello
        self.down_reason: str | None = None
        self.is_draining = False
        self.submitted: list[Submitted] = []
        self.fences_missed = 0
        self.fences = 0
        self.autoplay = True
        self.reject: RejectReason | None = None
        self.cached_tokens = 0
        self._play = play or (lambda submitted: submitted.sim.runs if submitted.sim else ((582, 827),))
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        n: int = 1,
        *,
        awaits_close: bool = False,
        sim: SimScript | None = None,
        remaining_ns: int | None = None,
        priority: int = 0,
        trace: RequestTrace | None = None,
        prediction_token_ids: Sequence[int] = (),
        scope: str = "",
    ) -> Stream:
        if self.hello is None:
            raise EngineLost(self.down_reason or "down")
        number = len(self.submitted) + 1
        stream = Stream(number, n, awaits_close=awaits_close, send_close=self._on_close, sources=self.hello.sources)
        if trace is not None:
            raise NotImplementedError("this engine has no clock: traces are tested with the real attachment")
        given = Submitted(
            tuple(prompt_token_ids),
            sampling,
            n,
            awaits_close,
            sim,
            priority,
            stream,
            tuple(prediction_token_ids),
            scope,
        )
        self.submitted.append(given)
        if self.reject is not None:
            for index in range(n):
                given.output(index, finish=Finish(FinishReason.ERROR, message="no room", rejected=self.reject))
        elif self.autoplay:
            task = asyncio.get_running_loop().create_task(self._run(given))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    @property
    def statuses(self) -> list[EngineStatus]:
        return [EngineStatus("0", "ipc:///engine", self.down_reason)]

    async def profile(self, action: ProfileAction, timeout_s: float, engine_id: str | None = None) -> ProfileReply:
        return ProfileReply("0", 1, 1, ProfileOutcome.REFUSED, "this engine never profiles")

    async def fence(self) -> "Fence":
        self.fences += 1
        return Fence(missed=self.fences <= self.fences_missed)

    def lose(self, reason: str) -> None:
        """The engine dies: open streams fail, nothing can be submitted."""
        self.hello, self.down_reason = None, reason
        for given in self.submitted:
            given.stream.fail(reason)

    def finish_last(self) -> None:
        """The engine takes no new requests; open streams go on."""
        self.hello, self.is_draining = None, True
        self.down_reason = "engine '0' at ipc:///engine is shutting down"

    def report(self, given: Submitted) -> None:
        """The prompt is done; it gives no token."""
        count = given.sampling.prompt_logprobs
        logprobs = None
        if count is not None:
            logprobs = (None, *(logprobs_of(token, count) for token in given.prompt_token_ids[1:]))
        given.output(0, prompt=PromptReport(len(given.prompt_token_ids), self.cached_tokens, 0, 1_000_000, logprobs))

    async def _run(self, given: Submitted) -> None:
        self.report(given)
        for run in self._play(given):
            await asyncio.sleep(0)
            for index in range(given.n):
                self._step(given, index, run)
        for index in range(given.n):
            self._end(given, index, (), Finish(FinishReason.STOP))

    def _step(self, given: Submitted, index: int, run: Sequence[int]) -> None:
        if index in given.closed or index in given.finished:
            return
        committed: list[int] = []
        finish = None
        for token in run:
            committed.append(token)
            finish = self._finish(given, token, given.sent.get(index, 0) + len(committed))
            if finish is not None:
                break
        if finish is None:
            given.output(index, committed)
        else:
            self._end(given, index, committed, finish)

    def _finish(self, given: Submitted, token: int, count: int) -> Finish | None:
        if token == EOS and not given.sampling.ignore_eos:
            return Finish(FinishReason.STOP)
        if token in given.sampling.stop_token_ids:
            return Finish(FinishReason.STOP, stop_token_id=token)
        return Finish(FinishReason.LENGTH) if count >= given.sampling.max_tokens else None

    def _end(self, given: Submitted, index: int, tokens: Sequence[int], finish: Finish) -> None:
        if index not in given.closed and index not in given.finished:
            given.finished.add(index)
            given.output(index, tokens, finish=finish)

    def _on_close(self, request_id: int, index: int, reason: CloseReason, kept: int) -> None:
        given = self.submitted[request_id - 1]
        given.closes.append((index, reason, kept))
        for child in range(given.n) if index == ALL_CHILDREN else (index,):
            if child not in given.closed:
                given.closed.add(child)
                ended = FinishReason.ABORT if reason is CloseReason.CLIENT_GONE else FinishReason.STOP
                asyncio.get_running_loop().call_soon(functools.partial(given.output, child, finish=Finish(ended)))


@dataclass(frozen=True)
class Fence:
    missed: bool


def server_over(engine: FakeEngineClient, **options: object) -> Server:
    """A frontend's shared state over the fake engine, with the embedded model's text side."""
    config = FrontendConfig(**options)  # type: ignore[arg-type]
    metrics = FrontendMetrics(8192)
    counters = Counters.zero(engine.hello.max_draft_len, len(engine.hello.sources)) if engine.hello else None
    first_hello = engine.hello

    def views() -> list[EngineView]:
        if first_hello is None or counters is None:
            return []
        return [EngineView(first_hello, counters, load(), first_hello.step_id, up=engine.hello is not None)]

    return Server(
        config=config,
        engine=engine,
        text=embedded_text(),
        metrics=metrics,
        admission=Admission(config, metrics),
        views=views,
        model_name=MODEL,
        started_s=1_700_000_000,
    )
