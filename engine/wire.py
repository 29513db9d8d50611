"""The engine's end of the wire: one ROUTER, owned by one I/O thread, for any number of frontends.

Owns attaching and cutting off, heartbeats, fences, flow control, and refusing what is no message. Answers all of that
while the step thread is busy for seconds. Never schedules, counts no tokens, and never changes a StepOutput. Implements
core's `Inbox` (through engine.handover) and `Publisher`; built and closed by engine.__main__. Who may connect is
engine.door's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from engine.door import Door
from engine.handover import Mailbox, ProfileLine, Waker, WireFailure
from engine.heartbeats import Heartbeats
from engine.listening import check_listening
from engine.peers import Peer
from engine.sequence import Arrival, Gone
from protocol.codec import MAX_MESSAGE_BYTES, MalformedMessage, decode_from_frontend, encode
from protocol.curve_keys import ServerKeys
from protocol.endpoints import HEARTBEAT_INTERVAL_S, MAX_FRONTENDS, MAX_UNACKNOWLEDGED_STEPS, SEND_HIGH_WATER_MARK
from protocol.messages import (
    SCHEMA_VERSION,
    Attach,
    Close,
    Detach,
    Detached,
    Fence,
    FenceReply,
    FromEngine,
    FromFrontend,
    Heartbeat,
    Hello,
    Load,
    Profile,
    StepOutput,
    Submit,
)
from protocol.reasons import DetachReason

__all__ = ["Wire", "WireFailure"]

logger = logging.getLogger(__name__)

TICK_MS = int(HEARTBEAT_INTERVAL_S * 500)  # resolution of heartbeats and of silence; four wake-ups a second when idle
RECEIVE_BATCH = 256  # messages read before published steps get their turn again
MAX_PENDING = 10_000  # messages of one frontend that the step thread has not taken; more and it is cut off
LINGER_MS = 1_000  # how long closing waits for frontends to take their last messages
CLOSE_TIMEOUT_S = 5.0


class Wire:
    """Inbox and Publisher for one EngineCore. `hello` describes the engine; its step_id, counters and load are the
    state before the first step. `keys`: of CURVE; None for a wire in the clear."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        keys: ServerKeys | None = None,
    ) -> None:
        self.refused_messages = 0
        self.frontends_cut_off = 0
        self._address = address
        self._outbox: deque[tuple[dict[str, StepOutput], StepOutput]] = deque()
        self._bell = Waker()
        self.profiles = ProfileLine(self._bell.ring)
        self._mailbox = Mailbox(self.profiles)
        self._attached: tuple[str, ...] = ()
        self._switchboard = _Switchboard(self, hello, clock_ns, Door(keys))
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._is_closing = self._is_draining = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def start(self) -> None:
        """Bind and begin to serve. Raises `WireFailure` with a sentence when the address cannot be had."""
        self._context = zmq.Context(io_threads=1)
        try:
            self._switchboard.bind(self._context, self._address)
        except WireFailure:
            self._context.destroy(linger=0)
            self._close_bells()
            raise
        self._thread.start()

    def close(self) -> None:
        """Send what is published, tell every frontend that the engine goes, and free the address. Idempotent."""
        self._is_closing = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._close_bells()

    def _close_bells(self) -> None:
        self._bell.close()
        self._mailbox.close()

    # ---- Inbox (step thread) ----

    def drain(self) -> list[Arrival]:
        return self._mailbox.drain()

    def wait(self, timeout_s: float | None) -> bool:
        return self._mailbox.wait(timeout_s)

    def wake(self) -> None:
        self._mailbox.wake()

    def peek_closes(self) -> set[tuple[str, int, int]]:
        return self._mailbox.peek_closes()

    def paused(self) -> frozenset[str]:
        """Frontends that are behind; all of them while this wire itself is, so that its backlog stays bounded."""
        if len(self._outbox) > MAX_UNACKNOWLEDGED_STEPS:
            return frozenset(self._attached)
        return self._mailbox.paused()

    # ---- Publisher (step thread) ----

    def frontends(self) -> list[str]:
        return list(self._attached)

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        """Hand one step to the I/O thread."""
        self._outbox.append((outputs, snapshot))
        self._bell.ring()

    def announce_drain(self) -> None:
        self._is_draining = True
        self._bell.ring()

    # ---- I/O thread ----

    def _run(self) -> None:
        try:
            self._switchboard.serve()
        except BaseException as error:
            logger.exception("wire failed")
            self._mailbox.fail(error)
        finally:
            self._switchboard.leave_address()
            if self._context is not None:
                self._context.destroy(linger=LINGER_MS)


