"""What every response has in common, and what happens to requests whose client leaves: over real sockets."""

import asyncio
import contextlib
import json
import struct

import pytest
from aiohttp import web

from frontend.app import Listener, build_app
from protocol.messages import Finish
from protocol.reasons import CloseReason, FinishReason
from tests.frontend.fakes_client import FakeEngineClient, hello, server_over

LONG = {"prompt": "x", "max_tokens": 100}


class Site:
    """A listening frontend over a fake engine that says only what the test makes it say."""

    def __init__(self, engine, server, port):
        self.engine, self.server, self.port = engine, server, port
        self._writers = []

    async def connect(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def close(self):
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, writer, body, path="/v1/completions", method="POST", length=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data) if length is None else length}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()

    async def submitted(self, count=1):
        while len(self.engine.submitted) < count:
            await asyncio.sleep(0.001)
        return self.engine.submitted[count - 1]

    def page(self):
        return self.server.metrics.render(self.server.views(), "", "all")[0].decode()

    async def until(self, condition, within_s=2.0):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)

    def aborted(self, count):
        return lambda: f'finished_reason="abort"}} {count}\n' in self.page()


@contextlib.asynccontextmanager
async def listening(**options):
    engine = FakeEngineClient(hello(max_model_len=1000))
    engine.autoplay = False
    server = server_over(engine, port=0, **options)
    listener = Listener(build_app(server), server.config)
    await listener.start()
    try:
        site = Site(engine, server, listener.port)
        yield site
    finally:
        await site.close()
        await listener.stop()


@pytest.fixture
async def site():
    async with listening(sse_ping_interval_s=0.05) as found:
        yield found


def reset(writer):
    """Close so that the peer sees a reset, as when a process dies with data unread."""
    writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
    writer.transport.abort()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_seen", [0, 3])
async def test_a_client_that_leaves_aborts_its_request_once(site, how, stream, tokens_seen):
    _, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": stream})
    given = await site.submitted()
    for _ in range(tokens_seen):
        given.output(0, [582])
        await asyncio.sleep(0.01)
    if how == "reset":
        reset(writer)
    else:
        writer.close()
    await site.until(site.aborted(1))
    assert given.closes == [(-1, CloseReason.CLIENT_GONE, 0)]
    page = site.page()
    for family in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_queue_time_seconds"):
        assert f'vllm:{family}_count{{engine="0",model_name="SmolLM2-135M-Instruct"}} 1\n' in page
    assert 'finished_reason="stop"} 0' in page
    assert site.server.admission.sequences == 0


async def test_a_client_that_leaves_with_the_whole_stream_was_answered(site, monkeypatch):
    """A proxy closes its connection as soon as it has the last byte; that cancels whatever the handler still waits for."""
    sent = web.StreamResponse.write_eof

    async def send_and_lose(response, data=b""):
        await sent(response, data)
        asyncio.current_task().cancel()

    monkeypatch.setattr(web.StreamResponse, "write_eof", send_and_lose)
    reader, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": True})
    given = await site.submitted()
    given.output(0, [582], finish=Finish(FinishReason.STOP))
    assert b"data: [DONE]" in await reader.read()
    await site.until(lambda: "http_requests_total" in site.page())
    assert 'handler="/v1/completions",method="POST",status="2xx"} 1\n' in site.page()
    assert 'finished_reason="stop"} 1\n' in site.page() and 'finished_reason="abort"} 0\n' in site.page()


async def test_every_prompt_of_a_list_is_aborted(site):
    _, writer = await site.connect()
    await site.send(writer, {"prompt": ["a", "b", "c"], "n": 2, "stream": True})
    await site.submitted(3)
    writer.close()
    await site.until(site.aborted(6))
    assert all(given.closes == [(-1, CloseReason.CLIENT_GONE, 0)] for given in site.engine.submitted)


async def test_a_stream_outlives_its_clients_half_close(site):
    reader, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": True, "max_tokens": 3})
    writer.write_eof()
    given = await site.submitted()
    for _ in range(2):
        await asyncio.sleep(0.1)
        given.output(0, [582])
    site.engine._step(given, 0, [582])
    answer = (await asyncio.wait_for(reader.read(), 2)).decode()
    assert answer.count(" one") == 3
    assert "[DONE]" in answer
    assert ": ping" in answer
    assert 'finished_reason="length"} 1' in site.page()


async def test_a_half_closed_request_without_a_stream_ends_at_once_and_is_counted(site):
    reader, writer = await site.connect()
    await site.send(writer, LONG)
    await site.submitted()
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 2) == b""
    await site.until(site.aborted(1))


async def test_a_half_close_while_idle_closes_the_connection(site):
    reader, writer = await site.connect()
    await site.send(writer, b"", "/health", "GET")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(15)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 2) == b""


async def test_pipelined_requests_are_answered_in_order(site):
    reader, writer = await site.connect()
    await site.send(writer, b"", "/version", "GET")
    await site.send(writer, b"", "/health", "GET")
    await asyncio.sleep(0.05)
    writer.write_eof()
    answer = (await asyncio.wait_for(reader.read(), 2)).decode()
    assert answer.index("version") < answer.index('"status":"ok"')


