"""One HTTP request's work at the engine: its prompts, their children, and what is measured of them.

Owns the submits, the closes, whether a lost engine's work begins anew at another, and the per-request observations; every
child is recorded exactly once, however it ends. Never formats an answer. Used by `frontend.completions` as `async with`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from frontend.choices import Choice, TextSettings
from frontend.deadlines import Deadline
from frontend.errors import ApiError, overloaded
from frontend.metrics import FrontendMetrics
from frontend.observations import FinishedChoice
from frontend.packed_logprobs import PackedLogprobs, most_bytes
from frontend.prompt_run import OutputStream, Prompt, PromptRun, Times
from frontend.request_trace import RequestTrace
from frontend.spans import TraceLevel
from frontend.streams import EngineLost
from frontend.tokenizer import Tokenizer
from protocol.messages import Finish, SequenceOutput, SimScript
from protocol.reasons import FinishReason, RejectReason
from protocol.sampling import SamplingParams

# A close is answered by the engine's next step; the longest step is a prefill of a few seconds.
CLOSE_ANSWER_S = 10.0

_REJECTION_LABELS = {
    RejectReason.QUEUE_FULL: "max_num_queued_reqs",
    RejectReason.QUEUED_TOKENS_FULL: "max_num_queued_tokens",
    RejectReason.EXPIRED: "expired",
    RejectReason.DRAINING: "draining",
    RejectReason.QUEUE_TIMEOUT: "queue_timeout",
}

logger = logging.getLogger(__name__)


class Submitter(Protocol):
    """What takes requests (`frontend.engine_pool.EnginePool`)."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        n: int,
        *,
        awaits_close: bool,
        sim: SimScript | None,
        remaining_ns: int | None,
        priority: int,
        trace: RequestTrace | None,
        prediction_token_ids: Sequence[int],
        scope: str,
    ) -> OutputStream: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request. Children are numbered prompt by prompt."""

    prompts: tuple[Prompt, ...]
    n: int
    settings: TextSettings
    priority: int = 0
    sim: SimScript | None = None
    asked_max_tokens: int | None = None
    operation: str = "text_completion"  # gen_ai.operation.name
    deadline: Deadline | None = None
    prediction: tuple[int, ...] = ()  # tokens that the client expects as the answer
    scope: str = ""  # whose text it is (`frontend.gate`)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def most_logprob_bytes(self) -> int:
        """What its log-probabilities can take at most while they wait for the answer to be written."""
        return sum(
            self.n * most_bytes(prompt.sampling.max_tokens, prompt.sampling.logprobs)
            + most_bytes(len(prompt.token_ids), prompt.sampling.prompt_logprobs)
            for prompt in self.prompts
        )


@dataclass(slots=True)
class Generation:
    """Runs a job. `arrived_s`: when its HTTP request came, on `clock`."""

    client: Submitter
    tokenizer: Tokenizer
    job: Job
    metrics: FrontendMetrics
    arrived_s: float
    clock: Callable[[], float] = time.monotonic
    trace: RequestTrace | None = None
    _running: list[PromptRun] = field(default_factory=list)
    _recorded: set[int] = field(default_factory=set)
    _has_ended: bool = False
    _failure: ApiError | EngineLost | None = None
    _end_reason: str = "abort"  # of children that have not ended when the request does

    async def __aenter__(self) -> "Generation":
        job = self.job
        try:
            with nullcontext() if self.trace is None else self.trace.stage("api_server_dispatch", TraceLevel.ROUNDS):
                for prompt in job.prompts:
                    self._submit(prompt)
        except BaseException:
            for running in self._running:  # all or nothing: a list of prompts is never half run
                running.stream.abandon()
            raise
        self.metrics.submitted(job.n, job.asked_max_tokens, self._engine_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self._end_reason)

    def end(self, reason: str) -> None:
        """Abandon what still runs and record it as ended for `reason`. Idempotent; leaving the block does it too."""
        for running in self._running:
            if running.task is not None and not running.task.cancel():
                running.task.exception()  # it has ended: with outputs, or with a loss, that nobody needs any more
            running.task = None
            if not running.is_over:
                running.stream.abandon()
            for child in range(len(running.choices)):
                self._record(running, child, reason)
        if not self._has_ended:
            self._has_ended = True
            self.metrics.request_ended(
                max((choice.num_tokens for choice in self.choices), default=0),
                seconds=self.clock() - self.arrived_s,
                operation=self.job.operation,
                error_type=None if self._is_whole and reason != "error" else reason,  # whole, and lost in writing it
                trace=self._exemplar,
                engine=self._engine_id,
            )

    def _submit(self, prompt: Prompt) -> None:
        job = self.job
        stream = self.client.submit(
            prompt.token_ids,
            prompt.sampling,
            job.n,
            awaits_close=job.settings.awaits_close,
            sim=job.sim,
            remaining_ns=None if job.deadline is None else job.deadline.remaining_ns,
            priority=job.priority,
            trace=self.trace,
            prediction_token_ids=job.prediction,
            scope=job.scope,
        )
        first = len(self._running) * job.n
        choices = [self._fresh(first + child) for child in range(job.n)]
        self._running.append(PromptRun(prompt, stream, choices, self.clock()))

    def _fresh(self, index: int) -> Choice:
        return Choice(index, self.tokenizer, self.job.settings)

    @property
    def choices(self) -> list[Choice]:
        """Every child, in the client's order. One that begins anew is another object."""
        return [choice for running in self._running for choice in running.choices]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(running.report.num_cached_tokens for running in self._running if running.report is not None)

    @property
    def _is_whole(self) -> bool:
        """Every child ended by itself: the request succeeded."""
        return all(choice.is_complete for choice in self.choices)

    @property
    def _engine_id(self) -> str | None:
        """Of the first prompt's engine: what is measured once per request is measured there."""
        return self._running[0].stream.engine_id if self._running else None

    @property
    def _exemplar(self) -> tuple[str, str] | None:
        return None if self.trace is None else self.trace.exemplar

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None when it has none."""
        times = [times.first_token_s for running in self._running for times in running.times]
        reached = [first_s for first_s in times if first_s is not None]
        return min(reached) - self.arrived_s if reached else None

    def prompt_of(self, choice: Choice) -> tuple[Prompt, PackedLogprobs | None]:
        """A child's prompt, and its log-probabilities where they were asked for and are there."""
        running = self._running[choice.index // self.job.n]
        return running.prompt, running.prompt_logprobs

    async def changed(self) -> list[Choice]:
        """Wait for the engine and return the children that moved; empty once all have ended.

        Raises ApiError when a child failed, and `EngineLost` when an engine was and nobody can begin anew. The rest is ended
        by leaving the block.
        """
        try:
            while self._failure is None and (live := [running for running in self._running if not running.is_over]):
                arrived = await self._next(live)
                if not arrived:
                    return self._give_up_waiting(live)
                now_s = self.clock()
                moved = [choice for running, news in arrived for choice in self._take(running, news, now_s)]
                if moved:
                    return moved  # what was said before a failure is still to be delivered; the error comes next
            if self._failure is not None:
                raise self._failure
        except Exception:
            self._end_reason = "error" if self._end_reason == "abort" else self._end_reason
            raise
        return []

    async def _next(self, live: list[PromptRun]) -> list[tuple[PromptRun, list[SequenceOutput] | EngineLost]]:
        """What has arrived; empty when the engine owes nothing but answers and is late with them."""
        closing = all(choice.is_closed or choice.is_closing for running in live for choice in running.choices)
        if len(live) == 1 and live[0].task is None and not closing:
            try:
                return [(live[0], await live[0].stream.next())]  # the common case costs no task
            except EngineLost as lost:
                return [(live[0], lost)]
        for running in live:
            if running.task is None:
                running.task = asyncio.ensure_future(running.stream.next())
        tasks = {running.task: running for running in live if running.task is not None}
        timeout_s = CLOSE_ANSWER_S if closing else None
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        arrived: list[tuple[PromptRun, list[SequenceOutput] | EngineLost]] = []
        for task in done:
            tasks[task].task = None
            try:
                arrived.append((tasks[task], task.result()))
            except EngineLost as lost:
                arrived.append((tasks[task], lost))
        return arrived

    def _take(self, running: PromptRun, news: list[SequenceOutput] | EngineLost, now_s: float) -> list[Choice]:
        if isinstance(news, EngineLost):
            return self._lose(running, news)
        if not news:
            raise RuntimeError("the engine client ended a stream whose children are open")
        return self._apply(running, news, now_s)

    def _apply(self, running: PromptRun, outputs: list[SequenceOutput], now_s: float) -> list[Choice]:
        by_child: dict[int, list[SequenceOutput]] = {}
        for output in outputs:
            by_child.setdefault(output.index, []).append(output)
            if output.prompt is not None:
                running.take_report(output.prompt)
        moved, failed = [], []
        for child, steps in by_child.items():
            choice = running.choices[child]
            if choice.index in self._recorded:
                continue  # it had ended at an engine that was lost, and is closed at this one
            self._measure(running, child, [len(step.token_ids) for step in steps if step.token_ids], now_s)
            for step in steps:
                order = choice.push(step, running.stream.sources)
                if order is not None:
                    running.stream.close(child, order.reason, order.kept)
            if choice.failure is not None:
                failed.append((child, choice.failure))
            elif choice.is_closed:
                self._record(running, child, choice.finish_reason)
            moved.append(choice)
        if failed and all(_is_engine_ending(finish) for _, finish in failed) and self._begin_anew(running):
            return [choice for choice in moved if choice.is_complete]
        for child, finish in failed:
            self._failure = self._failure or self._failed(running, child, finish)
            self._end_reason = "error"
        return moved

    def _lose(self, running: PromptRun, lost: EngineLost) -> list[Choice]:
        """The engine is gone. Children whose text was final are whole all the same; the others begin anew or fail."""
        moved = self._end_closing(running)
        if not running.is_over and not self._begin_anew(running):
            self._failure = self._failure or lost
        return moved

    def _begin_anew(self, running: PromptRun) -> bool:
        """Give what a lost or ending engine ran to another, unless somebody has seen a part of it or it is too late."""
        deadline = self.job.deadline
        if not running.can_begin_anew or (deadline is not None and deadline.has_passed):
            return False
        lost_engine_id = running.stream.engine_id
        num_lost = running.begin_anew(self._fresh, self.clock())
        if num_lost is None:
            return False
        self.metrics.retried(lost_engine_id, num_lost)
        return True

    def _measure(self, running: PromptRun, child: int, step_sizes: list[int], now_s: float) -> None:
        if not step_sizes:
            return
        times, engine = running.times[child], running.stream.engine_id
        if times.first_token_s is None:
            times.first_token_s = times.last_token_s = now_s
            self.metrics.first_token(now_s - self.arrived_s, self._exemplar, self.job.operation, engine)
            step_sizes = step_sizes[1:]
        last_s = now_s if times.last_token_s is None else times.last_token_s
        for num_tokens in step_sizes:
            # Steps that were merged arrived together: each gets its share of the gap, so that the sum stays true.
            self.metrics.step_gap((now_s - last_s) / len(step_sizes), num_tokens, self._exemplar, engine)
        times.last_token_s = now_s

    def _failed(self, running: PromptRun, child: int, finish: Finish) -> ApiError:
        """Account for the child that failed and say so to the client."""
        message = finish.message or "the engine could not go on with this request"
        if finish.rejected is not None:
            self._recorded.update(choice.index for choice in running.choices)  # refused, so never finished
            if not finish.rejected.is_overload:
                return ApiError(400, message)
            self.metrics.rejected(_REJECTION_LABELS[finish.rejected])
            return overloaded(message)
        self._record(running, child, finish.reason.label)
        if finish.reason is FinishReason.ABORT:
            return overloaded(finish.message or "the engine ended this request early")
        return ApiError(500, message)

    def _give_up_waiting(self, live: list[PromptRun]) -> list[Choice]:
        logger.warning("close_unanswered requests=%d waited_s=%g", len(live), CLOSE_ANSWER_S)
        for running in live:
            running.stream.abandon()
        return [choice for running in live for choice in self._end_closing(running)]

    def _end_closing(self, running: PromptRun) -> list[Choice]:
        """End the children that wait for nothing but the engine's answer to their Close, which will not come."""
        ended = running.give_up_waiting()
        for child in ended:
            self.metrics.close_unanswered()
            self._record(running, child, running.choices[child].finish_reason)
        return [running.choices[child] for child in ended]

    def _record(self, running: PromptRun, child: int, reason: str) -> None:
        choice, times = running.choices[child], running.times[child]
        if choice.index in self._recorded:
            return
        self._recorded.add(choice.index)
        now_s = self.clock()
        queue_s, prefill_s = self._waits(running, times, now_s)
        last_s = now_s if times.last_token_s is None else times.last_token_s
        self.metrics.finished(
            FinishedChoice(
                reason=reason,
                prompt_tokens=len(running.prompt.token_ids),
                cached_tokens=0 if running.report is None else running.report.num_cached_tokens,
                generation_tokens=choice.num_tokens,
                e2e_s=now_s - self.arrived_s,
                queue_s=queue_s,
                prefill_s=prefill_s,
                decode_s=None if times.first_token_s is None else last_s - times.first_token_s,
                operation=self.job.operation,
                engine=running.stream.engine_id,
            ),
            self._exemplar,
        )

    def _waits(self, running: PromptRun, times: Times, now_s: float) -> tuple[float, float | None]:
        """(queued, prefill) seconds. The queue is the engine's own clock; prefill is what is left until the first token."""
        if running.report is None:
            return now_s - running.submitted_s, None
        queue_s = max(0.0, (running.report.scheduled_ns - running.report.queued_ns) / 1e9)
        if times.first_token_s is None:
            return queue_s, None
        return queue_s, max(0.0, times.first_token_s - running.submitted_s - queue_s)


def _is_engine_ending(finish: Finish) -> bool:
    """Whether a child ends because its engine does: it never ran there, or was broken off. Who aborts by itself hears nothing."""
    return finish.rejected is RejectReason.DRAINING or (finish.rejected is None and finish.reason is FinishReason.ABORT)