class _Switchboard:
    """The I/O thread's own state. Everything here but `bind` runs in that thread."""

    def __init__(self, wire: Wire, hello: Hello, clock_ns: Callable[[], int], door: Door) -> None:
        self._wire = wire
        self._mailbox = wire._mailbox
        self._hello = hello
        self._clock_ns = clock_ns
        self._peers: dict[str, Peer] = {}
        self._step_id, self._counters, self._load = hello.step_id, hello.counters, hello.load
        self._beats = Heartbeats(clock_ns(), clock_ns())
        self._refused_seen = 0
        self._socket_path: Path | None = None
        self._door = door
        self._router: zmq.Socket[bytes]

    def bind(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        """Take the address. Raises `WireFailure`."""
        check_listening(address)
        path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        self._router = context.socket(zmq.ROUTER)
        for option, value in _ROUTER_OPTIONS.items():
            self._router.setsockopt(option, value)
        self._door.guard(context, self._router)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise WireFailure(f"cannot listen on {address}: {error.strerror}") from error
        if path is not None:
            path.chmod(0o600)  # whoever can write to it can use the engine
            self._socket_path = path

    def serve(self) -> None:
        """Until the wire closes: publish, receive, keep time."""
        poller = zmq.Poller()
        for source in (self._router, *self._door.sockets(), self._wire._bell.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self._wire._is_closing:
            poller.poll(TICK_MS)
            self._wire._bell.clear()
            self._publish()
            is_drained = self._receive()
            for reason in self._door.attend():
                self._refuse(b"", reason)
            self._keep_time(check_silence=is_drained)
        self._publish()
        for peer in list(self._peers.values()):
            self._send(peer.identity, self._detached(DetachReason.SHUTDOWN))

    def leave_address(self) -> None:
        """Remove the socket file, which ZeroMQ leaves. Before closing: after it, the file may be another engine's."""
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    # ---- to frontends ----

    def _publish(self) -> None:
        """Send every step the step thread has handed over; one message per frontend and step."""
        outbox = self._wire._outbox
        was_backlogged = len(outbox) > MAX_UNACKNOWLEDGED_STEPS
        while outbox:
            outputs, snapshot = outbox.popleft()
            self._step_id, self._counters, self._load = snapshot.step_id, snapshot.counters, snapshot.load
            self._beats.stepped(self._clock_ns(), said_draining=snapshot.load.draining)
            empty: bytes | None = None
            for peer in list(self._peers.values()):
                # A frontend that attached after the step was addressed gets it all the same: step ids have no gap.
                step = outputs.get(peer.frontend_id, snapshot)
                if step.outputs:
                    payload = encode(step)
                else:
                    payload = empty = empty or encode(snapshot)
                if self._deliver(peer, payload):
                    peer.sent(step.step_id, self._beats.last_sent_ns)
            self._update_paused()
        if was_backlogged:
            self._mailbox.touch()  # every frontend was paused; now none is for that reason
        for frontend_id, reply in self._wire.profiles.take_answers():
            if frontend_id in self._peers:
                self._deliver(self._peers[frontend_id], encode(reply))

    def _deliver(self, peer: Peer, payload: bytes) -> bool:
        """Send to an attached frontend, never waiting. A frontend that cannot take it is gone."""
        try:
            self._router.send_multipart((peer.identity, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self._cut_off(peer, DetachReason.BEHIND)
            else:
                self._remove(peer, "its connection is closed")
            return False
        return True

    def _send(self, identity: bytes, message: FromEngine) -> None:
        """Send to anybody, attached or not; nobody there is no error."""
        try:
            self._router.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("message not sent error=%s", error)

    def _keep_time(self, check_silence: bool) -> None:
        now_ns = self._clock_ns()
        if check_silence:  # only after reading all there was: a late reader must not blame the sender
            for peer in list(self._peers.values()):
                reason = peer.verdict(now_ns)
                if reason is not None:
                    self._cut_off(peer, reason)
        if self._beats.is_due(now_ns, is_draining=self._wire._is_draining):
            hello, load, now = self._hello, self._current_load(), _now(self._clock_ns)
            self._beats.beat(now_ns, said_draining=load.draining)
            heartbeat = encode(Heartbeat(hello.engine_id, hello.epoch, self._step_id, self._counters, load, *now))
            for peer in list(self._peers.values()):
                self._deliver(peer, heartbeat)
            if self._wire.refused_messages != self._refused_seen:
                self._refused_seen = self._wire.refused_messages
                self._mailbox.touch()  # an idle engine publishes its refusals by a step, as everything

    def _detached(self, reason: DetachReason) -> Detached:
        return Detached(self._hello.engine_id, self._hello.epoch, reason)

    def _current_load(self) -> Load:
        reporter, is_draining = next(iter(self._peers), ""), self._load.draining or self._wire._is_draining
        return msgspec.structs.replace(self._load, frontends=len(self._peers), reporter=reporter, draining=is_draining)

    # ---- from frontends ----

    def _receive(self) -> bool:
        """Read at most one batch. True when nothing was left."""
        try:
            for _ in range(RECEIVE_BATCH):
                frames = self._router.recv_multipart(zmq.NOBLOCK)
                self._on_frames(frames)
        except zmq.Again:
            return True
        finally:
            self._update_paused()
        return False

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise MalformedMessage(f"{len(frames) - 1} frames")
            message = decode_from_frontend(frames[1])
        except MalformedMessage as error:
            self._refuse(identity, str(error))
            return
        peer = self._peers.get(identity.decode("ascii", "replace"))
        if isinstance(message, Attach):
            self._on_attach(identity, message, peer)
        elif peer is None or peer.identity != identity:
            self._refuse(identity, "it is not attached")
            self._send(identity, self._detached(DetachReason.UNKNOWN))
        elif (reason := peer.heard(message, self._clock_ns())) is not None:
            self._cut_off(peer, reason)
        else:
            self._on_message(peer, message)

    def _on_message(self, peer: Peer, message: FromFrontend) -> None:
        if isinstance(message, Fence):
            self._publish()  # the reply shows everything published before it
            hello, load = self._hello, self._current_load()
            reply = FenceReply(hello.engine_id, hello.epoch, message.nonce, self._step_id, self._counters, load)
            self._deliver(peer, encode(reply))
        elif isinstance(message, Detach):
            self._forget(peer)
            self._mailbox.put(peer.frontend_id, message)
        elif isinstance(message, Submit | Close | Profile):
            if isinstance(message, Submit) and message.trace_level > 0:
                message = msgspec.structs.replace(message, received_ns=self._clock_ns())
            if self._mailbox.put(peer.frontend_id, message) > MAX_PENDING:
                self._cut_off(peer, DetachReason.BEHIND)

    def _on_attach(self, identity: bytes, attach: Attach, peer: Peer | None) -> None:
        reason = self._objection(identity, attach, peer)
        if reason is not None:
            logger.warning("attach refused frontend=%r reason=%s", attach.frontend_id[:64], reason.name)
            self._refuse(identity, reason.sentence)
            if peer is not None and reason is DetachReason.DUPLICATE:
                self._cut_off(peer, reason)
            else:
                self._send(identity, self._detached(reason))
            return
        self._publish()
        self._peers[attach.frontend_id] = Peer(attach.frontend_id, identity, self._clock_ns())
        self._wire._attached = tuple(self._peers)
        monotonic_ns, wall_ns = _now(self._clock_ns)
        hello = msgspec.structs.replace(
            self._hello,
            step_id=self._step_id,
            counters=self._counters,
            load=self._current_load(),
            monotonic_ns=monotonic_ns,
            wall_ns=wall_ns,
        )
        logger.info("attached frontend=%s", attach.frontend_id)
        self._deliver(self._peers[attach.frontend_id], encode(hello))

    def _objection(self, identity: bytes, attach: Attach, peer: Peer | None) -> DetachReason | None:
        if attach.schema != SCHEMA_VERSION:
            return DetachReason.SCHEMA
        if attach.frontend_id.encode() != identity or not attach.frontend_id.isascii():
            return DetachReason.UNKNOWN
        if peer is not None:
            return DetachReason.DUPLICATE
        return DetachReason.FULL if len(self._peers) >= MAX_FRONTENDS else None

    # ---- leaving ----

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._wire.refused_messages += 1
        logger.debug("message refused identity=%s reason=%r", identity.hex(), reason)

    def _cut_off(self, peer: Peer, reason: DetachReason) -> None:
        self._wire.frontends_cut_off += 1
        self._send(peer.identity, self._detached(reason))
        self._remove(peer, reason.sentence)

    def _remove(self, peer: Peer, reason: str) -> None:
        logger.warning("frontend gone frontend=%s reason=%r", peer.frontend_id, reason)
        self._forget(peer)
        self._mailbox.put(peer.frontend_id, Gone(peer.frontend_id, reason))

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.frontend_id, None)
        self._wire._attached = tuple(self._peers)
        self._update_paused()

    def _update_paused(self) -> None:
        self._mailbox.set_paused(frozenset(p.frontend_id for p in self._peers.values() if p.is_behind))


_ROUTER_OPTIONS = {
    zmq.ROUTER_MANDATORY: 1,  # sending to nobody is an error: a vanished frontend is noticed at once
    zmq.SNDHWM: SEND_HIGH_WATER_MARK,
    zmq.RCVHWM: SEND_HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: 2 * MAX_MESSAGE_BYTES,  # the codec refuses and counts; far beyond, ZeroMQ drops the connection
    zmq.IPV6: 1,
    zmq.LINGER: LINGER_MS,
}


def _now(clock_ns: Callable[[], int]) -> tuple[int, int]:
    return clock_ns(), time.time_ns()
