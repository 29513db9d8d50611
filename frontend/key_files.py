"""Files of bearer keys: one a line, blank lines and lines that begin with # left out.

Owns reading them, what a key may look like, and that only digests are kept. A key is in no log, repr or error. Used by
`frontend.admin` and `frontend.api_keys`.
"""

import hashlib

from protocol.secret_files import read_ascii

MIN_KEY_CHARACTERS = 16
MAX_KEY_CHARACTERS = 512
MAX_FILE_BYTES = 64 * 1024


def read_lines(path: str, option: str) -> list[tuple[int, str]]:
    """(line number, content) of every line that means something; at least one.

    Raises ValueError with a sentence that names option and file. A file that other users can read is only warned of: that is
    how container runtimes mount secrets.
    """
    stripped = [
        (number, line.strip())
        for number, line in enumerate(read_ascii(path, option, MAX_FILE_BYTES).splitlines(), start=1)
    ]
    lines = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    if not lines:
        raise ValueError(f"{option} {path} holds no key: write one of {MIN_KEY_CHARACTERS} characters or more")
    return lines


def check_key(key: str, where: str) -> None:
    """Raises ValueError that says where the key stands, never what it is."""
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        bound = f"at least {MIN_KEY_CHARACTERS}" if len(key) < MIN_KEY_CHARACTERS else f"at most {MAX_KEY_CHARACTERS}"
        raise ValueError(f"{where} has {len(key)} characters; a key has {bound}")
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{where} holds a blank or a control character; a key is one word")


def bearer_digest(authorization: str | None) -> bytes:
    """Of the key in an Authorization header that reads `Bearer KEY`; that of no key, which equals none, where it does not."""
    scheme, _, key = (authorization or "").partition(" ")
    return digest(key.strip(" ") if scheme.lower() == "bearer" else "")


def digest(key: str) -> bytes:
    """Of equal length for every key, so that a comparison does not tell how long the right one is."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
