"""From the bytes of a request body to a typed request, or a 400 that names the field.

Owns the checks JSON libraries leave out: depth (their recursion is ours to bound), duplicate keys, lone bytes that are no
UTF-8. Never judges values: that is `frontend.openai`. Called by `frontend.completions` and `frontend.health`.
"""

import re
from typing import TypeVar

import msgspec

from frontend.errors import ApiError, invalid

MAX_JSON_DEPTH = 64
LARGE_BODY_BYTES = 64 * 1024  # beyond this, decode and tokenise in a thread: 1 MB takes tens of milliseconds

_T = TypeVar("_T")

# Possessive, and an unterminated string runs to the end: no input makes it scan a byte more than twice.
_TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"([ \t\r\n]*+:)?|\\?\Z)|[\[\]{}]', re.DOTALL)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_POSITION = re.compile(r"\(byte (\d+)\)$")
_OPEN_VALUE = re.compile(rb'"(\w{1,64})"[ \t\r\n]*:[ \t\r\n]*[-+a-zA-Z]{0,8}[ ,}\]]{0,3}\Z', re.ASCII)
_BOM = b"\xef\xbb\xbf"


def decode_body(body: bytes, kind: type[_T]) -> tuple[_T, frozenset[str]]:
    """Decode `body` strictly as `kind`; also return the names of its top-level fields.

    Raises ApiError(400). Cost is linear in the body; call it in a thread beyond LARGE_BODY_BYTES.
    """
    body = body.removeprefix(_BOM)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the request body is not UTF-8: bad byte at offset {error.start}") from None
    names = top_level_names(body)
    return decode_value(body, kind), names


def decode_value(raw: bytes | msgspec.Raw, kind: type[_T], under: str | None = None) -> _T:
    """Decode JSON as `kind`; errors name the field, below the field `under` when given."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), under) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        name = under or _key_at(bytes(raw), reason)
        where = f", in the value of {name!r}" if name else ""
        raise invalid(f"the request body is not valid JSON: {reason}{where}", name) from None


def _key_at(raw: bytes, reason: str) -> str | None:
    """The field whose value the decoder stopped in, when it can be told: `{"temperature": NaN}` is the common mistake."""
    position = _POSITION.search(reason)
    if position is None:
        return None
    end = int(position[1])
    key = _OPEN_VALUE.search(raw[max(0, end - 200) : end])
    return key[1].decode() if key else None


def top_level_names(body: bytes) -> frozenset[str]:
    """Names of the outermost object's fields. Raises ApiError for nesting beyond the limit and for duplicate keys.

    Malformed JSON passes here; the decoder reports it better.
    """
    objects: list[set[bytes] | None] = []  # keys seen per open bracket; None for a list
    outermost: set[bytes] = set()
    for match in _TOKEN.finditer(body):
        token = match[0]
        if match[2] is not None:
            if objects and (keys := objects[-1]) is not None:
                _remember(keys, match[1])
        elif token == b"{" or token == b"[":
            if len(objects) == MAX_JSON_DEPTH:
                raise invalid(f"the request body is nested deeper than {MAX_JSON_DEPTH} levels")
            objects.append((outermost if not objects else set()) if token == b"{" else None)
        elif token in (b"}", b"]") and objects:
            objects.pop()
    return frozenset(_unescaped(key) for key in outermost)


def _remember(keys: set[bytes], key: bytes) -> None:
    if b"\\" in key:
        key = _unescaped(key).encode()
    if key in keys:
        name = key.decode()
        raise invalid(f"the field {name[:80]!r} is given twice", name[:80])
    keys.add(key)


def _unescaped(key: bytes) -> str:
    try:
        return msgspec.json.decode(b'"' + key + b'"', type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid("the request body is not valid JSON: a key holds a bad escape") from None


def _type_error(message: str, under: str | None) -> ApiError:
    found = _PATH.search(message)
    path = found[1] if found else ""
    sentence = message[: found.start()] if found else message
    missing = re.match(r"Object missing required field `(\w+)`", sentence)
    if missing:
        path = f"{path}.{missing[1]}".strip(".")
        sentence = "a required field is missing"
    param = "".join(part for part in (under, "." if under and path and path[0] != "[" else "", path) if part)
    sentence = sentence[0].lower() + sentence[1:].replace("`", "")
    return invalid(f"{param}: {sentence}" if param else f"request body: {sentence}", param or None)
