"""The keys of clients: who sent a request.

Owns the API keys: keeps only digests, compares all of them in constant time, for every request. Keys appear in no log, repr or
error; names do. Built by `frontend.key_ring`, asked by `frontend.gate`.

A line of the file is `KEY` or `NAME: KEY`. A key holds no colon, so the two cannot be confused. Keys of one name are one client:
a new key is handed out under the name of the old one, and both work until the old line is removed.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.admin import AdminKeys
from frontend.key_files import bearer_digest, check_key, digest, read_lines

OPTION = "--api-key-file"
VARIABLE = "DRAFTHOUSE_API_KEY"
MAX_KEYS = 1000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever holds a key. `identity` is equal for one client's keys; `label` may be logged."""

    identity: str
    label: str

    @property
    def scope(self) -> str:
        """Equal for one client's keys in every frontend, and tells nobody anything: 16 hexadecimal digits."""
        return hashlib.blake2b(self.identity.encode(), digest_size=8).hexdigest()


class ApiKeys:
    """A set of keys, possibly empty; with an empty one the API is open."""

    def __init__(self, entries: Sequence[tuple[bytes, Client]] = ()) -> None:
        """`entries`: (digest of the key, who holds it)."""
        self._entries = tuple(entries)

    @classmethod
    def load(cls, path: str | None, single: str | None) -> "ApiKeys":
        """The keys of --api-key-file and the one of the environment. Raises ValueError with a sentence."""
        entries: dict[bytes, Client] = {}
        if single is not None:
            _add(entries, None, single, VARIABLE, VARIABLE)
        for number, line in read_lines(path, OPTION) if path is not None else ():
            name, key = _split(line, f"line {number} of {OPTION} {path}")
            _add(entries, name, key, f"line {number} of {OPTION} {path}", f"line {number}")
        if len(entries) > MAX_KEYS:
            raise ValueError(f"{OPTION} {path} holds {len(entries)} keys; at most {MAX_KEYS}")
        return cls(list(entries.items()))

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, newer: "ApiKeys") -> None:
        """From now on these keys and no others, for everybody who holds this object."""
        self._entries = newer._entries

    def client(self, authorization: str | None) -> Client | None:
        """Who an Authorization header `Bearer KEY` comes from. Takes the same time whichever key it is, or none."""
        given = bearer_digest(authorization)
        found = None
        for own, client in self._entries:
            if hmac.compare_digest(given, own):
                found = client
        return found

    def identities(self) -> frozenset[str]:
        return frozenset(client.identity for _, client in self._entries)

    def check_apart(self, admin: AdminKeys) -> None:
        """Raises ValueError when a key is in both sets: a client would be an admin without anybody having meant it."""
        shared = {own for own, _ in self._entries} & set(admin.digests)
        if shared:
            raise ValueError(
                f"{len(shared)} key(s) of {OPTION} or {VARIABLE} are also in --admin-key-file: clients would be admins"
            )


def _split(line: str, where: str) -> tuple[str | None, str]:
    """(name, key) of a line."""
    name, colon, key = line.partition(":")
    if not colon:
        return None, line
    if _NAME.fullmatch(name.strip()) is None:
        # Not repeated: what stands before a colon may be half of a key.
        raise ValueError(f"{where}: a name before the colon has 1 to 64 letters, digits, dots, dashes or underscores")
    return name.strip(), key.strip()


def _add(entries: dict[bytes, Client], name: str | None, key: str, where: str, label: str) -> None:
    check_key(key, where)
    if ":" in key:
        raise ValueError(f"{where} holds a colon within the key; a colon ends a name")
    own = digest(key)
    if own in entries:
        raise ValueError(f"{where} repeats a key: one key is one client's")
    entries[own] = Client(f"name {name}" if name else f"key {own.hex()}", name or label)
