"""Whether an engine may listen at an address. Binds nothing that stays bound.

Called by engine.__main__ before the model is loaded, which takes minutes that an address in use would waste, and by
engine.wire before it binds.
"""

import os
import socket
from pathlib import Path

from engine.handover import WireFailure


def check_listening(address: str) -> None:
    """Raise `WireFailure` with a sentence for an address that cannot be bound now."""
    if address.startswith("ipc://"):
        _check_socket_path(Path(address.removeprefix("ipc://")))
    else:
        _check_port(address)


def _check_socket_path(path: Path) -> None:
    """Refuse a path on which an engine lives as well: ZeroMQ would take it over silently."""
    if not path.parent.is_dir():
        raise WireFailure(f"cannot listen on ipc://{path}: the directory {path.parent} does not exist")
    if not path.exists():
        return
    if not path.is_socket():
        raise WireFailure(f"cannot listen on ipc://{path}: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # a socket file that nobody listens on: left by an engine that was killed
    raise WireFailure(f"cannot listen on ipc://{path}: another engine listens there")


def _check_port(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(
            None if host == "*" else host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise WireFailure(f"cannot listen on {address}: {host} is not an address of this machine ({error})") from error
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ: what lingers is not in use
        try:
            probe.bind(place)
        except OSError as error:
            raise WireFailure(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
