"""The HTTP application: routes, and what every response has in common.

Owns the route table, request ids, error bodies, the HTTP metrics and the listening socket. Never looks into a body. Built by
`frontend.__main__` and by tests.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from frontend import completions, health, openapi, profiling, token_routes
from frontend.config import FrontendConfig
from frontend.connections import (
    CONNECTION_FAMILY,
    ConnectionHandler,
    ConnectionLimits,
    begin_serving,
    end_serving,
    max_connections,
)
from frontend.errors import ApiError
from frontend.log_format import CURRENT_TRACE_ID, AccessLogger
from frontend.openai import REQUEST_ID_PATTERN
from frontend.server import REQUEST_ID, SCOPE, SERVER, TRACE, Server
from frontend.span_attributes import describe_http, describe_status, error_type
from frontend.spans import TraceLevel
from frontend.tracer import LEVEL_HEADER, TRACE_ID_HEADER, level_asked

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# As vLLM: pages that tools read all the time would drown the others.
_UNMEASURED = frozenset({"/metrics", "/metrics/", "/metrics/engine", "/metrics/frontend", "/health", "/ready", "/ping"})
MAX_HEADER_BYTES = 16 * 1024  # a broken header of another layer, such as a 10 kB traceparent, must not cost the request
CLIENT_GONE = 499  # nginx's number; in metrics only, nobody receives it


def build_app(server: Server) -> web.Application:
    app = web.Application(client_max_size=server.config.max_body_bytes, middlewares=[_common])
    app[SERVER] = server
    _count_refusals(server)
    app.on_response_prepare.append(_add_headers)
    app.router.add_post("/v1/completions", completions.completions, expect_handler=_expect)
    app.router.add_post("/v1/chat/completions", completions.chat_completions, expect_handler=_expect)
    app.router.add_get("/v1/models", health.models, expect_handler=_expect)
    app.router.add_get("/v1/models/{model:.+}", health.model, expect_handler=_expect)
    app.router.add_post("/tokenize", token_routes.tokenize, expect_handler=_expect)
    app.router.add_post("/detokenize", token_routes.detokenize, expect_handler=_expect)
    app.router.add_post("/start_profile", profiling.start_profile, expect_handler=_expect)
    app.router.add_post("/stop_profile", profiling.stop_profile, expect_handler=_expect)
    for path, handler in (
        ("/health", health.health),
        ("/ready", health.ready),
        ("/ping", health.health),
        ("/version", health.show_version),
        ("/openapi.json", openapi.openapi),
        ("/metrics", health.metrics),
        ("/metrics/", health.metrics),
        ("/metrics/engine", health.metrics_engine),
        ("/metrics/frontend", health.metrics_frontend),
    ):
        app.router.add_get(path, handler, expect_handler=_expect)
    return app


class Listener:
    """The application on a TCP port. `port` is the real one once started."""

    def __init__(self, app: web.Application, config: FrontendConfig) -> None:
        self._config = config
        limits = ConnectionLimits(max_connections(config), config.request_read_timeout_s)
        app[SERVER].metrics.watch_counts(*CONNECTION_FAMILY, lambda: limits.refused)
        access_log = logging.getLogger("frontend.access") if config.access_log else None
        self._connection_options: dict[str, Any] = {
            "access_log": access_log,
            "access_log_class": AccessLogger,
            "keepalive_timeout": config.keep_alive_s,
            "max_field_size": MAX_HEADER_BYTES,
            "limits": limits,
            "auto_decompress": False,  # `frontend.inflate` does it, within limits
        }
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        self._server: asyncio.Server | None = None
        self.port = config.port

    async def start(self) -> None:
        """Raises OSError when the port cannot be had."""
        await self._runner.setup()
        manager = self._runner.server
        if manager is None:
            raise RuntimeError("the runner has no server after setup")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ConnectionHandler(manager, loop=loop, **self._connection_options),
            self._config.host,
            self._config.port,
            reuse_port=self._config.reuse_port or None,
            backlog=1024,
        )
        bound: socket.socket = self._server.sockets[0]
        self.port = bound.getsockname()[1]

    async def stop_listening(self) -> None:
        """Take no new connections; those open go on."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Cancel what still runs and close every connection."""
        await self.stop_listening()
        await self._runner.cleanup()


