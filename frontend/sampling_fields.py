"""From the fields of a request to `SamplingParams`: defaults, spellings and limits.

Owns what the wire format leaves open: model defaults, max_tokens against the context, JSON's string keys. Never clamps: a
value outside its limits is a 400 with the value and the limit. Called by `frontend.completions` after tokenising.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from frontend.errors import clipped, invalid
from frontend.openai import ChatRequest, CompletionRequest, GenerationRequest, SimRequest
from protocol.messages import Hello, SimScript
from protocol.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    InvalidSampling,
    SamplingParams,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default of /v1/completions; chat runs to the end of the context
MAX_PRIORITY = 2**31 - 1
MAX_SIM_STEP_MS = 60_000.0
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,9})")

BadWordsEncoder = Callable[[Sequence[str]], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the conversion must know of the model. `defaults` come from its generation_config.json."""

    vocab_size: int
    max_model_len: int
    defaults: Mapping[str, float | int]
    eos_token_ids: Collection[int] = ()


def resolve_max_tokens(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens to generate at most. Raises ApiError(400, context_length_exceeded) when prompt and answer cannot fit."""
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None and asked < 1:
        raise invalid(f"{name} must be at least 1, got {clipped(asked)}", name)
    room = max_model_len - num_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = "" if asked is None else f" and {name} is {clipped(asked)}"
        raise invalid(
            f"this model's context is {max_model_len} tokens; the prompt has {num_prompt_tokens} tokens{wanted}: "
            "they do not fit together (at least one token must be generated)",
            "prompt" if isinstance(request, CompletionRequest) else "messages",
            "context_length_exceeded",
        )
    if asked is not None:
        return asked
    return min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(request, CompletionRequest) else room


def num_choices(request: GenerationRequest) -> int:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise invalid(f"n must be between 1 and {MAX_N}, got {clipped(n)}", "n")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, n):
        raise invalid(f"best_of is not supported by this server unless it equals n ({n})", "best_of")
    return n


def priority_of(request: GenerationRequest) -> int:
    priority = request.priority or 0
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {clipped(priority)}", "priority"
        )
    return priority


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"stop has {len(stops)} entries; the limit is {MAX_STOP_STRINGS}", "stop")
    for stop in stops:
        if not stop:
            raise invalid("stop must not contain an empty string", "stop")
        if len(stop) > MAX_STOP_STRING_CHARS:
            raise invalid(f"stop has an entry of {len(stop)} characters; the limit is {MAX_STOP_STRING_CHARS}", "stop")
    return stops


def num_logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives to report per token; None when log-probabilities are not asked for."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if not isinstance(request, ChatRequest):
        return None
    if request.top_logprobs is not None and not request.logprobs:
        if request.top_logprobs == 0:
            return None
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def sampling_params(
    request: GenerationRequest, max_tokens: int, facts: ModelFacts, encode_bad_words: BadWordsEncoder
) -> SamplingParams:
    """Raises ApiError(400) naming the first field outside its limits. `max_tokens` as resolved."""
    defaults = facts.defaults
    logprobs = num_logprobs(request)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(request.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(request.top_p, defaults.get("top_p"), 1.0),
        top_k=_top_k(request, defaults),
        min_p=_first(request.min_p, defaults.get("min_p"), 0.0),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        logit_bias=_logit_bias(request),
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        bad_words=_bad_words(request, encode_bad_words),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, logprobs),
    )
    try:
        params.check(facts.vocab_size, facts.eos_token_ids)
    except InvalidSampling as error:
        name = "top_logprobs" if error.param == "logprobs" and isinstance(request, ChatRequest) else error.param
        raise invalid(str(error).replace("logprobs", name, 1) if name != error.param else str(error), name) from None
    return params


def sim_script(request: GenerationRequest, hello: Hello) -> SimScript | None:
    """The request's script for a simulated engine. Raises ApiError(400) unless this engine can play it."""
    sim = request.sim
    if sim is None:
        return None
    if hello.executor != "sim":
        raise invalid("sim is only understood by a simulated engine (--executor sim)", "sim")
    _check_sim_runs(sim, hello)
    _check_sim_steps(sim)
    return SimScript(
        runs=tuple(tuple(run) for run in sim.runs),
        drafted=None if sim.drafted is None else tuple(sim.drafted),
        fail_at=sim.fail_at,
        preempt_at=sim.preempt_at,
        step_ms=sim.step_ms,
    )


def _first(*values: float | None) -> float:
    return float(next(value for value in values if value is not None))


def _top_k(request: GenerationRequest, defaults: Mapping[str, float | int]) -> int:
    top_k = int(defaults.get("top_k", 0)) if request.top_k is None else request.top_k
    if not -1 <= top_k < 2**31:
        raise invalid(f"top_k must be -1 or 0 (off) or positive, got {clipped(top_k)}", "top_k")
    return max(top_k, 0)


def _logit_bias(request: GenerationRequest) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    if len(request.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias has {len(request.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}", "logit_bias")
    for key in request.logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(f"logit_bias has the key {clipped(key)}; keys are token ids", "logit_bias")
    return {int(key): value for key, value in request.logit_bias.items()}


def _bad_words(request: GenerationRequest, encode: BadWordsEncoder) -> tuple[tuple[int, ...], ...]:
    words = request.bad_words or ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words has {len(words)} entries; the limit is {MAX_BAD_WORDS}", "bad_words")
    for word in words:
        if not word.strip():
            raise invalid("bad_words must not contain an empty or blank string", "bad_words")
        if len(word) > MAX_STOP_STRING_CHARS:
            raise invalid(
                f"bad_words has an entry of {len(word)} characters; the limit is {MAX_STOP_STRING_CHARS}", "bad_words"
            )
    return encode(words) if words else ()


def _prompt_logprobs(request: GenerationRequest, logprobs: int | None) -> int | None:
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs is not available when stream is true", "prompt_logprobs")
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        return max(logprobs, request.prompt_logprobs or 0)
    return request.prompt_logprobs


def _check_sim_runs(sim: SimRequest, hello: Hello) -> None:
    longest = hello.max_draft_len + 1
    for run in sim.runs:
        if not 1 <= len(run) <= longest:
            raise invalid(
                f"sim.runs has a run of {len(run)} tokens; a step commits 1 to {longest} tokens (max_draft_len + 1)",
                "sim",
            )
        for token_id in run:
            if not 0 <= token_id < hello.vocab_size:
                raise invalid(
                    f"sim.runs has token id {clipped(token_id)}; the vocabulary is 0 to {hello.vocab_size - 1}", "sim"
                )
    if sim.drafted is None:
        return
    if len(sim.drafted) != len(sim.runs):
        raise invalid(f"sim.drafted has {len(sim.drafted)} entries for {len(sim.runs)} runs", "sim")
    for drafted, run in zip(sim.drafted, sim.runs, strict=True):
        if not len(run) - 1 <= drafted <= hello.max_draft_len:
            raise invalid(
                f"sim.drafted has {clipped(drafted)} for a run that accepts {len(run) - 1}; "
                f"it must be between that and {hello.max_draft_len}",
                "sim",
            )


def _check_sim_steps(sim: SimRequest) -> None:
    for name, step in (("fail_at", sim.fail_at), ("preempt_at", sim.preempt_at)):
        if step is not None and not 0 <= step < 2**31:
            raise invalid(f"sim.{name} must be a step number from 0 on, got {clipped(step)}", "sim")
    if sim.step_ms is not None and not 0 <= sim.step_ms <= MAX_SIM_STEP_MS:
        raise invalid(f"sim.step_ms must be between 0 and {MAX_SIM_STEP_MS:g}, got {clipped(sim.step_ms)}", "sim")


def prompt_lists(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """The prompts of a completions request, one entry each. Raises ApiError(400) naming `prompt`.

    The four JSON forms are told apart by their first characters, so that a list of a million ids is decoded once, strictly.
    """
    text = bytes(raw).lstrip()
    opening = text[:1] + text[1:].lstrip()[:1] if text[:1] == b"[" else text[:1]
    try:
        if opening == b'"':
            return [msgspec.json.decode(text, type=str)]
        if opening == b'["':
            return msgspec.json.decode(text, type=list[str])
        if opening == b"[[":
            return msgspec.json.decode(text, type=list[list[int]])
        if opening[:1] == b"[":
            ids = msgspec.json.decode(text, type=list[int])
            return [ids]
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        reason = str(error).split(" - at ")[0].replace("`", "")
        raise invalid(f"prompt: {reason[0].lower()}{reason[1:]}", "prompt") from None
    if text == b"null":
        raise invalid("prompt is required", "prompt")
    raise invalid(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
    )
