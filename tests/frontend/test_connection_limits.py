"""What a client can do to a frontend without saying anything: connect, dawdle, and send heads that never end."""

import asyncio
import contextlib
import json
import resource
import socket

import pytest

from frontend import connections
from frontend.config import FrontendConfig
from tests.frontend.test_app_connections import LONG, listening

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


async def read_answer(reader) -> bytes:
    """Head and body of one answer on a connection that stays open."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await asyncio.wait_for(reader.readexactly(length), 5)


async def trickle(writer, data: bytes, gap_s: float = 0.02) -> None:
    """Byte by byte, never pausing for long, until the other side has had enough."""
    try:
        for index in range(len(data)):
            writer.write(data[index : index + 1])
            await writer.drain()
            await asyncio.sleep(gap_s)
    except ConnectionError:
        pass


def refused(site, reason: str) -> str:
    return f'drafthouse:connections_refused_total{{reason="{reason}"}} '


async def test_connections_beyond_the_limit_get_a_503_and_those_before_notice_nothing():
    async with listening(max_connections=3) as site:
        held = [await site.connect() for _ in range(3)]
        for reader, writer in held:
            writer.write(HEALTH)
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 200")
        reader, _ = await site.connect()
        answer = await asyncio.wait_for(reader.read(), 5)
        head, body = answer.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in head and b"Connection: close" in head
        assert "3 connections (--max-connections)" in json.loads(body)["error"]["message"]
        for reader, writer in held:
            writer.write(HEALTH)
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 200")
        assert refused(site, "full") + "1\n" in site.page()


async def test_a_connection_that_ends_makes_room():
    async with listening(max_connections=1) as site:
        for _ in range(3):
            async with asyncio.timeout(5):
                while True:
                    reader, writer = await site.connect()
                    writer.write(HEALTH)
                    try:
                        answer = await reader.readuntil(b"\r\n")
                    except (asyncio.IncompleteReadError, ConnectionError):
                        answer = b""
                    writer.close()
                    if b" 200 " in answer:
                        break
                    await asyncio.sleep(0.01)


async def test_a_flood_of_connections_is_counted_back_to_nothing():
    async with listening(max_connections=5) as site:
        opened = await asyncio.gather(*(site.connect() for _ in range(100)))
        await site.until(lambda: refused(site, "full") + "95\n" in site.page(), 5)
        for _, writer in opened:
            writer.close()
        async with asyncio.timeout(5):
            while True:
                reader, writer = await site.connect()
                writer.write(HEALTH)
                if b" 200 " in await reader.readline():
                    return


def test_without_a_limit_of_its_own_a_frontend_takes_what_the_open_files_allow(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (1024, 4096))
    assert connections.max_connections(FrontendConfig()) == 1024 - connections.RESERVED_FILES
    assert connections.max_connections(FrontendConfig(max_connections=7)) == 7


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 1_000_000, (65_536, 1_000_000)),
        (1024, resource.RLIM_INFINITY, (65_536, resource.RLIM_INFINITY)),
        (100_000, 1_000_000, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (4096, 4096, None),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, soft, hard, expected):
    calls = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda which, pair: calls.append(pair))
    connections.raise_open_files_limit()
    assert calls == ([] if expected is None else [expected])


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_come_is_not_waited_for(sent):
    async with listening(request_read_timeout_s=0.2) as site:
        reader, writer = await site.connect()
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert refused(site, "slow_head") + "1\n" in site.page()


async def test_a_trickling_head_is_cut_off_however_lively_it_is():
    async with listening(request_read_timeout_s=0.3) as site:
        reader, writer = await site.connect()
        sending = asyncio.create_task(trickle(writer, b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000))
        with contextlib.suppress(
            ConnectionResetError
        ):  # what it still sends when the server has closed is answered by a reset
            assert await asyncio.wait_for(reader.read(), 5) == b""
        await sending


@pytest.mark.parametrize("is_lively", [False, True])
async def test_a_body_that_does_not_come_is_cut_off_and_counted_as_abandoned(is_lively):
    async with listening(request_read_timeout_s=0.3) as site:
        reader, writer = await site.connect()
        writer.write(BODY_HEAD)
        sending = asyncio.create_task(trickle(writer, b'{"prompt": "' + b"x" * (900 if is_lively else 0)))
        with contextlib.suppress(
            ConnectionResetError
        ):  # what it still sends when the server has closed is answered by a reset
            assert await asyncio.wait_for(reader.read(), 5) == b""
        await site.until(lambda: 'drafthouse:requests_abandoned_total{stage="body"} 1\n' in site.page())
        assert refused(site, "slow_body") + "1\n" in site.page()
        assert not site.engine.submitted
        await sending


async def test_each_request_has_its_own_time_for_head_and_body():
    """Longer together than the limit, each part within it."""
    async with listening(request_read_timeout_s=2.0) as site:
        site.engine.autoplay = True
        reader, writer = await site.connect()
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for part in (head[:20], head[20:], body):
            writer.write(part)
            await asyncio.sleep(1.2 if part is not body else 0)
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200")


async def test_an_answer_may_take_longer_than_the_request():
    async with listening(request_read_timeout_s=0.5) as site:
        reader, writer = await site.connect()
        await site.send(writer, {**LONG, "stream": True, "max_tokens": 3})
        given = await site.submitted()
        for _ in range(2):
            await asyncio.sleep(0.4)
            given.output(0, [582])
        site.engine._step(given, 0, [582])
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 5)


async def test_an_idle_kept_connection_is_nobody_who_dawdles():
    async with listening(request_read_timeout_s=0.5) as site:
        reader, writer = await site.connect()
        for _ in range(2):
            writer.write(HEALTH)
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.8)
        writer.write(HEALTH[:10])
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert refused(site, "slow_head") + "1\n" in site.page()


async def test_a_body_that_nobody_reads_leaves_the_connection_usable():
    """It comes after the answer, is thrown away, and is not taken for the head of another request."""
    async with listening(request_read_timeout_s=0.3) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n")
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 404")
        writer.write(b"abcdef")
        await asyncio.sleep(0.6)
        writer.write(HEALTH)
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 200")
        assert refused(site, "slow_head") + "0\n" in site.page()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % index for index in range(200)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"y" * 17_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"y" * 17_000 + b": z\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"y" * 5_000_000,
    ],
    ids=["request line", "number of headers", "header value", "header name", "a header without end"],
)
async def test_heads_are_bounded(head):
    async with listening() as site:
        reader, writer = await site.connect()
        writer.write(head)
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed while we were still sending: as good
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert not answer or answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))


async def test_an_answer_that_nobody_reads_is_not_kept():
    async with listening(request_read_timeout_s=0.3) as site:
        _, writer = await _ask_for_much(site)
        async with asyncio.timeout(20):
            while refused(site, "slow_reader") + "1\n" not in site.page():
                await asyncio.sleep(0.05)
        writer.close()


async def test_an_answer_that_is_read_slowly_arrives_whole():
    async with listening(request_read_timeout_s=2.0) as site:
        reader, writer = await _ask_for_much(site)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert left > 8_000_000
        while left:  # with pauses, so that it takes much longer than nothing may be read
            part = min(left, 1_000_000)
            left -= len(await asyncio.wait_for(reader.readexactly(part), 20))
            await asyncio.sleep(0.5)
        assert refused(site, "slow_reader") + "0\n" in site.page()
        writer.close()


async def _ask_for_much(site):
    """A request whose answer is longer than what the kernel holds for a client with a small window."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", site.port))
    reader, writer = await asyncio.open_connection(sock=client)
    body = json.dumps({"tokens": [1] * 800_000}).encode()  # 12 characters each
    head = f"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer
