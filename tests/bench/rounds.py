"""One engine as a user's options make it, in this process and without sockets, and what its decoding steps cost.

Owns the driving and the measuring: every step that only decodes is timed, with its phases as the engine itself reports them.
The counts are the engine's own counters. Used by tests.bench.drafters.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.plan import StepPlan
from engine.speculation.names import PREDICTION
from protocol.counters import Counters
from protocol.messages import Phase, StepOutput, Submit
from protocol.options import parse
from protocol.reasons import FinishReason
from protocol.sampling import SamplingParams
from tests.fakes import FakeInbox, FakePublisher
from tests.inprocess import WatchedExecutor

SEED = 1


class LastStep(FakePublisher):
    """Keeps the last step only, so that a long measurement does not fill the memory it measures in."""

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        """Raises RuntimeError when a request did not end as requests should: its numbers would be of something else."""
        self.snapshots = [snapshot]
        for output in (output for step in outputs.values() for output in step.outputs):
            if output.finish is not None and output.finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise RuntimeError(f"a request ended with {output.finish.reason.name}: {output.finish.message}")


@dataclass
class Measurement:
    """Sums over the steps that only decoded. Times in ns."""

    before: Counters
    after: Counters
    num_steps: int = 0
    num_tokens: int = 0
    wall_ns: int = 0
    phase_ns: dict[Phase, list[int]] = field(default_factory=lambda: {phase: [] for phase in Phase})

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together, prefill excluded; 0 where nothing was decoded."""
        return self.num_tokens / self.wall_ns * 1e9 if self.wall_ns else 0.0


class MeasuredEngine:
    """Takes requests of one client, runs them to the end, and says what their decoding came to."""

    def __init__(self, options: Sequence[str]) -> None:
        """Raises `OptionsError`, ValueError or `ModelFilesError` with the sentence a user would read."""
        config = parse(EngineConfig, options, {}, program="drafthouse engine")
        engine = assemble(config, lambda done, total: None, epoch=1)
        engine.wire.close()
        self._core = engine.core
        self._core.inbox = self._inbox = FakeInbox()
        self._core.publisher = self._publisher = LastStep()
        self._executor = WatchedExecutor(engine.core.executor)
        self._executor.before = self._note
        self._core.executor = self._executor
        self._only_decodes = False
        self._next_request_id = 0
        self.model = config.model
        self.num_draft_tokens = engine.hello.max_draft_len
        self.takes_predictions = PREDICTION in engine.hello.sources
        self.runs_on = f"{engine.hello.dtype} on {engine.hello.device}"
        self._publisher.send({}, engine.core.ledger.snapshot(engine.core.scheduler.load(1)))

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, streams: int, scope: str = ""
    ) -> Measurement:
        """Every prompt once, at most `streams` at a time."""
        waiting = [self._submit(tuple(prompt), sampling, scope) for prompt in reversed(prompts)]
        before = self._publisher.counters()
        result = Measurement(before, before)
        while waiting or self._core.scheduler.has_work:
            while waiting and self._core.scheduler.load(1).running < streams and not self._inbox.arrivals:
                self._inbox.put(waiting.pop())
            self._step(result)
        result.after = self._publisher.counters()
        return result

    def _submit(self, prompt: tuple[int, ...], sampling: SamplingParams, scope: str) -> Submit:
        self._next_request_id += 1
        return Submit(
            request_id=self._next_request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            n=1,
            remaining_ns=None,
            priority=0,
            trace_level=0,
            awaits_close=False,
            sim=None,
            scope=scope,
            prediction_token_ids=prompt if self.takes_predictions else (),
        )

    def _step(self, result: Measurement) -> None:
        tokens_before = self._publisher.counters().generation_tokens
        started_ns = time.perf_counter_ns()
        self._core.step()
        wall_ns = time.perf_counter_ns() - started_ns
        if not self._only_decodes:
            return
        result.num_steps += 1
        result.wall_ns += wall_ns
        result.num_tokens += self._publisher.counters().generation_tokens - tokens_before
        for phase, (start_ns, end_ns) in zip(Phase, self._publisher.snapshots[-1].phases.spans, strict=True):
            if end_ns > start_ns:
                result.phase_ns[phase].append(end_ns - start_ns)

    def _note(self, plan: StepPlan) -> None:
        self._only_decodes = bool(plan.spans) and all(span.kind.is_round for span in plan.spans)
