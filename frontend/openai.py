"""The requests of the OpenAI API with vLLM's extensions, as Structs, and which of their fields are not offered.

Owns field names, types and the list of refusals. Never tokenises, never talks to an engine. `frontend.sampling_fields`
turns the decoded fields into `SamplingParams`; `frontend.prompts` and `frontend.chat` read prompt and messages.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from frontend.bodies import decode_body, decode_value
from frontend.errors import clipped, invalid

_ABSENT = msgspec.Raw(b"null")
SPEC_DECODE_METRICS = ("none", "summary", "detailed")
# Ids that go back into headers and bodies: no blanks, no quotes, no line ends.
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SimRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`protocol.messages.SimScript` as JSON writes it."""

    runs: list[list[int]]
    drafted: list[int] | None = None
    fail_at: int | None = None
    preempt_at: int | None = None
    step_ms: float | None = None


class PredictedText(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str


class PredictedOutput(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's predicted output; `type` is "content"."""

    type: str
    content: str | list[PredictedText]


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions share. None means absent; JSON null is the same."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    spec_decode_metrics: str | None = None  # one of SPEC_DECODE_METRICS; None: as the server is set
    sim: SimRequest | None = None
    prediction: PredictedOutput | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Usage on every chunk; vLLM wants both options set."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: msgspec.Raw = _ABSENT  # string, list of strings, list of ids, list of lists of ids
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: msgspec.Raw = _ABSENT
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_Request = TypeVar("_Request", bound=GenerationRequest)

# Fields that change nothing here and may be dropped without misleading anybody.
ACCEPTED_WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
        "spaces_between_special_tokens", "include_reasoning",
    }
)  # fmt: skip


def _never(_: Any) -> bool:
    return False


def _falsy(value: Any) -> bool:
    return value is False or value == [] or value == {} or value == ""


# Fields whose silent loss would change what the client gets -> the values that ask for nothing (null always does).
UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "tools": _falsy,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _falsy,
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "guided_decoding_backend": _never,
    "guided_whitespace_pattern": _never,
    "regex": _never,
    "ebnf": _never,
    "json_schema": _never,
    "grammar": _never,
    "suffix": lambda value: value == "",
    "logits_processors": _falsy,
    "audio": _never,
    "modalities": lambda value: value == ["text"],
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "web_search_options": _never,
    "moderation": _never,
    "use_beam_search": _falsy,
    "best_of": lambda value: value == 1,
    "length_penalty": lambda value: value == 1,
    "early_stopping": _falsy,
    "truncate_prompt_tokens": _never,
    "chat_template": _never,
    "documents": _falsy,
    "mm_processor_kwargs": _falsy,
    "media_io_kwargs": _falsy,
    "prompt_embeds": _never,
    "cache_salt": _never,
    "kv_transfer_params": _never,
    "vllm_xargs": _falsy,
    "repetition_detection": _never,
    "return_tokens_as_token_ids": _falsy,
    "stop_regex": _falsy,
    "custom_logit_processor": _never,
    "lora_path": _never,
    "input_ids": _never,
    "echo": _falsy,
    "logprob_token_ids": _falsy,
    "response_role": lambda value: value == "assistant",
    "thinking_token_budget": _never,
}


def decode_request(body: bytes, kind: type[_Request]) -> tuple[_Request, int]:
    """Return the request and how many of its top-level fields nobody here knows. Raises ApiError(400)."""
    request, names = decode_body(body, kind)
    others = names.difference(kind.__struct_fields__)
    refused = sorted(others.intersection(UNSUPPORTED))
    if refused:
        _refuse_unsupported(body, refused)
    _check_stream_options(request)
    _check_spec_decode_metrics(request)
    if request.request_id is not None and not REQUEST_ID_PATTERN.fullmatch(request.request_id):
        raise invalid("request_id must be 1 to 128 letters, digits or any of . _ : / + = -", "request_id")
    return request, len(others.difference(UNSUPPORTED, ACCEPTED_WITHOUT_EFFECT))


def _refuse_unsupported(body: bytes, names: list[str]) -> None:
    fields = decode_value(body.removeprefix(b"\xef\xbb\xbf"), dict[str, msgspec.Raw])
    for name in names:
        value = decode_value(fields[name], object, name)
        if value is not None and not UNSUPPORTED[name](value):
            raise invalid(f"{name} is not supported by this server, got {clipped(value)}", name)


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream and (options.include_usage or options.continuous_usage_stats):
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if options.include_obfuscation:
        raise invalid("stream_options.include_obfuscation is not supported by this server", "stream_options")


def _check_spec_decode_metrics(request: GenerationRequest) -> None:
    level = request.spec_decode_metrics
    if level is None:
        return
    if level not in SPEC_DECODE_METRICS:
        raise invalid(
            f"spec_decode_metrics must be one of {', '.join(SPEC_DECODE_METRICS)}, got {clipped(level)}",
            "spec_decode_metrics",
        )
    if level != "none" and request.stream and not request.include_usage:
        raise invalid(
            "spec_decode_metrics of a stream come with its usage: set stream_options.include_usage to true",
            "spec_decode_metrics",
        )
