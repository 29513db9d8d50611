"""POST /v1/completions and /v1/chat/completions, streamed and not.

Owns the life of one such request: read, decode, admit, tokenise, run, answer. Everything that can be refused is refused
before the 200. A client that leaves cancels the handler; leaving `Generation` then aborts the work. Routed by `frontend.app`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext

import msgspec
from aiohttp import web

from frontend.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from frontend.choices import Piece
from frontend.connections import end_at_half_close
from frontend.engine_client import EngineLost
from frontend.errors import ApiError, overloaded
from frontend.generation import Generation, Job
from frontend.openai import ChatRequest, CompletionRequest, GenerationRequest, decode_request
from frontend.prompts import draft_of, fewest_tokens, job_of
from frontend.request_trace import RequestTrace
from frontend.sampling_fields import num_logprobs
from frontend.server import REQUEST_ID, SERVER, TRACE, Server, off_loop, read_body
from frontend.span_attributes import describe_answer, describe_kind, describe_request, error_type
from frontend.spans import TraceLevel
from frontend.sse import EventStream

logger = logging.getLogger(__name__)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _serve(request, CompletionRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _serve(request, ChatRequest)


async def _serve(request: web.Request, kind: type[CompletionRequest] | type[ChatRequest]) -> web.StreamResponse:
    server = request.app[SERVER]
    arrived_s = time.monotonic()
    trace = request.get(TRACE)
    if trace is not None:
        describe_kind(trace, kind, server.model_name)
    asked = await _decoded(server, request, kind)
    if trace is not None:
        describe_request(trace, asked)
    if not asked.stream:
        end_at_half_close(request)
    async with (
        _admitted(server, asked, trace) as job,
        Generation(server.engine, server.text.tokenizer, job, server.metrics, arrived_s, trace=trace) as generation,
    ):
        answer = _answer(server, request, asked, generation)
        try:
            if asked.stream:
                return await _stream(server, request, answer)
            return await _whole(answer)
        except EngineLost as lost:
            raise overloaded(f"the engine was lost: {lost.reason}") from None
        finally:
            if trace is not None:
                describe_answer(trace, answer)


async def _decoded(
    server: Server, request: web.Request, kind: type[CompletionRequest] | type[ChatRequest]
) -> GenerationRequest:
    with _abandoned_at(server, "body"):
        body = await read_body(request, server.config.max_body_bytes)
    asked: GenerationRequest
    asked, num_unknown = await off_loop(len(body), decode_request, body, kind)
    if num_unknown:
        server.metrics.unknown_fields(num_unknown)
    server.check_model(asked.model)
    return asked


@asynccontextmanager
async def _admitted(server: Server, asked: GenerationRequest, trace: RequestTrace | None) -> AsyncIterator[Job]:
    """The job of a request that this server can take now; its share of the limits is held until the block ends."""
    hello = server.hello()
    draft = draft_of(asked, server.config.max_prompts)
    max_model_len = hello.capacity.max_model_len
    with server.admission.reserve(draft.num_sequences, hello.capacity) as reservation:
        reservation.reserve_tokens(fewest_tokens(draft, server.text, max_model_len, server.config.max_prompt_chars))
        stage = nullcontext() if trace is None else trace.stage("tokenize", TraceLevel.STAGES)
        with _abandoned_at(server, "tokenize"), stage:
            level = server.config.per_request_spec_decode_metrics
            job = await off_loop(draft.num_chars, job_of, draft, server.text, hello, level)
        reservation.reserve_tokens(job.num_prompt_tokens)
        try:
            yield job
        except EngineLost as lost:  # by submitting
            raise overloaded(f"the engine was lost: {lost.reason}") from None


@contextmanager
def _abandoned_at(server: Server, stage: str) -> Iterator[None]:
    """Count a client that leaves within the block: its request never reaches an engine."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionError):
        server.metrics.abandoned(stage)
        raise


def _answer(server: Server, request: web.Request, asked: GenerationRequest, generation: Generation) -> Answer:
    is_chat = isinstance(asked, ChatRequest)
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    given = asked.request_id if asked.request_id is not None else request.get(REQUEST_ID)
    options = AnswerOptions(
        answer_id=prefix + (given or uuid.uuid4().hex),
        model=server.model_name,
        logprobs=num_logprobs(asked) is not None,
        token_ids=bool(asked.return_token_ids),
        prompt_logprobs=asked.prompt_logprobs is not None,
        echo=isinstance(asked, CompletionRequest) and bool(asked.echo),
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage,
    )
    kind = ChatAnswer if is_chat else CompletionAnswer
    return kind(options, generation, server.text.tokenizer)


async def _whole(answer: Answer) -> web.Response:
    pieces = {choice.index: Piece() for choice in answer.generation.choices}
    while moved := await answer.generation.changed():
        for choice in moved:
            piece = choice.take()
            if piece is not None:
                pieces[choice.index].append(piece)
    body = msgspec.json.encode(answer.whole(pieces))
    return web.Response(body=body, content_type="application/json")


async def _stream(server: Server, request: web.Request, answer: Answer) -> web.StreamResponse:
    async with EventStream(request, server.config.sse_ping_interval_s) as events:
        try:
            await _send_pieces(answer, events)
        except (ApiError, EngineLost) as error:
            failure = error if isinstance(error, ApiError) else overloaded(f"the engine was lost: {error.reason}")
            if not events.has_started:
                raise failure from None
            answer.generation.end("error")
            _fail_trace(request, error_type(failure))
            await events.fail(failure)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            if not events.has_started:
                answer.generation.end("error")
                raise
            logger.exception("stream_failed")
            answer.generation.end("error")
            _fail_trace(request, "server_error")
            await events.fail(ApiError(500, "the server failed while streaming this answer"))
        return await events.finish()


def _fail_trace(request: web.Request, reason: str) -> None:
    """The 200 is out: only the trace can still say that the request failed."""
    trace = request.get(TRACE)
    if trace is not None:
        trace.fail(reason)


async def _send_pieces(answer: Answer, events: EventStream) -> None:
    while moved := await answer.generation.changed():
        chunks = []
        for choice in moved:
            piece = choice.take()
            if piece is not None:
                chunks += answer.chunks(choice, piece)
        await events.send(chunks)
    if answer.options.include_usage:
        await events.send([answer.usage_chunk()])
