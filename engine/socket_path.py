"""Whether an engine may listen at a path. Never binds anything itself. Called by engine.wire before it does."""

import os
import socket
from pathlib import Path

from engine.handover import WireFailure

MAX_PATH_BYTES = 100  # sun_path holds 108 on Linux and 104 elsewhere


def check_socket_path(path: Path) -> None:
    """Refuse a path that cannot be bound, and one on which an engine lives: ZeroMQ would take it over silently."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise WireFailure(f"cannot listen on ipc://{path}: the path is longer than {MAX_PATH_BYTES} bytes")
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
