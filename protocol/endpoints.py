"""Names and numbers of the wire: addresses, framing, time limits. The sockets live in engine.wire and frontend.engine_client.

Framing: the engine binds one ROUTER; each frontend connects one DEALER per engine whose ZeroMQ identity is its
frontend_id. One message is one frame (ROUTER adds the identity frame in front).
"""

DEFAULT_ENGINE_ADDRESS = "tcp://127.0.0.1:5570"

HEARTBEAT_INTERVAL_S = 0.5  # engine -> frontends when no step was published for that long
PING_INTERVAL_S = 1.0  # frontend -> engine when it had nothing to acknowledge
ENGINE_SILENT_S = 3.0  # a frontend gives an engine up after that long without any message
FRONTEND_SILENT_S = 5.0  # an engine cuts a frontend off after that long without a Ping
FENCE_TIMEOUT_S = 0.25
MAX_UNACKNOWLEDGED_STEPS = 16  # beyond this the frontend's rows pause
SEND_HIGH_WATER_MARK = 10_000  # messages queued for one frontend before it is cut off
MAX_FRONTENDS = 64


def check_address(address: str) -> str:
    """Return `address` if ZeroMQ can bind or connect it here, else raise ValueError with a sentence."""
    if address.count("://") > 1:
        raise ValueError(f"{address!r} names several addresses: this version connects to exactly one engine")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc" and rest:
        return address
    if separator and scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if colon and host and port.isdigit() and 0 < int(port) < 65536:
            return address
    raise ValueError(f"{address!r} is no engine address: use tcp://HOST:PORT or ipc://PATH")
