"""The frontend's end of the wire: one DEALER to one engine, on the event loop.

Owns the socket, attaching and re-attaching, acknowledgements, and noticing that an engine is gone. What messages mean is
frontend.attachment's. Never interprets a token, never queues requests. Used by the HTTP handlers and /metrics; the only
user of zmq in the frontend.

The socket is read through its file descriptor with `loop.add_reader`: one wake-up takes all that is there, which is far
cheaper than zmq.asyncio, and works under uvloop too. ZeroMQ's descriptor is edge-triggered: after every send the events
must be looked at again.
"""

import asyncio
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from frontend.attachment import Admit, Attachment, Expectation, FenceResult, Lost, Observe, admit_all
from frontend.handshake import CONNECTION_EVENTS, failure, socket_options
from frontend.request_trace import RequestTrace
from frontend.streams import ALL_CHILDREN, EngineLost, Stream
from protocol.codec import MalformedMessage, decode_from_engine, encode
from protocol.curve_keys import ClientKeys
from protocol.endpoints import ENGINE_SILENT_S, FENCE_TIMEOUT_S, PING_INTERVAL_S, check_address
from protocol.messages import (
    SCHEMA_VERSION,
    Attach,
    Close,
    Detach,
    Fence,
    FromFrontend,
    Hello,
    Ping,
    Profile,
    ProfileAction,
    ProfileReply,
    SimScript,
    Submit,
)
from protocol.reasons import CloseReason
from protocol.sampling import SamplingParams

__all__ = ["ALL_CHILDREN", "EngineClient", "EngineLost", "FenceResult", "Observe", "Stream"]

logger = logging.getLogger(__name__)

TICK_S = 0.25  # how often silence and idle acknowledgements are looked at
RECONNECT_S = 0.05  # first wait after a loss; doubles up to RECONNECT_MAX_S
RECONNECT_MAX_S = 1.0
REFUSED_RETRY_S = 5.0  # until an engine is asked again that answered and may not be used
LINGER_MS = 200  # for the last Detach


