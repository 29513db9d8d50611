"""Names and numbers of the wire: addresses, framing, time limits. The sockets live in engine.wire and frontend.engine_client.

Framing: the engine binds one ROUTER; each frontend connects one DEALER per engine whose ZeroMQ identity is its
frontend_id. One message is one frame (ROUTER adds the identity frame in front).
"""

import ipaddress
import os

DEFAULT_ENGINE_ADDRESS = "tcp://127.0.0.1:5570"

HEARTBEAT_INTERVAL_S = 0.5  # engine -> frontends when no step was published for that long
PING_INTERVAL_S = 1.0  # frontend -> engine when it had nothing to acknowledge
ENGINE_SILENT_S = 3.0  # a frontend gives an engine up after that long without any message
# An engine cuts a frontend off after that long without a Ping; with the tick that looks for it and the step that frees the
# blocks, what a hanging frontend ran is gone within 5 s.
FRONTEND_SILENT_S = 4.5
FENCE_TIMEOUT_S = 0.25
MAX_UNACKNOWLEDGED_STEPS = 16  # beyond this the frontend's rows pause
SEND_HIGH_WATER_MARK = 10_000  # messages queued for one frontend before it is cut off
MAX_FRONTENDS = 64
MAX_PATH_BYTES = 100  # of ipc://: a socket's name holds 108 on Linux and 104 elsewhere; ZeroMQ would retry for ever


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, a name or address with or without brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may mean anything


def stays_here(address: str) -> bool:
    """Whether only this machine can be at the other end of an engine's address. A name other than localhost is not known to."""
    return address.startswith("ipc://") or is_loopback(address.partition("://")[2].rpartition(":")[0])


def check_address(address: str) -> str:
    """Return `address` if ZeroMQ can bind or connect it here, else raise ValueError with a sentence."""
    if address.count("://") > 1:
        raise ValueError(f"{address!r} names several addresses where one is needed")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_PATH_BYTES:
            raise ValueError(f"the path of {address} is longer than {MAX_PATH_BYTES} bytes")
        return address
    if separator and scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if colon and host and port.isdigit() and 0 < int(port) < 65536:
            return address
    raise ValueError(f"{address!r} is no engine address: use tcp://HOST:PORT or ipc://PATH")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses of a list with commas, each checked. Raises ValueError with a sentence."""
    listed = tuple(check_address(part.strip()) for part in text.split(","))
    twice = next((address for address in listed if listed.count(address) > 1), None)
    if twice is not None:
        raise ValueError(f"{text!r} names {twice} twice")
    return listed
