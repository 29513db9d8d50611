"""What a closed sending side of a client means.

A client that has sent its request and shut down its sending side still reads; a client that was killed looks just the same
until something is written to it. A stream is therefore carried on and written to soon (a failed write ends it); for an answer
that is written at its end only, the half-close is taken for a departure and the connection is closed at once. So it is when the
rest of a request is missing: nothing can bring it any more.
Owns that decision per connection, and three bounds that aiohttp lacks: how many connections there are, how long a client may take
to send a request, and how long an answer may lie here unread. `frontend.app` creates the handlers; `frontend.completions` and `frontend.sse` say what kind of answer is
running.
"""

import asyncio
import contextlib
import fcntl
import logging
import resource
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from frontend.config import FrontendConfig
from frontend.errors import ApiError, overloaded

# Between the end of a client's sending and the start of its request's handler lie a few turns of the event loop, and what
# aiohttp has buffered of a body takes some more.
GRACE_S = 0.5

# An answer waits here, whole and in nobody's account any more, until its client has read it. Who reads less than this is not
# reading: an answer of 16 MB would take hours.
MIN_READ_BYTES_PER_S = 1024

FULL, SLOW_HEAD, SLOW_BODY, SLOW_READER = "full", "slow_head", "slow_body", "slow_reader"
REASONS = (FULL, SLOW_HEAD, SLOW_BODY, SLOW_READER)
CONNECTION_FAMILY = (
    "drafthouse:connections_refused",
    "Client connections closed: more than --max-connections, or a request not sent, or nothing of an answer read, within "
    "--request-read-timeout-s.",
    "reason",
)
RESERVED_FILES = 64  # of the limit of open files: engines, exporters, logs, the model's files
MAX_OPEN_FILES = 65_536

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ConnectionLimits:
    """What all connections of one listener share."""

    max_connections: int
    read_timeout_s: float
    num_open: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


def max_connections(config: FrontendConfig) -> int:
    """What was asked for, or what this process may have open."""
    if config.max_connections is not None:
        return config.max_connections
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES)


def raise_open_files_limit() -> None:
    """As far as this process may: 1024, the usual soft limit, is fewer connections than one load balancer keeps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ConnectionHandler(RequestHandler):
    """aiohttp's handler of one connection, which outlives a half-close while a request runs."""

    __slots__ = (
        "_at_half_close",
        "_body",
        "_deadline",
        "_is_half_closed",
        "_is_refused",
        "_limits",
        "_reading",
        "_wire",
    )

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None  # while the client owes a part of a request
        self._reading: asyncio.TimerHandle | None = None  # while more of an answer waits than the transport likes
        self._wire: asyncio.Transport | None = None
        self._is_half_closed = False
        self._at_half_close: Callable[[], None] | None = None
        self._body: StreamReader | None = None  # of the request that is being served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._limits.num_open += 1
        if self._limits.num_open > self._limits.max_connections:
            self._refuse(self._wire)
            return
        self._expect()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.num_open -= 1
        self._relax()
        self._stop_watching_reader()
        if not self._is_refused:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_reader()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._deadline is None and self._waiter is not None and not self._waiter.done():
            self._expect()  # the beginning of another request on a kept connection

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result; aiohttp's returns None
        """True keeps the connection open for writing."""
        if self._is_refused:
            return False
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
        self._relax()
        if not body.is_eof():
            self._expect()
        if self._is_half_closed:
            self._watch()

    def end(self) -> None:
        """The answer is ready. On a half-closed connection only what arrived before can follow it."""
        self._at_half_close = None
        self._body = None
        self._relax()  # aiohttp bounds what comes now: the rest of a body nobody reads, and the idle time
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

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Before a byte is read: a connection that was kept until its request came would be what there is no room for."""
        self._is_refused = True
        self._limits.refused[FULL] += 1
        sentence = f"this server has its {self._limits.max_connections} connections (--max-connections)"
        body = overloaded(sentence).body()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\nServer: drafthouse\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()

    def _expect(self) -> None:
        """From now on the client has `read_timeout_s` to send the head of its request, or the rest of its body."""
        self._deadline = self._loop.call_later(self._limits.read_timeout_s, self._on_deadline)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._body is None:
            if not self._messages and not self._request_in_progress:
                self._cut_off(SLOW_HEAD)
        elif not self._body.is_eof():
            self._cut_off(SLOW_BODY)

    def _cut_off(self, reason: str) -> None:
        self._limits.refused[reason] += 1
        logger.info("connection closed reason=%s timeout_s=%g", reason, self._limits.read_timeout_s)
        self.drop()

    def _watch_reader(self) -> None:
        if self._wire is not None:
            timeout_s = self._limits.read_timeout_s
            self._reading = self._loop.call_later(timeout_s, self._check_reader, _unread_bytes(self._wire))

    def _stop_watching_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _check_reader(self, unread_before: int) -> None:
        """Nothing is written while the transport is full: what became less was read."""
        if self._wire is None:
            return
        if unread_before - _unread_bytes(self._wire) >= MIN_READ_BYTES_PER_S * self._limits.read_timeout_s:
            self._watch_reader()
            return
        self._limits.refused[SLOW_READER] += 1
        logger.info("connection closed reason=%s timeout_s=%g", SLOW_READER, self._limits.read_timeout_s)
        self._wire.abort()  # closing would wait until the rest was read

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


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What the client has not taken yet: here, and in the kernel, which wants more only when much of its own is gone."""
    in_kernel = bytearray(4)
    with contextlib.suppress(OSError):  # the connection has ended, or this system does not answer
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)


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
