"""Who may connect to the engine's socket: keys, and the account of those that failed.

Owns the CURVE options of the ROUTER, ZeroMQ's authentication protocol (ZAP, RFC 27) and the monitor of failed handshakes. Never
reads a message of the wire, never waits, and logs no key. Used by the I/O thread of engine.wire only.
"""

import logging
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.curve_keys import ServerKeys

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, the client's public key
BATCH = 64  # handshakes looked at in one turn; more wait, so that a storm of them delays no step
LOG_INTERVAL_S = 10.0  # a frontend with a wrong key comes back every second
_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Door:
    """Of one ROUTER. `keys`: None lets in everybody who speaks ZeroMQ."""

    def __init__(self, keys: ServerKeys | None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock_s = clock_s
        self._quiet_until_s = clock_s()
        self._monitor: zmq.Socket[bytes]
        self._judge: zmq.Socket[bytes] | None = None

    def guard(self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]") -> None:
        """Before `router` is bound: with keys, ZeroMQ asks for every connection, and one that nobody judges is refused."""
        self._monitor = router.get_monitor_socket(_HANDSHAKE_FAILURES)
        if self._keys is None:
            return
        self._judge = context.socket(zmq.REP)
        self._judge.bind(ZAP_ADDRESS)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"engine")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """To be polled for input; `attend` then takes it."""
        return [self._monitor] if self._judge is None else [self._monitor, self._judge]

    def attend(self) -> list[str]:
        """Judge who waits; why each connection failed that did since the last call."""
        if self._judge is not None and self._keys is not None:
            for _ in range(BATCH):
                if not _has_input(self._judge):
                    break
                question = self._judge.recv_multipart(zmq.NOBLOCK)
                is_welcome = is_known(question, self._keys)
                self._judge.send_multipart(_verdict(question, is_welcome))
                if not is_welcome:
                    self._tell(question)
        reasons: list[str] = []
        while _has_input(self._monitor) and len(reasons) < BATCH:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & zmq.Event.HANDSHAKE_FAILED_AUTH:
                reasons.append("its CURVE key is not one of --curve-client-keys")
            elif event & _HANDSHAKE_FAILURES:
                reasons.append("the handshake failed: it does not speak ZeroMQ, or not with the keys of this engine")
        return reasons

    def _tell(self, question: list[bytes]) -> None:
        now_s = self._clock_s()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + LOG_INTERVAL_S
            address = question[3][:64].decode("ascii", "replace") if len(question) > 3 else "?"
            logger.warning("connection refused address=%r reason='its key is not one of --curve-client-keys'", address)


def is_known(question: list[bytes], keys: ServerKeys) -> bool:
    """Whether ZAP asks about a key that may connect. Anything but a well-formed question about CURVE is refused."""
    if len(question) != ZAP_FRAMES or question[0] != ZAP_VERSION or question[5] != b"CURVE":
        return False
    return question[6] in keys.clients


def _verdict(question: list[bytes], is_welcome: bool) -> list[bytes]:
    request_id = question[1] if len(question) > 1 else b""
    status = (b"200", b"OK") if is_welcome else (b"400", b"not allowed")
    return [ZAP_VERSION, request_id, *status, b"", b""]


def _has_input(watched: "zmq.Socket[bytes]") -> bool:
    return bool(int(watched.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
