"""What a closed sending side of a client means.

A client that has sent its request and shut down its sending side still reads; a client that was killed looks just the same
until something is written to it. A stream is therefore carried on and written to soon (a failed write ends it); for an answer
that is written at its end only, the half-close is taken for a departure and the connection is closed at once.
Owns that decision per connection. `frontend.app` creates the handlers; `frontend.completions` and `frontend.sse` say what kind
of answer is running.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from frontend.errors import ApiError

# Between the end of a client's sending and the start of its request's handler lie a few turns of the event loop.
GRACE_S = 0.5

logger = logging.getLogger(__name__)


class ConnectionHandler(RequestHandler):
    """aiohttp's handler of one connection, which outlives a half-close while a request runs."""

    __slots__ = ("_at_half_close", "_is_half_closed", "_is_serving", "_wire")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wire: asyncio.BaseTransport | None = None
        self._is_serving = False
        self._is_half_closed = False
        self._at_half_close: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport
        super().connection_made(transport)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result; aiohttp's returns None
        """True keeps the connection open for writing."""
        self._is_half_closed = True
        if self._at_half_close is not None:
            self._at_half_close()
        elif not self._is_serving:
            asyncio.get_running_loop().call_later(GRACE_S, self._close_if_idle)
        return True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are no HTTP request: OpenAI's error object, and nothing of those bytes in the log."""
        logger.info("bad_http status=%d error=%s", status, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: there is no other way to say that it failed")
        sentence = "the server failed to answer this request" if status >= 500 else "this is not a valid HTTP request"
        response = web.Response(body=ApiError(status, sentence).body(), status=status, content_type="application/json")
        response.force_close()
        return response

    def begin(self) -> None:
        """A request's handler starts."""
        self._is_serving = True
        self._at_half_close = None

    def end(self) -> None:
        """The answer is ready. Nothing can follow it on a half-closed connection."""
        self._is_serving = False
        self._at_half_close = None
        if self._is_half_closed:
            self.close()  # as soon as the answer is out

    def when_half_closed(self, action: Callable[[], None]) -> None:
        """Call `action` once the client's sending side is closed: at once if it is already."""
        self._at_half_close = action
        if self._is_half_closed:
            action()

    def drop(self) -> None:
        """Close the connection; the server then cancels the handler."""
        if self._wire is not None:
            self._wire.close()

    def _close_if_idle(self) -> None:
        if not self._is_serving:
            self.drop()


def begin_serving(request: web.Request) -> None:
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.begin()


def end_serving(request: web.Request) -> None:
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.end()


def end_at_half_close(request: web.Request) -> None:
    """The answer is written in one piece: from a half-closed connection on nobody is taken to wait for it."""
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.when_half_closed(request.protocol.drop)


def hurry_at_half_close(request: web.Request, hurry: Callable[[], None]) -> None:
    """The answer is streamed: `hurry` makes it write soon, which tells a reader from a dead client."""
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.when_half_closed(hurry)
