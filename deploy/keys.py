"""`drafthouse keys DIRECTORY`: makes the key pairs that encrypt the wire between engines and frontends.

Owns the names and permissions of the files. Never overwrites, never shows a key. The format is protocol.curve_keys'.
"""

import os
import sys
from pathlib import Path

import zmq
from zmq.utils import z85

from protocol.curve_keys import render
from protocol.options import refuse

PROGRAM = "drafthouse keys"
ROLES = ("engine", "frontend")
_USAGE = f"""usage: {PROGRAM} DIRECTORY

Makes DIRECTORY (readable by you only) with a key pair for the engines and one for the frontends of a fleet:
  engine.key    frontend.key    secret: each side holds its own
  engine.pub    frontend.pub    public: each side holds the other's
Existing files are never overwritten.
"""


def main() -> int:
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        refuse(PROGRAM, f"expected one DIRECTORY, got {' '.join(arguments)!r}: see {PROGRAM} --help")
    try:
        directory = Path(arguments[0])
        make_keys(directory)
    except (OSError, ValueError) as error:
        refuse(PROGRAM, str(error))
    sys.stdout.write(_next_steps(directory))
    return 0


def make_keys(directory: Path) -> None:
    """Write all four files, or none. Raises ValueError when one is there already, OSError when one cannot be written."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = [directory / f"{role}.{ending}" for role in ROLES for ending in ("key", "pub")]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise ValueError(f"{path} exists already: keys are never overwritten")
    directory.chmod(0o700)
    for role in ROLES:
        public, secret = (z85.decode(key) for key in zmq.curve_keypair())
        warning = f"drafthouse: the secret key of the {role}s. Who has it can pose as one."
        _write(directory / f"{role}.key", render("secret", secret, warning))
        _write(directory / f"{role}.pub", render("public", public, f"drafthouse: the public key of the {role}s."))


def _write(path: Path, text: str) -> None:
    # O_EXCL: whoever creates the file between the look and the writing must not get the key.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def _next_steps(directory: Path) -> str:
    return f"""keys made in {directory}

Give every engine engine.key and frontend.pub:
  drafthouse engine --listen tcp://0.0.0.0:5570 \\
      --curve-key-file {directory}/engine.key --curve-client-keys {directory}/frontend.pub
Give every frontend frontend.key and engine.pub:
  drafthouse frontend --engine tcp://ENGINE:5570 \\
      --curve-key-file {directory}/frontend.key --curve-server-key-file {directory}/engine.pub

Engines and frontends read them once, when they start. A frontend with keys of its own: run this again for another
directory, append its frontend.pub to the file that the engines read, and restart the engines. To replace keys, make new
ones and restart both sides.
"""


if __name__ == "__main__":
    sys.exit(main())
