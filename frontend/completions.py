"""POST /v1/completions and /v1/chat/completions, streamed and not.

Owns the life of one such request: read, decode, admit, tokenise, run, answer. Everything that can be refused is refused
before the 200. A client that leaves cancels the handler; leaving `Generation` then aborts the work. Routed by `frontend.app`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace

import msgspec
from aiohttp import web

from frontend.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from frontend.choices import Choice, Piece
from frontend.connections import end_at_half_close
from frontend.deadlines import HEADER, Deadline, deadline_of
from frontend.engine_client import EngineLost
from frontend.errors import ApiError, overloaded
from frontend.generation import Generation, Job
from frontend.logprobs import Json
from frontend.openai import ChatRequest, CompletionRequest, GenerationRequest, decode_request
from frontend.prompts import draft_of, fewest_tokens, job_of
from frontend.request_trace import RequestTrace
from frontend.sampling_fields import num_logprobs
from frontend.server import REQUEST_ID, SCOPE, SERVER, TRACE, Server, off_loop, read_body
from frontend.span_attributes import describe_answer, describe_kind, describe_request, error_type
from frontend.spans import TraceLevel
from frontend.sse import EventStream

logger = logging.getLogger(__name__)

# Log-probabilities that a client has let wait, of how many tokens: 40 us each with 20 alternatives. A thread costs about 100 us.
MANY_ENTRIES = 128

_LATE = (503, 504)  # by the engine, which ends what is late as it ends what it cannot run; by this process


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
    deadline = deadline_of(request.headers.getall(HEADER, ()), server.config.request_timeout_s, arrived_s)
    asked = await _decoded(server, request, kind)
    if trace is not None:
        describe_request(trace, asked)
    if not asked.stream:
        end_at_half_close(request)
    async with (
        _admitted(server, asked, deadline, trace, request.get(SCOPE, "")) as job,
        Generation(server.engine, server.text.tokenizer, job, server.metrics, arrived_s, trace=trace) as generation,
    ):
        answer = _answer(server, request, asked, generation)
        try:
            if asked.stream:
                return await _stream(server, request, answer)
            return await _whole(answer)
        except EngineLost as lost:
            raise _lost(server, lost) from None
        except (ApiError, ConnectionError):
            raise
        except Exception:
            generation.end("error")  # a bug of ours, which must not be counted as the client's departure
            raise
        finally:
            if trace is not None:
                is_id_ours = asked.request_id is None and "X-Request-Id" not in request.headers
                describe_answer(trace, answer, is_id_ours)


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
async def _admitted(
    server: Server, asked: GenerationRequest, deadline: Deadline | None, trace: RequestTrace | None, scope: str
) -> AsyncIterator[Job]:
    """The job of a request that this server can take now; its share of the limits is held until the block ends."""
    hello = server.hello()
    _check_deadline(server, deadline)
    draft = draft_of(asked, server.config.max_prompts)
    max_model_len = hello.capacity.max_model_len
    with server.admission.reserve(draft.num_sequences, hello.capacity) as reservation:
        reservation.reserve_tokens(fewest_tokens(draft, server.text, max_model_len, server.config.max_prompt_chars))
        stage = nullcontext() if trace is None else trace.stage("tokenize", TraceLevel.STAGES)
        with _abandoned_at(server, "tokenize"), stage:
            level = server.config.per_request_spec_decode_metrics
            job = await off_loop(draft.num_chars, job_of, draft, server.text, hello, level)
        reservation.reserve_tokens(job.num_prompt_tokens)
        reservation.reserve_logprobs(job.most_logprob_bytes)
        _check_deadline(server, deadline)
        try:
            yield replace(job, deadline=deadline, scope=scope)
        except EngineLost as lost:  # by submitting
            raise _not_taken(server, lost) from None


def _check_deadline(server: Server, deadline: Deadline | None) -> None:
    """Refuse what is late before it costs anything more: under overload the body alone may have taken its time."""
    if deadline is not None and deadline.has_passed:
        server.metrics.rejected("expired")
        raise deadline.error()


def _not_taken(server: Server, lost: EngineLost) -> ApiError:
    """The last engine may have gone, or begun to drain, while the prompt was tokenised."""
    if server.engine.hello is None and not server.admission.is_draining:
        return server.no_engine()
    return _lost(server, lost)


def _lost(server: Server, lost: EngineLost) -> ApiError:
    """What a client is told whose engine went, or whose frontend leaves the engine because it goes itself."""
    if server.admission.is_draining:
        return overloaded("this server is shutting down and could not finish this request", retry_after_s=5)
    return overloaded(f"the engine was lost: {lost.reason}")


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
    while await _moved(answer.generation):
        pass  # nothing is taken until all of it is there: what nobody has seen can begin anew when its engine is lost
    pieces = {choice.index: choice.take() or Piece() for choice in answer.generation.choices}
    options = answer.options
    if options.logprobs or options.prompt_logprobs:  # up to seconds of work, in which other streams would stand still
        body = await asyncio.to_thread(_encoded, answer, pieces)
    else:
        body = _encoded(answer, pieces)
    return web.Response(body=body, content_type="application/json")


def _encoded(answer: Answer, pieces: Mapping[int, Piece]) -> bytes:
    return msgspec.json.encode(answer.whole(pieces))


async def _stream(server: Server, request: web.Request, answer: Answer) -> web.StreamResponse:
    async with EventStream(request, server.config.sse_ping_interval_s) as events:
        try:
            await _send_pieces(request, answer, events)
        except (ApiError, EngineLost) as error:
            failure = error if isinstance(error, ApiError) else _lost(server, error)
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


async def _send_pieces(request: web.Request, answer: Answer, events: EventStream) -> None:
    deadline = answer.generation.job.deadline
    while moved := await _moved(answer.generation):
        taken = [(choice, piece) for choice in moved if (piece := choice.take()) is not None]
        if sum(len(piece.entries or ()) for _, piece in taken) > MANY_ENTRIES:
            chunks = await asyncio.to_thread(_chunks, answer, taken)
        else:
            chunks = _chunks(answer, taken)
        async with _read_in_time(request, deadline):
            await events.send(chunks)
    if answer.options.include_usage:
        await events.send([answer.usage_chunk()])


def _chunks(answer: Answer, taken: list[tuple[Choice, Piece]]) -> list[Json]:
    return [chunk for choice, piece in taken for chunk in answer.chunks(choice, piece)]


async def _moved(generation: Generation) -> list[Choice]:
    """As `Generation.changed`, but no later than the request's deadline, which ends all its children.

    Raises `EngineLost` as it does, unless the deadline has passed: then it was too late in any case.
    """
    deadline = generation.job.deadline
    if deadline is None:
        return await generation.changed()
    try:
        async with deadline.enforced():
            return await generation.changed()
    except (ApiError, EngineLost) as error:
        if not deadline.has_passed or (isinstance(error, ApiError) and error.status not in _LATE):
            raise
        generation.end("abort")
        raise deadline.error() from None


@asynccontextmanager
async def _read_in_time(request: web.Request, deadline: Deadline | None) -> AsyncIterator[None]:
    """Drop the connection of a client that does not read until the deadline: what was written can never be flushed."""
    if deadline is None:
        yield
        return
    try:
        async with deadline.enforced():
            yield
    except ApiError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client did not read its stream until the deadline") from None
