"""What may enter the engine: the engine's own check of a Submit, because it must survive a frontend that did not check.

Owns the engine's limits and their sentences; never queues, never counts. Called by engine.scheduler.
"""

import math
from dataclasses import dataclass

from engine.sequence import StopRules
from engine.speculation.batch_table import NO_TABLE, BatchTable
from engine.speculation.step_cost import StartUpCosts
from engine.waiting import WaitingQueue
from protocol.messages import Capacity, Finish, SimScript, Submit
from protocol.reasons import FinishReason, RejectReason
from protocol.sampling import MAX_N, InvalidSampling

DEADLINE_PASSED = "the request's deadline passed before it was finished"

MAX_SCRIPT_STEP_MS = 60_000.0
MAX_SCRIPT_RUNS = 100_000
MAX_SCOPE_CHARS = 64


@dataclass(frozen=True)
class PolicySettings:
    """What policy must know about the engine. Raises ValueError for a combination that cannot run."""

    capacity: Capacity
    max_draft_len: int  # W
    vocab_size: int
    eos_token_ids: frozenset[int]
    unsupported_sampling: frozenset[str] = frozenset()  # SamplingParams fields with which a row runs at k = 0
    takes_scripts: bool = False  # a simulated engine
    queue_timeout_ns: int | None = None  # longest wait for a first row; None: any
    lookahead: int = 0  # tokens behind a position that the drafter's keys there depend on
    takes_predictions: bool = False  # a drafter drafts from what clients predict
    drafts_trees: bool = False  # W counts nodes, and a tree's shape is its drafter's own
    draft_len_by_batch: BatchTable = NO_TABLE
    adaptive_draft: bool = False  # draft lengths follow what was accepted and what steps cost
    start_up_costs: StartUpCosts | None = None  # what steps cost, as measured at the start; None: not measured

    def __post_init__(self) -> None:
        capacity = self.capacity
        if min(capacity.max_num_seqs, capacity.max_model_len, capacity.num_blocks, capacity.block_size) < 1:
            raise ValueError("max_num_seqs, max_model_len and the KV cache size must be at least 1")
        if capacity.max_num_batched_tokens < capacity.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({capacity.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({capacity.max_num_seqs}): every running sequence needs one token per step"
            )
        self.draft_len_by_batch.check(self.max_draft_len)

    @property
    def max_len(self) -> int:
        """Longest sequence in tokens: the model's context, or the whole KV cache if that is smaller."""
        return min(self.capacity.max_model_len, self.capacity.num_blocks * self.capacity.block_size)

    def stop_rules(self, submit: Submit) -> StopRules:
        """When the children of `submit` end."""
        sampling = submit.sampling
        return StopRules(
            eos_token_ids=frozenset() if sampling.ignore_eos else self.eos_token_ids,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            max_tokens=min(sampling.max_tokens, self.max_len - len(submit.prompt_token_ids)),
        )


def rejection(reason: RejectReason, message: str) -> Finish:
    """How a request ends that is refused without running."""
    return Finish(FinishReason.ERROR, message=message, rejected=reason)


def refusal(submit: Submit, settings: PolicySettings) -> Finish | None:
    """Why `submit` can never run on this engine, or None."""
    problem = _problem_of_shape(submit, settings) or _problem_of_prediction(submit.prediction_token_ids, settings)
    if problem is not None:
        return rejection(RejectReason.INVALID, problem)
    num_prompt, max_len = len(submit.prompt_token_ids), settings.max_len
    if num_prompt >= max_len:
        return rejection(
            RejectReason.PROMPT_TOO_LONG,
            f"the prompt has {num_prompt} tokens; prompt and answer together are limited to {max_len} tokens, "
            "and at least one token must be generated",
        )
    try:
        submit.sampling.check(settings.vocab_size, settings.eos_token_ids)
    except InvalidSampling as error:
        return rejection(RejectReason.INVALID, str(error))
    problem = _problem_of_script(submit.sim, settings)
    return None if problem is None else rejection(RejectReason.INVALID, problem)


def overload(submit: Submit, capacity: Capacity, waiting: WaitingQueue, num_free_rows: int) -> Finish | None:
    """Why `submit` may not wait now, or None. A request that a free row takes at once does not wait."""
    if submit.remaining_ns is not None and submit.remaining_ns <= 0:
        return rejection(RejectReason.EXPIRED, DEADLINE_PASSED)
    if len(waiting) >= capacity.max_num_queued_requests + num_free_rows:
        limit = capacity.max_num_queued_requests
        return rejection(RejectReason.QUEUE_FULL, f"{limit} requests are waiting already; try again later")
    queued = waiting.num_tokens + len(submit.prompt_token_ids)
    if len(waiting) >= num_free_rows and queued > capacity.max_num_queued_tokens:
        return rejection(
            RejectReason.QUEUED_TOKENS_FULL,
            f"the waiting prompts would hold {queued} tokens; the limit is {capacity.max_num_queued_tokens}",
        )
    return None


def _problem_of_shape(submit: Submit, settings: PolicySettings) -> str | None:
    if not 1 <= submit.n <= MAX_N:
        return f"n must be between 1 and {MAX_N}, got {submit.n}"
    if len(submit.scope) > MAX_SCOPE_CHARS:
        return f"scope has {len(submit.scope)} characters; the limit is {MAX_SCOPE_CHARS}"
    prompt = submit.prompt_token_ids
    if not prompt:
        return "the prompt is empty: there is nothing to condition on"
    if min(prompt) < 0 or max(prompt) >= settings.vocab_size:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < settings.vocab_size)
        return f"prompt contains token id {wrong}; the vocabulary is 0 to {settings.vocab_size - 1}"
    return None


