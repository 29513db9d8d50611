"""Who may use what is not for every client: profiles, and the trace level of a request.

Owns the admin keys: keeps only digests, compares all of them in constant time. Keys appear in no log, repr or error. Asked by
`frontend.gate`, `frontend.profiling` and for the header X-Trace-Level; an admin's key opens the API as well, because a request
has room for one key only.
"""

import hmac

from frontend.errors import ApiError
from frontend.key_files import MAX_FILE_BYTES, bearer_digest, check_key, digest, read_lines

__all__ = ["MAX_FILE_BYTES", "AdminKeys", "not_admin"]

OPTION = "--admin-key-file"


class AdminKeys:
    """A set of keys, possibly empty; an empty one allows nobody."""

    def __init__(self, keys: frozenset[str] = frozenset()) -> None:
        self.digests = tuple(digest(key) for key in sorted(keys))

    @classmethod
    def load(cls, path: str | None) -> "AdminKeys":
        """The keys of --admin-key-file. Raises ValueError with a sentence."""
        if path is None:
            return cls()
        lines = read_lines(path, OPTION)
        for number, key in lines:
            check_key(key, f"line {number} of {OPTION} {path}")
        return cls(frozenset(key for _, key in lines))

    def take(self, newer: "AdminKeys") -> None:
        """From now on these keys and no others, for everybody who holds this object."""
        self.digests = newer.digests

    def allows(self, authorization: str | None) -> bool:
        """Whether an Authorization header reads `Bearer KEY` with one of the keys. Takes the same time for every key."""
        given = bearer_digest(authorization)
        matches = [hmac.compare_digest(given, own) for own in self.digests]
        return any(matches)


def not_admin(key_file: str | None) -> ApiError:
    """The answer to who is no admin. `key_file`: the option's value, which says whether anybody can be one."""
    if key_file is None:
        return ApiError(401, f"this needs an admin key, and this server has none: start it with {OPTION} FILE")
    return ApiError(
        401, f"this needs an admin key (one of {OPTION}): Authorization: Bearer KEY", code="invalid_api_key"
    )
