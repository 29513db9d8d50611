"""An executor without a model: scripted or random tokens in real steps, so that everything around it is the real thing.

Owns no counter and no torch. Called by engine.core in place of the model executor.

A scripted row plays its runs: one per ROUND span, whatever the span's budget; its prompt and a recompute emit nothing.
Which run is next follows from the span's position alone, so a retried or repeated step plays the same run again.
An unscripted row emits the text token of (key, position), key being the seed, or the prompt for a greedy row; how many
per step follows from the acceptance rate. Of the sampling parameters only seed, temperature == 0, allowed_token_ids
and (prompt_)logprobs change what it does; log-probabilities are made up (1/2, 1/4, ... the chosen token first).
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from engine.executor import Executor
from engine.plan import CHUNK_RESULT, RowBegin, Span, SpanKind, SpanResult, StepPlan, StepResult
from protocol.messages import PhaseTimes, SimScript, TokenLogprobs

_WORD = 2**64 - 1


class SimulatedFailure(RuntimeError):
    """Raised where a script says so."""


@dataclass(frozen=True)
class SimSettings:
    """How a simulated engine behaves. Raises ValueError for values that make no sense."""

    max_draft_len: int  # W
    vocab_size: int
    text_token_ids: tuple[int, ...]  # what unscripted rows emit; valid text, no EOS
    acceptance: float = 0.7  # probability that a draft token is accepted, given that those before it were
    step_ms: float = 0.0  # per step that has rows; a script's own step_ms counts where it is longer
    prefill_ms: float = 0.0  # per 1000 tokens of prompt, on top

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"sim_acceptance must be between 0 and 1, got {self.acceptance}")
        for name, value in (("sim_step_ms", self.step_ms), ("sim_prefill_ms", self.prefill_ms)):
            if not (math.isfinite(value) and 0.0 <= value <= 60_000.0):
                raise ValueError(f"{name} must be between 0 and 60000, got {value}")
        if not self.text_token_ids:
            raise ValueError("a simulated engine needs at least one text token to emit")
        if not all(0 <= token_id < self.vocab_size for token_id in self.text_token_ids):
            raise ValueError(f"a text token lies outside the vocabulary of {self.vocab_size} tokens")


class _Purpose(IntEnum):
    TOKEN = 0
    ACCEPT = 1


@dataclass(frozen=True)
class _Row:
    key: int  # of the random tokens
    num_prompt: int
    script: SimScript | None
    run_starts: tuple[int, ...]  # generated tokens before run i; one entry more: all of them
    candidates: tuple[int, ...]
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    token_ids: tuple[int, ...]  # for prompt log-probabilities only


class SimExecutor(Executor):
    """Pretends to draft and verify. State per row is what RowBegin said; nothing changes while a row runs."""

    def __init__(
        self,
        settings: SimSettings,
        sleep: Callable[[float], None] = time.sleep,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._sleep = sleep
        self._now_ns = now_ns
        self._rows: dict[int, _Row] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        started_ns = self._now_ns()
        for row in plan.ends:
            del self._rows[row]
        for begin in plan.begins:
            self._rows[begin.row] = self._row(begin)
        for span in plan.spans:
            self._raise_if_scripted(span)
        observed_ns = self._now_ns()
        spans = tuple([self._run(self._rows[span.row], span) for span in plan.spans])
        drafted_ns = self._now_ns()
        delay_s = self._delay_s(plan)
        if delay_s > 0:
            self._sleep(delay_s)
        if not spans:
            return StepResult(spans, _phases((0, 0), (0, 0)), 0, 0)
        draft = (observed_ns - started_ns, drafted_ns - started_ns)
        drafts = any(span.drafted for span in spans)
        verify = (draft[1], self._now_ns() - started_ns)
        return StepResult(spans, _phases(draft if drafts else (0, 0), verify), 1, 0)

    # ---- rows ----

    def _row(self, begin: RowBegin) -> _Row:
        sampling, settings = begin.sampling, self._settings
        runs = begin.sim.runs if begin.sim is not None else ()
        prompt = begin.token_ids[: begin.num_prompt_tokens]
        return _Row(
            key=hash(prompt) & _WORD if sampling.is_greedy else begin.seed,  # ints hash alike in every process
            num_prompt=begin.num_prompt_tokens,
            script=begin.sim,
            run_starts=(0, *itertools.accumulate(len(run) for run in runs)),
            candidates=sampling.allowed_token_ids or settings.text_token_ids,
            num_logprobs=sampling.logprobs,
            num_prompt_logprobs=sampling.prompt_logprobs,
            token_ids=prompt if sampling.prompt_logprobs is not None else (),
        )

    def _run(self, row: _Row, span: Span) -> SpanResult:
        if span.kind is SpanKind.CHUNK:
            return CHUNK_RESULT if row.num_prompt_logprobs is None else self._result(row, span, ())
        if row.script is not None:
            return self._play(row, row.script, span)
        position = span.start + len(span.token_ids)  # of the first new token
        if span.kind is not SpanKind.ROUND:
            return self._result(row, span, (self._token(row, position),))
        accepted = 0
        while accepted < span.budget and _uniform(row.key, position + accepted, _Purpose.ACCEPT) < (
            self._settings.acceptance
        ):
            accepted += 1
        tokens = tuple([self._token(row, position + offset) for offset in range(accepted + 1)])
        return self._result(row, span, tokens, drafted=span.budget)

    def _play(self, row: _Row, script: SimScript, span: Span) -> SpanResult:
        if span.kind is not SpanKind.ROUND:
            return self._result(row, span, (), ended=not script.runs)
        step = _step_of(row, span)
        run = script.runs[step]
        drafted = len(run) - 1 if script.drafted is None else script.drafted[step]
        if script.preempt_at == step:
            return SpanResult(0, 0, 0, 0, 0, (), None, None, None, retracted=True)
        return self._result(row, span, run, drafted=drafted, ended=step == len(script.runs) - 1)

    def _raise_if_scripted(self, span: Span) -> None:
        row = self._rows[span.row]
        if row.script is None or row.script.fail_at is None or span.kind is not SpanKind.ROUND:
            return
        step = _step_of(row, span)
        if step == row.script.fail_at:
            raise SimulatedFailure(f"the simulator script fails at step {step}")

    def _delay_s(self, plan: StepPlan) -> float:
        if not plan.spans:
            return 0.0
        step_ms = self._settings.step_ms
        num_prompt_tokens = 0
        for span in plan.spans:
            if span.kind is not SpanKind.ROUND:
                num_prompt_tokens += len(span.token_ids)
            script = self._rows[span.row].script
            if script is not None and script.step_ms is not None:
                step_ms = max(step_ms, script.step_ms)
        return (step_ms + self._settings.prefill_ms * num_prompt_tokens / 1000) / 1000

    # ---- values ----

    def _token(self, row: _Row, position: int) -> int:
        return row.candidates[_mix(row.key, position, _Purpose.TOKEN) % len(row.candidates)]

    def _result(
        self, row: _Row, span: Span, tokens: tuple[int, ...], drafted: int = 0, ended: bool = False
    ) -> SpanResult:
        """A span's result; the last of `tokens` is the target's own, those before it are accepted drafts."""
        logprobs = None
        if row.num_logprobs is not None and span.kind.samples:
            logprobs = tuple([self._logprobs(token_id, row.num_logprobs) for token_id in tokens])
        prompt_logprobs = None
        if row.num_prompt_logprobs is not None and span.kind <= SpanKind.LAST_CHUNK:
            targets = row.token_ids[span.start + 1 : span.start + len(span.token_ids) + 1]
            prompt_logprobs = tuple([self._logprobs(token_id, row.num_prompt_logprobs) for token_id in targets])
        accepted, non_draft = max(len(tokens) - 1, 0), min(len(tokens), 1)
        return SpanResult(
            drafted, drafted, 0, accepted, non_draft, tokens, None, logprobs, prompt_logprobs, ended=ended
        )

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        num_top = min(num_top, self._settings.vocab_size)
        top_ids = tuple([(token_id + rank) % self._settings.vocab_size for rank in range(num_top)])
        top_logprobs = tuple([-(rank + 1) * math.log(2) for rank in range(num_top)])
        return TokenLogprobs(logprob=-math.log(2), rank=1, top_ids=top_ids, top_logprobs=top_logprobs)


def _step_of(row: _Row, span: Span) -> int:
    """The number of the run that a round of a scripted row plays, from how many tokens came before it."""
    num_generated = span.start + 1 - row.num_prompt
    return bisect.bisect_right(row.run_starts, num_generated) - 1


def _phases(draft: tuple[int, int], verify: tuple[int, int]) -> PhaseTimes:
    return PhaseTimes(spans=((0, 0), draft, verify, (0, 0)), on_device=False)


def _uniform(key: int, position: int, purpose: _Purpose) -> float:
    return _mix(key, position, purpose) / 2**64


def _mix(key: int, position: int, purpose: _Purpose) -> int:
    """64 random-looking bits of (key, position, purpose). Source: splitmix64's finaliser, applied twice."""
    word = key
    for salt in (position * 2 + purpose, 0x9E3779B97F4A7C15):
        word = (word + salt * 0x9E3779B97F4A7C15) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        word ^= word >> 31
    return word