class EngineClient:
    """Talks to one engine and survives its restarts. All methods belong to the event loop's thread."""

    def __init__(
        self,
        address: str,
        observe: Observe,
        *,
        expected_vocabulary_hash: str | None = None,
        expected_model_name: str | None = None,
        curve: ClientKeys | None = None,
        admit: Admit = admit_all,
        gives_up: bool = True,
    ) -> None:
        """`observe` sees every message, before its tokens. `admit`: whether an engine that fits may be used now.

        `gives_up`: an engine that can never fit is not asked again; otherwise another may come to the address.
        Raises ValueError for what is no address.
        """
        self.address = check_address(address)
        self.down_reason: str | None = f"waiting for the engine at {self.address}"
        self._observe = observe
        self._expectation = Expectation(expected_vocabulary_hash, expected_model_name)
        self._admit = admit
        self._gives_up = gives_up
        self._options = socket_options(curve)
        self._connection: _Connection | None = None
        self._request_ids = itertools.count(1)
        self._nonces = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._refusal: asyncio.Future[str] | None = None
        self._became_ready = asyncio.Event()

    async def start(self) -> None:
        """Begin to attach, in the background; returns at once. The engine may start later."""
        self._refusal = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine client")

    async def stop(self) -> None:
        """Detach and close. Open streams raise `EngineLost`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def hello(self) -> Hello | None:
        """What the attached engine said it is; None while none is attached."""
        return self._connection.attachment.hello if self._connection is not None and self.ready else None

    @property
    def frontend_id(self) -> str | None:
        """How the attached engine knows this frontend; None while none is attached."""
        connection = self._connection
        return connection.frontend_id if connection is not None and self.ready else None

    @property
    def ready(self) -> bool:
        """Attached to an engine that fits. When False, `down_reason` says why; when True that is None."""
        return self.down_reason is None

    async def wait_ready(self) -> Hello:
        while (hello := self.hello) is None:
            self._became_ready.clear()
            await self._became_ready.wait()
        return hello

    async def wait_refused(self) -> str:
        """Wait until the engine proves to be one this frontend can never serve; returns the sentence that says why."""
        if self._refusal is None:
            raise RuntimeError("wait_refused before start")
        return await asyncio.shield(self._refusal)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        n: int = 1,
        *,
        awaits_close: bool = False,
        sim: SimScript | None = None,
        remaining_ns: int | None = None,
        priority: int = 0,
        trace: RequestTrace | None = None,
        prediction_token_ids: Sequence[int] = (),
        scope: str = "",
    ) -> Stream:
        """Send one request. Raises `EngineLost` when no engine is attached or its socket takes no more."""
        connection = self._attached()
        hello = connection.attachment.known_hello
        traced = None if trace is None else connection.attachment.trace_of(trace)
        request = Submit(
            request_id=next(self._request_ids),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            n=n,
            remaining_ns=remaining_ns,
            priority=priority,
            trace_level=0 if traced is None else int(traced.level),
            awaits_close=awaits_close,
            sim=sim,
            prediction_token_ids=tuple(prediction_token_ids),
            scope=scope,
        )
        stream = Stream(
            request.request_id,
            n,
            awaits_close=awaits_close,
            send_close=connection.send_close,
            trace=traced,
            engine_id=hello.engine_id,
            sources=hello.sources,
        )
        if not connection.send(request):
            raise EngineLost("the engine takes no more messages")
        connection.attachment.streams[request.request_id] = stream
        return stream

    async def fence(self) -> FenceResult:
        """The engine's snapshot as of now or later, applied through `observe` first. Waits at most FENCE_TIMEOUT_S."""
        if not self.ready or self._connection is None:
            return FenceResult(None, missed=False)
        nonce = next(self._nonces)
        reply = self._connection.attachment.expect_fence(nonce)
        if not self._connection.send(Fence(nonce)):
            reply.cancel()
            return FenceResult(None, missed=True)
        try:
            return FenceResult(await asyncio.wait_for(reply, FENCE_TIMEOUT_S), missed=False)
        except TimeoutError:
            return FenceResult(None, missed=True)
        except EngineLost:
            return FenceResult(None, missed=False)

    async def profile(self, action: ProfileAction, timeout_s: float) -> ProfileReply:
        """The engine's answer. Raises `EngineLost` and TimeoutError."""
        connection = self._attached()
        nonce = next(self._nonces)
        reply = connection.attachment.expect_profile(nonce)
        if not connection.send(Profile(nonce, action)):
            reply.cancel()
            raise EngineLost("the engine takes no more messages")
        return await asyncio.wait_for(reply, timeout_s)

    @property
    def num_open_streams(self) -> int:
        """Requests the engine has not finished, abandoned ones included."""
        return len(self._connection.attachment.streams) if self._connection is not None else 0

    def _attached(self) -> "_Connection":
        if self._connection is None or self.down_reason is not None:
            raise EngineLost(self.down_reason or "no engine is attached")
        return self._connection

    async def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        wait_s = RECONNECT_S
        try:
            while self._refusal is not None and not self._refusal.done():
                attachment = await self._attach_once(context)
                wait_s = RECONNECT_S if attachment.hello is not None else min(wait_s * 2, RECONNECT_MAX_S)
                is_refused = attachment.mismatch is not None or attachment.conflict is not None
                await asyncio.sleep(REFUSED_RETRY_S if is_refused else wait_s)
        finally:
            await asyncio.to_thread(context.term)  # waits LINGER_MS at most

    async def _attach_once(self, context: zmq.Context[zmq.Socket[bytes]]) -> Attachment:
        """One attachment from connect to loss, which it returns."""
        attachment = Attachment(self._observe, self._expectation, self._admit)
        connection = self._connection = _Connection(context, self.address, self._options, attachment, self._on_attached)
        reason = "this frontend is shutting down"
        try:
            reason = await connection.lost
        finally:
            told, self.down_reason = self.down_reason, self._why_not(attachment, reason)
            self._connection = None
            connection.close()
            attachment.end(reason)
        self._tell_loss(attachment, told, reason)
        return attachment

    def _tell_loss(self, attachment: Attachment, told: str | None, reason: str) -> None:
        """Log once what was not `told`; the end, for an engine that is given up."""
        refusal = attachment.mismatch or attachment.conflict
        if attachment.mismatch is not None and self._gives_up and self._refusal is not None:
            self._refusal.set_result(attachment.mismatch)
        if self.down_reason == told:
            return  # a handshake that fails every second is worth one line
        if refusal is not None:
            logger.error("engine refused address=%s reason=%r", self.address, refusal)
        else:
            logger.warning("engine lost address=%s reason=%r", self.address, reason)

    def _why_not(self, attachment: Attachment, reason: str) -> str:
        refusal = attachment.mismatch or attachment.conflict
        return refusal or f"the engine at {self.address} is not available: {reason}"

    def _on_attached(self, hello: Hello) -> None:
        self.down_reason = None
        self._became_ready.set()
        logger.info("attached engine=%s epoch=%d model=%s", hello.engine_id, hello.epoch, hello.model_name)