async def test_pipelined_requests_before_a_half_close_are_all_answered(site):
    reader, writer = await site.connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    writer.write_eof()
    async with asyncio.timeout(3):
        assert (await reader.read()).count(b'{"status":"ok"}') == 3


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_what_its_headers_say_is_refused(site, encoding, caplog):
    reader, writer = await site.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\nContent-Length: 4\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\nxxxx")
    async with asyncio.timeout(3):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400") and b"Content-Encoding" in answer
    assert not caplog.records, "a client's mistake is no error of the server"


@pytest.mark.parametrize(
    ("expected", "status"), [("100-continue", b" 100 "), ("100-CONTINUE", b" 100 "), ("foo", b" 417 ")]
)
async def test_an_expectation_is_met_or_refused_as_an_error_like_any_other(site, expected, status):
    reader, writer = await site.connect()
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: {expected}\r\nContent-Length: 14\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert status in answer.split(b"\r\n")[0]
    if status == b" 417 ":
        length = next(int(line.split(b":")[1]) for line in answer.split(b"\r\n") if line.startswith(b"Content-Length"))
        error = json.loads(await reader.readexactly(length))["error"]
        assert "100-continue" in error["message"] and "foo" not in error["message"]
        return
    writer.write(b'{"prompt":"x"}')
    assert b" 200 " in await reader.readline()


async def test_a_waiting_stream_says_that_it_is_alive(site):
    reader, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": True})
    given = await site.submitted()
    await asyncio.wait_for(reader.readuntil(b": ping\n\n"), 2)
    site.engine._end(given, 0, [582], Finish(FinishReason.STOP))
    await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 2)


async def test_a_body_that_says_it_is_too_large_is_refused_unread():
    async with listening(max_body_bytes=2000) as site:
        reader, writer = await site.connect()
        await site.send(writer, b"", length=64 * 1024 * 1024)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
        assert head.startswith(b"HTTP/1.1 413")
        assert b"application/json" in head
        writer.close()


async def test_a_chunked_body_is_cut_off_at_the_limit():
    async with listening(max_body_bytes=2000) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_client_gone_while_sending_its_body_is_counted_apart(site):
    _, writer = await site.connect()
    await site.send(writer, b'{"prompt":', length=1000)
    await asyncio.sleep(0.05)
    reset(writer)
    await site.until(lambda: 'drafthouse:requests_abandoned_total{stage="body"} 1\n' in site.page())
    assert not site.engine.submitted


async def test_a_half_close_within_a_body_closes_the_connection(site):
    reader, writer = await site.connect()
    await site.send(writer, b'{"prompt":', length=1000)
    await asyncio.sleep(0.05)
    writer.write_eof()
    async with asyncio.timeout(3):
        assert await reader.read() == b""
    await site.until(lambda: 'drafthouse:requests_abandoned_total{stage="body"} 1\n' in site.page())


async def test_a_whole_body_before_a_half_close_is_served_however_large(site):
    """Larger than what aiohttp buffers before it stops reading."""
    reader, writer = await site.connect()
    site.engine.autoplay = True
    await site.send(writer, {"prompt": "x", "max_tokens": 3, "stream": True, "unknown": "y" * 1_000_000})
    writer.write_eof()
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/metrics", 405)],
)
async def test_unknown_routes_and_methods_get_openais_error(site, method, path, status):
    reader, writer = await site.connect()
    await site.send(writer, b"", path, method)
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)).decode()
    assert head.startswith(f"HTTP/1.1 {status}")
    assert "application/json" in head
    assert "Server: drafthouse\r\n" in head
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_bytes_that_are_no_http_get_a_json_400(site):
    reader, writer = await site.connect()
    writer.write(b"\x16\x03\x01\x02 GARBAGE\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert set(json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]) == {"message", "type", "param", "code"}


async def test_labels_hold_route_templates_and_never_paths(site):
    for path in ("/secret-path", "/v1/models/abc"):
        reader, writer = await site.connect()
        await site.send(writer, b"", path, "GET")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
    page = site.page()
    assert "secret" not in page
    assert 'handler="none",method="GET",status="4xx"' in page
    assert 'handler="/v1/models/{model}"' in page


async def test_draining_refuses_new_requests_and_finishes_running_ones(site):
    reader, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": True, "max_tokens": 1})
    given = await site.submitted()
    site.server.admission.drain()
    other_reader, other = await site.connect()
    await site.send(other, LONG)
    refused = await asyncio.wait_for(other_reader.readuntil(b"\r\n\r\n"), 2)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"Retry-After" in refused
    ready_reader, ready = await site.connect()
    await site.send(ready, b"", "/ready", "GET")
    assert (await ready_reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")
    site.engine._step(given, 0, [582])
    await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 2)


async def test_a_slow_reader_gets_merged_steps_and_the_whole_text(site):
    reader, writer = await site.connect()
    await site.send(writer, {**LONG, "stream": True, "max_tokens": 500})
    given = await site.submitted()
    for _ in range(499):
        given.output(0, [582])
    site.engine._step(given, 0, [582])
    answer = (await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 5)).decode()
    assert answer.count(" one") == 500
    assert answer.count("data: ") < 10


async def test_large_prompts_are_prepared_off_the_event_loop(site):
    gaps = []

    async def heartbeat():
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - last)
            last = loop.time()

    task = asyncio.create_task(heartbeat())
    reader, writer = await site.connect()
    await site.send(writer, {"prompt": ["word " * 2000] * 200})  # 2 MB, each prompt beyond the context
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    task.cancel()
    assert head.startswith(b"HTTP/1.1 400")
    assert max(gaps) < 0.5
