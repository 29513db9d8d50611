"""Key files of the wire's encryption (CURVE): their format, and what each side must hold.

A file says `secret = HEX` or `public = HEX`, 64 digits; lines that begin with # are comments, so public files can be joined with
cat. Hexadecimal, because ZeroMQ's own Z85 text may begin with # or hold quotes. Never makes a key and never opens a socket.
Written by `deploy.keys`; read by `engine.assembly` and `frontend.__main__`.
"""

import re
from dataclasses import dataclass, field

from protocol.secret_files import read_ascii

KEY_BYTES = 32
MAX_FILE_BYTES = 256 * 1024
MAX_CLIENT_KEYS = 1024
_LINE = re.compile(r"(public|secret)\s*=\s*([0-9A-Fa-f]{64})", re.ASCII)
_OTHER = {"public": "secret", "secret": "public"}


@dataclass(frozen=True)
class ServerKeys:
    """An engine's: its own secret, and the public keys of the frontends that may connect."""

    secret: bytes = field(repr=False)  # 32 bytes, as every key here
    clients: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class ClientKeys:
    """A frontend's: its own secret, and the public key its engines must prove to have."""

    secret: bytes = field(repr=False)
    server: bytes = b""


def load_server_keys(key_file: str | None, client_keys: str | None) -> ServerKeys | None:
    """None without the options. Raises ValueError with a sentence that names option and file."""
    if key_file is None or client_keys is None:
        return None  # half of it was refused with the options
    clients = _read(client_keys, "--curve-client-keys", "public")
    if len(clients) > MAX_CLIENT_KEYS:
        raise ValueError(f"--curve-client-keys {client_keys} holds {len(clients)} keys; at most {MAX_CLIENT_KEYS}")
    return ServerKeys(_only(key_file, "--curve-key-file", "secret"), frozenset(clients))


def load_client_keys(key_file: str | None, server_key_file: str | None) -> ClientKeys | None:
    """None without the options. Raises ValueError with a sentence that names option and file."""
    if key_file is None or server_key_file is None:
        return None  # half of it was refused with the options
    server = _only(server_key_file, "--curve-server-key-file", "public")
    return ClientKeys(_only(key_file, "--curve-key-file", "secret"), server)


def render(kind: str, key: bytes, comment: str) -> str:
    """The text of a file with one key. `kind`: public or secret."""
    return f"# {comment}\n{kind} = {key.hex()}\n"


def check_curve_options(key_file: str | None, other_file: str | None, other_flag: str, addresses: list[str]) -> bool:
    """Whether CURVE is on. Raises ValueError for half of it, and for an address that it says nothing about."""
    if key_file is None and other_file is None:
        return False
    if key_file is None or other_file is None:
        given, missing = ("--curve-key-file", other_flag) if other_file is None else (other_flag, "--curve-key-file")
        raise ValueError(f"{given} works only together with {missing}")
    for address in addresses:
        if address.startswith("ipc://"):
            raise ValueError(
                f"--curve-key-file says nothing about {address}: CURVE is for tcp://, and an ipc:// socket is protected by "
                "the permissions of its file"
            )
    return True


def _only(path: str, option: str, kind: str) -> bytes:
    keys = _read(path, option, kind)
    if len(keys) != 1:
        raise ValueError(f"{option} {path} holds {len(keys)} keys; this option takes one")
    return keys[0]


def _read(path: str, option: str, kind: str) -> list[bytes]:
    """The keys of a file, all of one kind, at least one. What is in the file is never repeated: it may be a secret."""
    keys = []
    for number, line in enumerate(
        read_ascii(path, option, MAX_FILE_BYTES, is_secret=kind == "secret").splitlines(), start=1
    ):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} of {option} {path} is no key: expected {kind} = 64 hexadecimal digits")
        if found[1] != kind:
            raise ValueError(f"line {number} of {option} {path} is a {_OTHER[kind]} key; this option takes {kind} ones")
        keys.append(bytes.fromhex(found[2]))
    if not keys:
        raise ValueError(f"{option} {path} holds no key: `drafthouse keys DIRECTORY` makes some")
    return keys