class _Connection:
    """One socket with one identity, for one attachment. `lost` resolves to the reason, once."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        options: dict[int, int | bytes],
        attachment: Attachment,
        on_attached: Callable[[Hello], None],
    ) -> None:
        self.attachment = attachment
        self._on_attached = on_attached
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self.frontend_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(6)}"
        self._acknowledged = self._num_sent = 0
        self._heard_at = self._pinged_at = self._loop.time()
        self._is_connected = False
        self._socket = context.socket(zmq.DEALER)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, self.frontend_id.encode())
        self._monitor = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        self._socket.connect(address)
        self._descriptors = [_descriptor(self._socket), _descriptor(self._monitor)]
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._read)
        self._ticker = self._loop.create_task(self._tick_forever(), name="engine client tick")
        self._loop.call_soon(self._read)

    def send(self, message: FromFrontend) -> bool:
        """Queue one message. False when the connection is lost or takes no more."""
        if self._socket.closed or self.lost.done() or not self._transmit(message):
            return False
        self._num_sent += not isinstance(message, Attach | Ping)
        self._loop.call_soon(self._read)  # sending may have taken the descriptor's edge
        return True

    def send_close(self, request_id: int, index: int, reason: CloseReason, kept: int) -> None:
        if not self.send(Close(request_id, index, reason, kept)) and not self.lost.done():
            self._lose("it takes no more messages")  # a Close that is not sent would leave the request running

    def close(self) -> None:
        """Say goodbye if the engine still listens, and free the sockets. Idempotent."""
        if self._socket.closed:
            return
        if self._is_connected and self.attachment.is_known_to_engine:
            self._transmit(Detach())  # also after a loss of ours: what the engine still runs for us must end
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._ticker.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)

    def _transmit(self, message: FromFrontend) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        """Take everything both sockets hold, then acknowledge once."""
        if self._socket.closed or self.lost.done():
            return
        try:
            self._read_messages()
            while _has_input(self._monitor):
                self._on_connection_event(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
        except Lost as loss:
            self._lose(str(loss))
        except MalformedMessage as error:
            self._lose(f"it sent a message this frontend cannot read ({error})")
        except Exception:
            self._lose("this frontend failed to apply a message")  # half applied: go on only from a new Hello
            raise
        if self.attachment.applied_step > self._acknowledged:
            self._acknowledge()

    def _read_messages(self) -> None:
        while _has_input(self._socket):
            self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK))

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard_at = self._loop.time()
        if len(frames) != 1:
            raise MalformedMessage(f"{len(frames)} frames")
        was_attached = self.attachment.hello is not None
        self.attachment.apply(decode_from_engine(frames[0]))
        if self.attachment.hello is not None and not was_attached:
            self._acknowledged = self.attachment.applied_step
            self._on_attached(self.attachment.hello)

    def _on_connection_event(self, event: int) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED and not self._is_connected:
            self._is_connected = True
            self._heard_at = self._loop.time()
            self.send(Attach(self.frontend_id, SCHEMA_VERSION))
        elif event == zmq.Event.DISCONNECTED and self._is_connected:
            self._is_connected = False
            self._read_messages()  # what it said last may be the reason
            raise Lost("the connection was closed")
        elif (why := failure(event)) is not None:
            raise Lost(why)

    def _acknowledge(self) -> None:
        if self.send(Ping(self.attachment.applied_step, self._num_sent)):
            self._acknowledged = self.attachment.applied_step
            self._pinged_at = self._loop.time()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        """Notice silence, show a sign of life. Reads first: after a stall of our own the socket may hold the proof."""
        self._read()
        if not self._is_connected:
            return
        now = self._loop.time()
        if now - self._heard_at > ENGINE_SILENT_S:
            self._lose(f"it said nothing for {ENGINE_SILENT_S:g} s")
        elif self.attachment.hello is not None and now - self._pinged_at >= PING_INTERVAL_S - TICK_S:
            self._acknowledge()

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


def _descriptor(watched: "zmq.Socket[bytes]") -> int:
    return int(watched.getsockopt(zmq.FD))


def _has_input(watched: "zmq.Socket[bytes]") -> bool:
    return bool(int(watched.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
