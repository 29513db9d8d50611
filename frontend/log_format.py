"""How a frontend logs: as text or as JSON lines, each with the trace it belongs to, and one line per request if asked.

Owns the current trace id of a task and the access log's content: the route's template, never the path with its query, never a
header. `configure_logging` is called by `frontend.__main__`; `frontend.app` hands `AccessLogger` to aiohttp.
"""

import contextvars
import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from protocol.log_lines import TRACE_ID, JsonLines, install

TRACE_ID_HEADER = "X-Trace-Id"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# 32 hexadecimal digits while a traced request is handled. Tasks it starts inherit it.
CURRENT_TRACE_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("current_trace_id", default=None)


def configure_logging(level: str, log_format: str) -> None:
    """Called once per process. `log_format` is text or json."""
    is_json = log_format == "json"
    install(level, JsonLines(current_trace_id=CURRENT_TRACE_ID.get) if is_json else logging.Formatter(TEXT_FORMAT))


class AccessLogger(AbstractAccessLogger):
    """One line per answered request; `bytes` counts the header too, `seconds` up to the last byte handed over.

    It runs outside the handler's context: the trace id is the response header's.
    """

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.info(
            "answered method=%s route=%s status=%d bytes=%d seconds=%.4f",
            request.method if request.method in _METHODS else "OTHER",
            _route(request),
            response.status,
            response.body_length,
            time,
            extra={TRACE_ID: response.headers.get(TRACE_ID_HEADER)},
        )

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)


def _route(request: web.BaseRequest) -> str:
    """The route's template; "none" for what matched no route or was no request at all."""
    if not isinstance(request, web.Request):
        return "none"
    try:
        resource = request.match_info.route.resource
    except (AssertionError, AttributeError):  # bytes that were no HTTP get a request that no router has seen
        return "none"
    return "none" if resource is None else resource.canonical
