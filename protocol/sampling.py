"""Sampling parameters of one request and the limits both sides enforce.

The frontend calls `SamplingParams.check` to answer 400; the engine calls it again, because the engine must survive a
frontend that did not.
"""

import math
from collections.abc import Collection, Iterable

import msgspec

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_SEQUENCES = (
    2 * MAX_BAD_WORDS
)  # most words have two spellings in tokens: with a blank before them, and without
MAX_BAD_WORD_TOKENS = 64
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # far smaller ones are 0 in fp32


class InvalidSampling(ValueError):
    """A sampling parameter is outside its limits. `param` is the request field to blame."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the next token is drawn. Field order is wire format: append only.

    Transforms apply in this order to fp32 logits: allowed_token_ids, bad words, min_tokens, logit_bias, penalties,
    temperature, min_p, top_k, top_p (vLLM's order). `temperature == 0` is greedy: lowest index wins ties.
    """

    max_tokens: int  # resolved by the frontend: at least 1, and prompt + max_tokens fits the model
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None  # None: the engine draws one
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is banned after the others
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones'
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Raise `InvalidSampling` for the first value outside its limits. `vocab_size` in tokens."""
        _check_numbers(self)
        _check_counts(self)
        _check_token_ids(self, vocab_size)
        _check_first_choice(self, eos_token_ids)


def _check_numbers(params: SamplingParams) -> None:
    _in_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _in_range("min_p", params.min_p, 0.0, 1.0)
    _in_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if not (math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0):
        raise InvalidSampling("top_p", f"top_p must be in (0, 1], got {params.top_p}")
    _in_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    if params.seed is not None and not MIN_SEED <= params.seed <= MAX_SEED:
        raise InvalidSampling("seed", f"seed must be a 64-bit signed integer, got {params.seed}")


def _check_counts(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise InvalidSampling("max_tokens", f"max_tokens must be at least 1, got {params.max_tokens}")
    if params.top_k < 0:
        raise InvalidSampling("top_k", f"top_k must be 0 (off) or positive, got {params.top_k}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidSampling(
            "min_tokens", f"min_tokens must be between 0 and max_tokens ({params.max_tokens}), got {params.min_tokens}"
        )
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidSampling(name, f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}")


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    _ids_in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    if params.logit_bias is not None:
        _ids_in_vocabulary("logit_bias", params.logit_bias, vocab_size, MAX_LOGIT_BIAS)
        for value in params.logit_bias.values():
            _in_range("logit_bias", value, -100.0, 100.0)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidSampling("allowed_token_ids", "allowed_token_ids must not be empty")
        _ids_in_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
    if len(params.bad_words) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidSampling(
            "bad_words", f"bad_words has {len(params.bad_words)} spellings; the limit is {MAX_BAD_WORD_SEQUENCES}"
        )
    for word in params.bad_words:
        if not word:
            raise InvalidSampling("bad_words", "bad_words must not contain an empty word")
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise InvalidSampling(
                "bad_words", f"bad_words has a word of {len(word)} tokens; the limit is {MAX_BAD_WORD_TOKENS}"
            )
        _ids_in_vocabulary("bad_words", word, vocab_size, MAX_BAD_WORD_TOKENS)


def _check_first_choice(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """min_tokens forbids what would end the answer: something else must be allowed, or no first token exists."""
    if params.allowed_token_ids is None or params.min_tokens == 0:
        return
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if ending.issuperset(params.allowed_token_ids):
        raise InvalidSampling(
            "allowed_token_ids",
            f"allowed_token_ids holds only tokens that end the answer, which min_tokens ({params.min_tokens}) forbids",
        )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidSampling(name, f"{name} must be between {low:g} and {high:g}, got {value}")


def _ids_in_vocabulary(name: str, ids: Iterable[int], vocab_size: int, limit: int) -> None:
    for count, token_id in enumerate(ids, start=1):
        if count > limit:
            raise InvalidSampling(name, f"{name} has more than {limit} entries")
        if not 0 <= token_id < vocab_size:
            raise InvalidSampling(name, f"{name} contains token id {token_id}; the vocabulary is 0 to {vocab_size - 1}")
