"""Server-sent events, as bench clients read them: `data: JSON`, a blank line, and `data: [DONE]` once at the end.

Owns the moment the 200 is sent (with the first event, or the first keep-alive), keep-alive comments and back-pressure.
Never decides what an event says. Called by `frontend.completions`.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from frontend.connections import hurry_at_half_close
from frontend.errors import ApiError

PROBE_INTERVAL_S = 0.25  # after the client has closed its sending side, find out soon whether it still reads

_PING = b": ping\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One response. Use as `async with`; nothing is sent before the first event or `ping_interval_s`."""

    def __init__(self, request: web.Request, ping_interval_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(status=200, headers=_HEADERS)
        self._ping_interval_s = ping_interval_s
        self._starting = asyncio.Lock()
        self._is_writing = False
        self._last_write_s = time.monotonic()
        self._hurried = asyncio.Event()
        self._pinger: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EventStream":
        self._pinger = asyncio.create_task(self._ping(), name="sse keep-alive")
        hurry_at_half_close(self._request, self.hurry)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_pinging()

    @property
    def has_started(self) -> bool:
        """The 200 is out: errors can only be events now."""
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Send all events in one write. Waits while the client reads too slowly."""
        data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        if data:
            await self._write(data)

    async def fail(self, error: ApiError) -> None:
        """The one error event; `finish` follows."""
        await self._write(b"data: " + error.body() + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        """Send the end. Nothing waits behind it: a client that leaves once it has all would be taken for one that left before."""
        await self._stop_pinging()
        await self._start()
        await self._response.write_eof(b"data: [DONE]\n\n")
        return self._response

    def hurry(self) -> None:
        """The client has closed its sending side: write soon and often, because only a write tells whether it reads."""
        self._hurried.set()

    async def _start(self) -> None:
        if not self._response.prepared:
            async with self._starting:
                if not self._response.prepared:
                    await self._response.prepare(self._request)

    async def _write(self, data: bytes) -> None:
        await self._start()
        self._is_writing = True
        try:
            await self._response.write(data)
        finally:
            self._is_writing = False
            self._last_write_s = time.monotonic()

    async def _stop_pinging(self) -> None:
        if self._pinger is not None:
            pinger, self._pinger = self._pinger, None
            pinger.cancel()
            await asyncio.gather(pinger, return_exceptions=True)

    async def _ping(self) -> None:
        with contextlib.suppress(ConnectionError):  # the handler is cancelled by the server
            while not self._hurried.is_set():
                idle_s = time.monotonic() - self._last_write_s
                if idle_s < self._ping_interval_s or self._is_writing:
                    await self._rest(max(self._ping_interval_s - idle_s, 0.01))
                else:
                    await self._write(_PING)
            while True:
                if not self._is_writing:
                    await self._write(_PING)
                await asyncio.sleep(min(PROBE_INTERVAL_S, self._ping_interval_s))

    async def _rest(self, seconds: float) -> None:
        """Sleep, but wake up when there is a reason to hurry."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), seconds)