def _problem_of_prediction(prediction: tuple[int, ...], settings: PolicySettings) -> str | None:
    if not prediction:
        return None
    if not settings.takes_predictions:
        return (
            "prediction: this engine drafts from none; it must be started with --speculator first_of:prediction,ngram"
        )
    if len(prediction) > settings.max_len:
        return f"prediction has {len(prediction)} tokens; the limit is {settings.max_len}, the longest answer"
    if min(prediction) < 0 or max(prediction) >= settings.vocab_size:
        return f"prediction has a token id outside the vocabulary of 0 to {settings.vocab_size - 1}"
    return None


def _problem_of_script(script: SimScript | None, settings: PolicySettings) -> str | None:
    if script is None:
        return None
    if not settings.takes_scripts:
        return "sim: this engine runs a model; scripts need an engine started with --executor sim"
    if len(script.runs) > MAX_SCRIPT_RUNS:
        return f"sim: runs has {len(script.runs)} steps; the limit is {MAX_SCRIPT_RUNS}"
    for step, run in enumerate(script.runs):
        if not 1 <= len(run) <= settings.max_draft_len + 1:
            return (
                f"sim: step {step} has {len(run)} tokens; a step has 1 to {settings.max_draft_len + 1} "
                f"(at most {settings.max_draft_len} draft tokens and the bonus)"
            )
        if min(run) < 0 or max(run) >= settings.vocab_size:
            return f"sim: step {step} has a token id outside the vocabulary of 0 to {settings.vocab_size - 1}"
    return _problem_of_drafted(script, settings) or _problem_of_options(script)


def _problem_of_drafted(script: SimScript, settings: PolicySettings) -> str | None:
    if script.drafted is None:
        return None
    if len(script.drafted) != len(script.runs):
        return f"sim: drafted has {len(script.drafted)} entries for {len(script.runs)} steps"
    for step, (drafted, run) in enumerate(zip(script.drafted, script.runs, strict=True)):
        if not len(run) - 1 <= drafted <= settings.max_draft_len:
            return (
                f"sim: step {step} drafts {drafted} tokens; it accepts {len(run) - 1} "
                f"and at most {settings.max_draft_len} can be drafted"
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
