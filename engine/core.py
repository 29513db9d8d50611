"""The engine's heart: one step is take, plan, execute, commit, settle, publish.

Owns the order of things and nothing else. Called by engine.__main__; the wire (engine.wire) implements `Inbox` and
`Publisher` without importing this module. Never counts, never looks at a token.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.accounts import StepEnd
from engine.executor import DeviceFailure, Executor
from engine.ledger import NO_PHASES, Ledger
from engine.plan import SpanResult, StepPlan, StepResult, failed_result
from engine.scheduler import Scheduler
from engine.sequence import Arrival
from protocol.messages import Finish, Phase, PhaseTimes, StepOutput
from protocol.reasons import FinishReason

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the engine is shutting down"


class Inbox(Protocol):
    """What reached the engine, in order per frontend. Called by the step thread only; the I/O thread fills it."""

    def drain(self) -> list[Arrival]:
        """Take every message that arrived. Attach, Ping and Fence are the I/O thread's own and never come here.

        `Detach` and `Gone` (cut off, silent, replaced) come after everything that frontend sent before.
        """

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is something to drain or the paused set changed (True), `wake` was called, or time is up.

        None waits for ever. Must not miss what arrived between the last `drain` and this call.
        """

    def wake(self) -> None:
        """Make a `wait` in progress, or the next one, return. Callable from signal handlers and other threads."""

    def peek_closes(self) -> set[tuple[str, int, int]]:
        """(frontend_id, request_id, index) of every Close not yet drained, index -1 meaning all. Consumes nothing."""

    def paused(self) -> frozenset[str]:
        """Frontends that are behind (too many unacknowledged steps): their rows are not planned."""


class Publisher(Protocol):
    """Where every step goes. Called by the step thread only; never blocks."""

    def frontends(self) -> list[str]:
        """The attached frontends, longest attached first. One that attaches between steps was told all by its Hello."""

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        """Publish one step: one StepOutput per frontend that `frontends` named, sent even when it carries no output.

        `snapshot` is the same step without outputs: what Hello, heartbeats and fence replies show from now on, also
        when nobody is attached. Before the first step the wire is constructed with `Ledger.snapshot` (step_id 0).
        """

    def announce_drain(self) -> None:
        """Tell every frontend at once, in the middle of a step too, that this engine takes no new requests any more.

        Callable from signal handlers and other threads. Frontends that attach later are told by their Hello.
        """

    @property
    def refused_messages(self) -> int:
        """Messages refused since the epoch began: oversized, malformed, foreign."""

    @property
    def frontends_cut_off(self) -> int:
        """Frontends cut off since the epoch began."""


class Errands(Protocol):
    """What the step thread does between steps that concerns no request. Must not raise."""

    def run(self) -> None:
        """Do what is due. Called before every step and whenever `Inbox.wait` returns."""

    @property
    def deadline_ns(self) -> int | None:
        """When `run` wants to be called again, on the core's clock, even if nothing happens."""


class NoErrands:
    deadline_ns: int | None = None

    def run(self) -> None:
        pass


