"""Who may use what is not for every client: profiles, and the trace level of a request.

Owns the admin keys: reads them once, keeps only digests, compares all of them in constant time. Keys appear in no log, repr or
error. Asked by `frontend.profiling` and for the header X-Trace-Level.
"""

import hashlib
import hmac
import logging
from pathlib import Path

from frontend.errors import ApiError

logger = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 16
MAX_FILE_BYTES = 64 * 1024
_OTHERS_READ = 0o004


class AdminKeys:
    """A set of keys, possibly empty; an empty one allows nobody."""

    def __init__(self, keys: frozenset[str] = frozenset()) -> None:
        self._digests = tuple(_digest(key) for key in sorted(keys))

    @classmethod
    def load(cls, path: str | None) -> "AdminKeys":
        """The keys of --admin-key-file: one per line, blank lines and lines that begin with # left out.

        Raises ValueError with a sentence for a file that cannot be read or whose content is not all keys. A file that other
        users can read is only warned of: that is how container runtimes mount secrets.
        """
        if path is None:
            return cls()
        lines = _read(path).splitlines()
        keys = {number: line.strip() for number, line in enumerate(lines, start=1)}
        keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
        for number, key in keys.items():
            _check(key, f"line {number} of --admin-key-file {path}")
        if not keys:
            raise ValueError(
                f"--admin-key-file {path} holds no key: write one of {MIN_KEY_CHARACTERS} characters or more"
            )
        return cls(frozenset(keys.values()))

    def allows(self, authorization: str | None) -> bool:
        """Whether an Authorization header reads `Bearer KEY` with one of the keys. Takes the same time for every key."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip(" "))
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def not_admin(key_file: str | None) -> ApiError:
    """The answer to who is no admin. `key_file`: the option's value, which says whether anybody can be one."""
    if key_file is None:
        return ApiError(401, "this needs an admin key, and this server has none: start it with --admin-key-file FILE")
    return ApiError(
        401, "this needs an admin key (one of --admin-key-file): Authorization: Bearer KEY", code="invalid_api_key"
    )


def _read(path: str) -> str:
    try:
        file = Path(path)
        if file.stat().st_mode & _OTHERS_READ:
            logger.warning("admin_key_file_readable_by_others path=%s advice='chmod 600'", path)
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--admin-key-file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"--admin-key-file {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError(f"--admin-key-file {path} holds characters other than ASCII") from None


def _check(key: str, where: str) -> None:
    if len(key) < MIN_KEY_CHARACTERS:
        raise ValueError(f"{where} has {len(key)} characters; a key has at least {MIN_KEY_CHARACTERS}")
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{where} holds a blank or a control character; a key is one word")


def _digest(key: str) -> bytes:
    """Of equal length for every key, so that a comparison does not tell how long the right one is."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
