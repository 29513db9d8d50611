"""Compressed request bodies: inflated here, never by the HTTP library, and never beyond the limit.

aiohttp inflates as bytes arrive, on the event loop, also what is only read to be thrown away: 1 MB of gzip (1 GB of zeros) sent to
any route cost 5 s of it. Owns the encodings that are taken; whatever else a Content-Encoding header says is refused by name.
Called by `frontend.server` for the routes that read a body, in a thread.
"""

import zlib

from frontend.errors import ApiError, clipped, invalid

HEADER = "Content-Encoding"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD = 8  # low bits of a zlib stream's first byte


def check_encoding(encoding: str) -> str:
    """The encoding's name in lower case; "identity" for none. Raises ApiError(415) for one that is not taken."""
    name = encoding.strip().lower() or "identity"
    if name not in ("identity", "gzip", "deflate"):
        raise ApiError(415, f"{HEADER} {clipped(encoding)} is not supported: use gzip, deflate or none", param=HEADER)
    return name


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """What `body` says. `encoding`: from `check_encoding`. Raises ApiError(413) beyond `limit` bytes, ApiError(400) for junk."""
    if encoding == "identity":
        return body
    inflater = zlib.decompressobj(_GZIP if encoding == "gzip" else _deflate_bits(body))
    try:
        content = inflater.decompress(body, limit + 1)
    except zlib.error:
        raise _malformed() from None
    if len(content) > limit:
        raise too_large(limit)
    if not inflater.eof or inflater.unused_data:
        raise _malformed()
    return content


def _deflate_bits(body: bytes) -> int:
    """The standard says zlib's format; some clients send the bare one."""
    return _ZLIB if body and body[0] & 0x0F == _ZLIB_METHOD else _RAW


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")


def _malformed() -> ApiError:
    return invalid(f"the request body is not what its {HEADER} header says", HEADER)