class EngineCore:
    """Policy and mechanism joined. One thread calls `run` (or `step`); `drain`, `stop` may come from any thread."""

    def __init__(
        self,
        inbox: Inbox,
        publisher: Publisher,
        scheduler: Scheduler,
        ledger: Ledger,
        executor: Executor,
        now_ns: Callable[[], int],
    ) -> None:
        """`now_ns` is the monotonic clock that scheduler and ledger also use."""
        self.inbox = inbox
        self.publisher = publisher
        self.scheduler = scheduler
        self.ledger = ledger
        self.executor = executor
        self._now_ns = now_ns
        self._had_rows = False  # the last plan was not empty: the next one may not be either
        self._device_failure: str | None = None
        self._is_stopping = False
        self._drain_until_ns: int | None = None

    def step(self) -> None:
        """One step. It publishes, whatever it came to: nothing to do, every row aborted, failed, device lost."""
        started_ns = self._now_ns()
        self.scheduler.take(self.inbox.drain())
        plan = self.scheduler.plan(self.inbox.paused())
        executed_ns = self._now_ns()
        result = self._execute(plan)
        committed = self.ledger.commit(plan, result, self.scheduler.rows, self.inbox.peek_closes())
        draft_start_ns, draft_end_ns = result.phases.spans[Phase.DRAFT]
        self.scheduler.settle(committed, draft_end_ns - draft_start_ns)
        if self._device_failure is not None:
            self._end_everything(Finish(FinishReason.ERROR, message=self._device_failure))
        self._had_rows = bool(plan.spans)
        self._publish(started_ns, executed_ns)

    def run(self, errands: Errands | None = None) -> int:
        """Step until stopped; returns the exit code: 0 after `stop` or a finished `drain`, 1 when the device failed.

        `errands` are run between steps. Sleeps while there is nothing to do. Any other exception is a bug of the engine and leaves through the caller.
        """
        errands = errands or NoErrands()
        while not self._is_over():
            errands.run()
            if self._may_step(errands):
                self.step()
            if self._device_failure is not None:
                logger.critical("device_failure reason=%r", self._device_failure)
                return 1
        self._last_step()
        return 0 if self._device_failure is None else 1

    def stop(self) -> None:
        """End soon: what still runs is aborted with a reason."""
        self._is_stopping = True
        self.inbox.wake()

    def drain(self, timeout_s: float) -> None:
        """Take no new requests, finish the open ones, then end; what still runs after `timeout_s` is aborted."""
        self._drain_until_ns = self._now_ns() + int(timeout_s * 1e9)
        self.scheduler.is_draining = True
        self.publisher.announce_drain()  # the next step may be seconds away
        self.inbox.wake()

    def _execute(self, plan: StepPlan) -> StepResult:
        """The only `try` of a step: a failing batch is retried row by row, a failing device fails every row."""
        try:
            return self.executor.execute(plan)
        except DeviceFailure as failure:
            return self._lose_device(plan, failure)
        except Exception:
            if not plan.spans:
                raise  # no row to blame: the executor cannot apply a row change
            logger.exception("step_failed step=%d rows=%d retry=row_by_row", plan.step_id, len(plan.spans))
            return self._execute_row_by_row(plan)

    def _execute_row_by_row(self, plan: StepPlan) -> StepResult:
        """Each span alone, its row changes already applied, so that only the guilty row fails."""
        retry_started_ns = self._now_ns()
        spans: list[SpanResult] = []
        phases, target_forwards, draft_forwards = NO_PHASES, 0, 0
        for span in plan.spans:
            offset_ns = self._now_ns() - retry_started_ns
            try:
                result = self.executor.execute(plan.only(span))
            except DeviceFailure as failure:
                return self._lose_device(plan, failure)
            except Exception as error:
                logger.exception("row_failed step=%d row=%d", plan.step_id, span.row)
                spans.append(failed_result(f"the engine failed on this request: {error}"))
                continue
            spans.append(result.spans[0])
            phases = _joined(phases, result.phases, offset_ns)
            target_forwards += result.target_forwards
            draft_forwards += result.draft_forwards
        return StepResult(tuple(spans), phases, target_forwards, draft_forwards)

    def _lose_device(self, plan: StepPlan, failure: DeviceFailure) -> StepResult:
        self._device_failure = f"the engine lost its device: {failure}"
        return StepResult(tuple(failed_result(self._device_failure) for _ in plan.spans), NO_PHASES, 0, 0)

    def _publish(self, started_ns: int, executed_ns: int) -> None:
        frontends = self.publisher.frontends()
        end = StepEnd(
            started_ns=started_ns,
            executed_ns=executed_ns,
            load=self.scheduler.load(len(frontends), next(iter(frontends), "")),
            frontends=frontends,
            refused_messages=self.publisher.refused_messages,
            frontends_cut_off=self.publisher.frontends_cut_off,
        )
        self.publisher.send(*self.ledger.close_step(end))

    def _end_everything(self, finish: Finish) -> None:
        self.scheduler.end_all(finish)
        self.ledger.end_all(finish)  # those that only waited for their frontend

    def _is_over(self) -> bool:
        if self._is_stopping:
            return True
        if self._drain_until_ns is None:
            return False
        return self.ledger.num_open == 0 or self._now_ns() >= self._drain_until_ns

    def _may_step(self, errands: Errands) -> bool:
        """Wait for a reason to step. A plan that came out empty stays so until something arrives or expires."""
        if self._had_rows and self.scheduler.has_work:
            return True
        reasons_ns = (self.scheduler.next_deadline_ns, self._drain_until_ns, errands.deadline_ns)
        limits_ns = [at_ns for at_ns in reasons_ns if at_ns is not None]
        timeout_s = max(0.0, (min(limits_ns) - self._now_ns()) / 1e9) if limits_ns else None
        if self.inbox.wait(timeout_s):
            return True
        deadline_ns = self.scheduler.next_deadline_ns
        return deadline_ns is not None and deadline_ns <= self._now_ns()

    def _last_step(self) -> None:
        """An empty step that carries the last word to everyone who still waits for one."""
        started_ns = self._now_ns()
        self.scheduler.is_draining = True
        self.scheduler.take(self.inbox.drain())
        self._end_everything(Finish(FinishReason.ABORT, message=SHUTTING_DOWN))
        plan = self.scheduler.plan(frozenset())
        executed_ns = self._now_ns()
        self.ledger.commit(plan, self._execute(plan), self.scheduler.rows, frozenset())
        self._publish(started_ns, executed_ns)


def _joined(total: PhaseTimes, part: PhaseTimes, offset_ns: int) -> PhaseTimes:
    """Phases of a retry: from the first start of a phase to its last end."""
    spans = []
    for (first, last), (start, end) in zip(total.spans, part.spans, strict=True):
        if end <= start:
            spans.append((first, last))
        elif last <= first:
            spans.append((start + offset_ns, end + offset_ns))
        else:
            spans.append((first, end + offset_ns))
    return PhaseTimes(spans=tuple(spans), on_device=part.on_device)
