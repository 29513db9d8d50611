"""What a closed sending side of a client means.

A client that has sent its request and shut down its sending side still reads; a client that was killed looks just the same
until something is written to it. A stream is therefore carried on and written to soon (a failed write ends it); for an answer
that is written at its end only, the half-close is taken for a departure and the connection is closed at once. So it is when the
rest of a request is missing: nothing can bring it any more.
Owns that decision per connection. `frontend.app` creates the handlers; `frontend.completions` and `frontend.sse` say what kind
of answer is running.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from frontend.errors import ApiError

# Between the end of a client's sending and the start of its request's handler lie a few turns of the event loop, and what
# aiohttp has buffered of a body takes some more.
GRACE_S = 0.5

logger = logging.getLogger(__name__)


class ConnectionHandler(RequestHandler):
    """aiohttp's handler of one connection, which outlives a half-close while a request runs."""

    __slots__ = ("_at_half_close", "_body", "_is_half_closed", "_wire")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wire: asyncio.BaseTransport | None = None
        self._is_half_closed = False
        self._at_half_close: Callable[[], None] | None = None
        self._body: StreamReader | None = None  # of the request that is being served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport
        super().connection_made(transport)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result; aiohttp's returns None
        """True keeps the connection open for writing."""
        self._is_half_closed = True
        if self._at_half_close is not None:
            self._at_half_close()
        else:
            self._watch()
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

    def begin(self, body: StreamReader) -> None:
        """A request's handler starts."""
        self._at_half_close = None
        self._body = body
        if self._is_half_closed:
            self._watch()

    def end(self) -> None:
        """The answer is ready. On a half-closed connection only what arrived before can follow it."""
        self._at_half_close = None
        self._body = None
        if self._is_half_closed and not self._messages:
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

    def _watch(self) -> None:
        num_bytes = 0 if self._body is None else self._body.total_bytes
        asyncio.get_running_loop().call_later(GRACE_S, self._close_if_useless, self._body, num_bytes)

    def _close_if_useless(self, body: StreamReader | None, num_bytes: int) -> None:
        """Close a half-closed connection without a request, or whose request's body has stopped before its end."""
        if self._body is None:
            self.drop()
        elif not self._body.is_eof():
            if self._body is body and body.total_bytes == num_bytes:
                self.drop()
            else:
                self._watch()


def begin_serving(request: web.Request) -> None:
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.begin(request.content)


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
