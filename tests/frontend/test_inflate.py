"""Compressed bodies: what is taken, what is refused, and that a bomb costs neither memory nor anybody's time."""

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib

import pytest

from frontend.errors import ApiError
from frontend.inflate import check_encoding, inflate
from tests.frontend.test_app_connections import listening
from tests.timing import at_most_s

LIMIT = 1 << 20


def raw_deflate(content: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(content) + deflater.flush()


COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress, "raw deflate": raw_deflate}


def bomb(kind: str, megabytes: int) -> bytes:
    """So many MB of zeros in a thousandth of it, made without holding them."""
    bits = {"gzip": 31, "deflate": 15, "raw deflate": -15}[kind]
    deflater = zlib.compressobj(9, wbits=bits)
    return b"".join(deflater.compress(bytes(1 << 20)) for _ in range(megabytes)) + deflater.flush()


def refused(body: bytes, encoding: str, limit: int = LIMIT) -> int:
    with pytest.raises(ApiError) as refusal:
        inflate(body, encoding, limit)
    return refusal.value.status


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
def test_what_fits_comes_out_as_it_went_in(kind, size):
    content = bytes(index % 251 for index in range(size))
    assert inflate(COMPRESS[kind](content), kind.split()[-1], LIMIT) == content


@pytest.mark.parametrize("kind", COMPRESS)
def test_one_byte_beyond_the_limit_is_too_large(kind):
    assert refused(COMPRESS[kind](bytes(LIMIT + 1)), kind.split()[-1]) == 413


@pytest.mark.parametrize("kind", COMPRESS)
def test_junk_halves_and_tails_are_refused(kind):
    whole, encoding = COMPRESS[kind](b'{"prompt": "x"}' * 99), kind.split()[-1]
    for body in (b"", b"x", b"\x00" * 40, whole[:-1], whole[: len(whole) // 2], whole + b"more", whole * 2):
        assert refused(body, encoding) == 400


def test_other_encodings_are_refused_by_name_and_none_is_no_encoding():
    assert [check_encoding(value) for value in ("", " ", "identity", "GZIP", " deflate ")] == [
        "identity", "identity", "identity", "gzip", "deflate",
    ]  # fmt: skip
    for value in ("br", "zstd", "compress", "gzip, gzip", "gzip,identity", "x-gzip", "x" * 9999):
        with pytest.raises(ApiError) as refusal:
            check_encoding(value)
        assert refusal.value.status == 415 and len(refusal.value.message) < 200


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_bomb_takes_no_more_memory_than_the_limit(kind):
    body = bomb(kind, 200)
    tracemalloc.start()
    try:
        assert refused(body, kind.split()[-1]) == 413
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


async def answer_to(site, path: str, encoding: str, body: bytes) -> tuple[int, dict]:
    reader, writer = await site.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    head, _, content = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


@pytest.mark.parametrize("kind", COMPRESS)
async def test_a_compressed_request_is_served_like_any_other(kind):
    async with listening() as site:
        site.engine.autoplay = True
        body = COMPRESS[kind](json.dumps({"prompt": "x", "max_tokens": 3}).encode())
        status, answer = await answer_to(site, "/v1/completions", kind.split()[-1], body)
        assert status == 200 and answer["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/health", "/nope"])
async def test_a_bomb_stalls_nobody_on_any_route(path):
    """Routes that read no body included: what they throw away is not inflated first."""
    body = bomb("gzip", 300)
    async with listening(max_body_bytes=LIMIT) as site:
        site.engine.autoplay = True
        started_s = time.process_time()
        status, _ = await answer_to(site, path, "gzip", body)
        assert status in (413, 404, 405)
        # Inflating all of it takes a second of processor time here; the whole exchange a hundredth of that.
        at_most_s(time.process_time() - started_s, 0.5, "processor time of a bomb")


async def test_an_unknown_encoding_is_refused_before_the_body_is_read():
    async with listening() as site:
        reader, writer = await site.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 9999\r\n\r\n"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 415")
