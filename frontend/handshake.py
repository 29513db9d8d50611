"""How a frontend's socket meets an engine's: its options, its keys, and what a failed handshake means in words.

Owns no socket. Used by frontend.engine_client only.
"""

import zmq
from zmq.utils import z85

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.curve_keys import ClientKeys
from protocol.endpoints import SEND_HIGH_WATER_MARK

# Whoever is told no by a key says so; everything else looks alike from this end, and two of the three alternate.
_MISFIT = "the handshake failed: the CURVE keys do not fit, only one side uses CURVE, or it was going away"
_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not accept this frontend's CURVE key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _MISFIT,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _MISFIT,
}
CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | sum(_FAILURES)


def socket_options(curve: ClientKeys | None) -> dict[int, int | bytes]:
    """For a DEALER, before it connects. `curve`: None connects in the clear."""
    options: dict[int, int | bytes] = {
        zmq.RECONNECT_IVL: 50,  # ms
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.SNDHWM: SEND_HIGH_WATER_MARK,
        zmq.RCVHWM: SEND_HIGH_WATER_MARK,
        zmq.MAXMSGSIZE: 2 * MAX_MESSAGE_BYTES,
        zmq.IPV6: 1,
    }
    if curve is not None:
        options[zmq.CURVE_SERVERKEY] = curve.server
        options[zmq.CURVE_PUBLICKEY] = zmq.curve_public(z85.encode(curve.secret))
        options[zmq.CURVE_SECRETKEY] = curve.secret
    return options


def failure(event: int) -> str | None:
    """Why the handshake failed, if `event` of the socket's monitor says that it did.

    The connection must then be made anew: after a refused key ZeroMQ itself does not try again.
    """
    return _FAILURES.get(zmq.Event(event))
