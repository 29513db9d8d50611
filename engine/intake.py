"""What may enter the engine: the engine's own check of a Submit, because it must survive a frontend that did not check.

Owns limits and their sentences; never queues, never counts. Called by engine.scheduler.
"""

import math
from dataclasses import dataclass

from protocol.messages import Finish, SimScript, Submit
from protocol.reasons import FinishReason, RejectReason
from protocol.sampling import MAX_N, InvalidSampling

MAX_SCRIPT_STEP_MS = 60_000.0
MAX_SCRIPT_RUNS = 100_000


@dataclass(frozen=True)
class IntakeLimits:
    """What one request may ask of this engine. Lengths in tokens."""

    max_len: int  # prompt and generated tokens of one sequence: the model's context, or the KV cache if that is smaller
    vocab_size: int
    max_draft_len: int
    takes_scripts: bool  # a simulated engine


def rejection(reason: RejectReason, message: str) -> Finish:
    """How a request ends that is refused without running."""
    return Finish(FinishReason.ERROR, message=message, rejected=reason)


def refusal(submit: Submit, limits: IntakeLimits) -> Finish | None:
    """Why `submit` can never run on this engine, or None."""
    problem = _problem_of_shape(submit, limits)
    if problem is not None:
        return rejection(RejectReason.INVALID, problem)
    num_prompt = len(submit.prompt_token_ids)
    if num_prompt >= limits.max_len:
        return rejection(
            RejectReason.PROMPT_TOO_LONG,
            f"the prompt has {num_prompt} tokens; prompt and answer together are limited to {limits.max_len} tokens, "
            "and at least one token must be generated",
        )
    try:
        submit.sampling.check(limits.vocab_size)
    except InvalidSampling as error:
        return rejection(RejectReason.INVALID, str(error))
    problem = _problem_of_script(submit.sim, limits)
    return None if problem is None else rejection(RejectReason.INVALID, problem)


def _problem_of_shape(submit: Submit, limits: IntakeLimits) -> str | None:
    if not 1 <= submit.n <= MAX_N:
        return f"n must be between 1 and {MAX_N}, got {submit.n}"
    prompt = submit.prompt_token_ids
    if not prompt:
        return "the prompt is empty: there is nothing to condition on"
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < limits.vocab_size)
        return f"prompt contains token id {wrong}; the vocabulary is 0 to {limits.vocab_size - 1}"
    return None


def _problem_of_script(script: SimScript | None, limits: IntakeLimits) -> str | None:
    if script is None:
        return None
    if not limits.takes_scripts:
        return "sim: this engine runs a model; scripts need an engine started with --executor sim"
    if len(script.runs) > MAX_SCRIPT_RUNS:
        return f"sim: runs has {len(script.runs)} steps; the limit is {MAX_SCRIPT_RUNS}"
    for step, run in enumerate(script.runs):
        if not 1 <= len(run) <= limits.max_draft_len + 1:
            return (
                f"sim: step {step} has {len(run)} tokens; a step has 1 to {limits.max_draft_len + 1} "
                f"(at most {limits.max_draft_len} draft tokens and the bonus)"
            )
        if min(run) < 0 or max(run) >= limits.vocab_size:
            return f"sim: step {step} has a token id outside the vocabulary of 0 to {limits.vocab_size - 1}"
    return _problem_of_drafted(script, limits) or _problem_of_options(script)


def _problem_of_drafted(script: SimScript, limits: IntakeLimits) -> str | None:
    if script.drafted is None:
        return None
    if len(script.drafted) != len(script.runs):
        return f"sim: drafted has {len(script.drafted)} entries for {len(script.runs)} steps"
    for step, (drafted, run) in enumerate(zip(script.drafted, script.runs, strict=True)):
        if not len(run) - 1 <= drafted <= limits.max_draft_len:
            return (
                f"sim: step {step} drafts {drafted} tokens; it accepts {len(run) - 1} "
                f"and at most {limits.max_draft_len} can be drafted"
            )
    return None


def _problem_of_options(script: SimScript) -> str | None:
    for name, step in (("fail_at", script.fail_at), ("preempt_at", script.preempt_at)):
        if step is not None and step < 0:
            return f"sim: {name} is a step number from 0, got {step}"
    step_ms = script.step_ms
    if step_ms is not None and not (math.isfinite(step_ms) and 0 <= step_ms <= MAX_SCRIPT_STEP_MS):
        return f"sim: step_ms must be between 0 and {MAX_SCRIPT_STEP_MS:g}, got {step_ms}"
    return None
