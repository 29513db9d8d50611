"""What a SERVER span says about a request, in OpenTelemetry's words.

Owns the attribute names; never content: no prompt, completion, stop string, header or key. Called by `frontend.app` and
`frontend.completions`, for traced requests only. Source: OpenTelemetry semantic conventions, HTTP spans and GenAI spans.
"""

import re

from aiohttp import web

from frontend.answers import Answer
from frontend.errors import ApiError
from frontend.openai import UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest
from frontend.request_trace import RequestTrace

PROVIDER = "drafthouse"

_FIELD = re.compile(r"[.\[]")  # what follows the name of a field in a path to a part of it
_FIELDS = frozenset(
    {
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        *UNSUPPORTED,
        "X-Trace-Level",
        "X-Request-Timeout",
    }
)

_REQUEST_FIELDS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


def operation_of(kind: type[GenerationRequest]) -> str:
    """gen_ai.operation.name."""
    return "chat" if issubclass(kind, ChatRequest) else "text_completion"


def describe_http(trace: RequestTrace, request: web.Request, route: str) -> None:
    """Before the handler: what was asked for on the level of HTTP. The path without its query, which may hold content."""
    trace.set("http.request.method", request.method)
    trace.set("url.path", request.path)
    trace.set("url.scheme", request.scheme)
    trace.set("http.route", route)
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if isinstance(address, tuple):
        trace.set("server.address", str(address[0]))
        trace.set("server.port", int(address[1]))


def describe_status(trace: RequestTrace, status: int, error: str | None) -> None:
    """After the handler. `error`: why the request failed; a refusal is a failure too, and may have said more before."""
    trace.set("http.response.status_code", status)
    if error is None and status >= 400:
        error = str(status)
    if error is not None:
        trace.fail(error)


def error_type(error: ApiError) -> str:
    """The kind of a refusal and the field it is about; its sentence may quote the client, and so may an unknown name."""
    field = _FIELD.split(error.param)[0] if error.param is not None else ""
    return f"{error.kind}: {field}" if field in _FIELDS else error.kind


def describe_kind(trace: RequestTrace, kind: type[CompletionRequest] | type[ChatRequest], model: str) -> None:
    """Of every generation request, also of one that is refused."""
    trace.set("gen_ai.operation.name", operation_of(kind))
    trace.set("gen_ai.provider.name", PROVIDER)
    trace.set("gen_ai.response.model", model)


def describe_request(trace: RequestTrace, asked: GenerationRequest) -> None:
    """What a decoded request asks for. The model's name is the client's own text, so only one that exists is repeated."""
    for field, name in _REQUEST_FIELDS.items():
        trace.set(name, getattr(asked, field))
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        trace.set("gen_ai.request.max_tokens", asked.max_completion_tokens)
    if asked.n is not None and asked.n != 1:
        trace.set("gen_ai.request.choice.count", asked.n)
    trace.set("gen_ai.request.stream", bool(asked.stream))
    trace.set("gen_ai.request.model", asked.model)


def describe_answer(trace: RequestTrace, answer: Answer, is_id_ours: bool) -> None:
    """What came out, however the request ended. An id that the client chose is its own text and stays out."""
    generation = answer.generation
    if is_id_ours:
        trace.set("gen_ai.response.id", answer.options.answer_id)
    trace.set("drafthouse.synthetic_acceptance", generation.job.settings.synthetic or None)
    trace.set("gen_ai.usage.input_tokens", generation.job.num_prompt_tokens)
    trace.set("gen_ai.usage.output_tokens", generation.completion_tokens)
    trace.set("gen_ai.usage.cache_read.input_tokens", generation.cached_tokens)
    trace.set("gen_ai.response.finish_reasons", tuple(choice.finish_reason for choice in generation.choices))
    trace.set("gen_ai.response.time_to_first_chunk", generation.first_token_s)