@web.middleware
async def _common(request: web.Request, handler: Handler) -> web.StreamResponse:
    server = request.app[SERVER]
    started_s = time.monotonic()
    request[REQUEST_ID] = _request_id(request.headers.get("X-Request-Id"))
    route = _route(request)
    status = 500
    begin_serving(request)
    try:
        response = await _answered(request, handler, route)
        status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        status = CLIENT_GONE
        raise
    finally:
        end_serving(request)
        trace = request.get(TRACE)
        if trace is not None:
            describe_status(trace, status, "client_closed_request" if status == CLIENT_GONE else None)
            trace.end()
        if route not in _UNMEASURED:
            method = request.method if request.method in _METHODS else "OTHER"
            server.metrics.http(method, status, route, time.monotonic() - started_s)


async def _answered(request: web.Request, handler: Handler, route: str) -> web.StreamResponse:
    """The handler's response, or the error it raised as OpenAI's error object."""
    try:
        # First of all: who may not come in costs no span, no body and no work.
        server, authorization = request.app[SERVER], request.headers.get("Authorization")
        with server.gate.enter(route, authorization, server.admin) as request[SCOPE]:
            if route not in _UNMEASURED:
                _begin_trace(request, route)
            return await handler(request)
    except ApiError as error:
        trace = request.get(TRACE)
        if trace is not None:
            trace.fail(error_type(error))
        return _error_response(error)
    except web.HTTPException as error:
        return _error_response(_as_api_error(request, error), error)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("request_failed route=%s", route)
        return _error_response(ApiError(500, "the server failed to answer this request"))


async def _expect(request: web.Request) -> web.Response | None:
    """Answer `Expect`, which comes before everything else: None goes on with the request."""
    if request.headers["Expect"].lower() != "100-continue":
        return _error_response(ApiError(417, "the only expectation that can be met is 100-continue"))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what is counted is the answer
    return None


def _begin_trace(request: web.Request, route: str) -> None:
    """Decide whether this request is traced. Raises ApiError for a trace level that cannot be had, in a trace of its own."""
    server = request.app[SERVER]
    level: TraceLevel | None = None
    refusal: ApiError | None = None
    if LEVEL_HEADER in request.headers:
        is_admin = server.admin.allows(request.headers.get("Authorization"))
        try:
            level = level_asked(request.headers[LEVEL_HEADER], is_admin, is_tracing=server.tracer is not None)
        except ApiError as error:
            refusal = error
    trace = None if server.tracer is None else server.tracer.begin(request, f"{request.method} {route}", level)
    if trace is not None:
        request[TRACE] = trace
        CURRENT_TRACE_ID.set(trace.trace_id)
        describe_http(trace, request, route)
    if refusal is not None:
        raise refusal


def _count_refusals(server: Server) -> None:
    """The families exist where something can be refused."""
    gate, metrics = server.gate, server.metrics
    if gate.keys or server.admin.digests:
        text = "Requests refused with 401, by what their key was."
        metrics.watch_counts("drafthouse:unauthorized", text, "reason", lambda: gate.unauthorized)
    if gate.keys:
        text = "Requests refused with 429, by the limit of their key."
        metrics.watch_counts("drafthouse:rate_limited", text, "reason", lambda: gate.limits.refused)


def _as_api_error(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, "there is no such route on this server", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{request.method[:20]} is not allowed on this route", code="method_not_allowed")
    return ApiError(error.status, HTTPStatus(error.status).phrase)


def _error_response(error: ApiError, source: web.HTTPException | None = None) -> web.Response:
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if source is not None and "Allow" in source.headers:
        response.headers["Allow"] = source.headers["Allow"]
    return response


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "drafthouse"  # without versions: they tell an attacker where to begin
    if request.app[SERVER].admission.is_leaving:
        # The next request of a kept connection would come here whatever the balancer knows.
        response.force_close()
        response.headers["Connection"] = "close"
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    trace = request.get(TRACE)
    if trace is not None:
        response.headers[TRACE_ID_HEADER] = trace.trace_id


def _request_id(given: str | None) -> str:
    """The client's id when it is harmless to repeat, else one of ours."""
    return given if given and REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical
