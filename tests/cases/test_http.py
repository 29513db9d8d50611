"""HTTP: half-closed sockets, idle and pipelined connections, errors in the middle of a stream. Huge bodies: test_http_bodies.py."""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from frontend.config import FrontendConfig
from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, Client, strict_json, together, total
from tests.cases.crowd import OpenRequest
from tests.cases.laws import labelled
from tests.cases.processes import processes_of, unharmed, wait_until
from tests.e2e.servers import serve
from tests.timing import within_s

RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")


def finished(client: Client, reason: str) -> float:
    return labelled(client.metrics(), "vllm:request_success_total", finished_reason=reason)


# ---- HTTP-1: agentgateway/agentgateway#2427 ----

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def asked(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "max_tokens": 2000, **fields}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Client]:
    """One row: who comes second waits, and nothing is written to it meanwhile."""
    with serve(*SIM, "--max-num-seqs", "1") as server:
        yield Client(server.base_url)


@pytest.mark.parametrize(("reason", "max_tokens"), [("stop", 300), ("length", 200)])
@PATHS
def test_http_1_a_stream_goes_on_after_the_client_closed_its_writing_half(
    sim: Client, path: str, reason: str, max_tokens: int
) -> None:
    before = {each: finished(sim, each) for each in ("stop", "length", "abort")}
    script = {"runs": [RUN] * 40, "step_ms": 15}
    body = asked(path, stream=True, max_tokens=max_tokens, return_token_ids=True, sim=script)
    with OpenRequest(sim, body, path) as one:
        one.end_of_writing()
        one.read_to_end()
        events = one.data()
    assert events[-1] == "[DONE]"
    ids = [token for event in events[:-1] for choice in event["choices"] for token in choice.get("token_ids") or []]
    assert ids == (RUN * 40)[:max_tokens]
    now = {each: finished(sim, each) for each in before}
    assert now == {**before, reason: before[reason] + 1}


@pytest.mark.parametrize("is_queued", [False, True], ids=["running", "queued"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_http_1_a_half_closed_stream_whose_writes_fail_is_aborted(narrow: Client, how: str, is_queued: bool) -> None:
    aborts = finished(narrow, "abort")
    script = {"runs": [RUN] * 300, "step_ms": 20}
    body = asked(COMPLETIONS, stream=True, sim=script)
    gauge = "vllm:num_requests_waiting" if is_queued else "vllm:num_requests_running"
    with ExitStack() as stack:
        if is_queued:
            stack.enter_context(OpenRequest(narrow, body)).wait_for(1)
        one = OpenRequest(narrow, body)
        one.end_of_writing()
        if is_queued:
            wait_until(lambda: total(narrow.metrics(), gauge) == 1, 5, "it waits")
        else:
            one.wait_for(2)
        if how == "reset":
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.leave()
        wait_until(lambda: total(narrow.metrics(), gauge) == 0, 2, "the request is gone")
        wait_until(lambda: finished(narrow, "abort") == aborts + 1, 1, "it is counted")
    narrow.assert_quiet()


def test_http_1_a_half_closed_stream_waits_for_its_turn_and_gets_its_answer(narrow: Client) -> None:
    before = {each: finished(narrow, each) for each in ("stop", "abort")}
    with OpenRequest(narrow, asked(COMPLETIONS, stream=True, sim={"runs": [RUN] * 40, "step_ms": 20})) as first:
        first.wait_for(1)
        with OpenRequest(narrow, asked(COMPLETIONS, stream=True, sim={"runs": [RUN] * 3})) as second:
            second.end_of_writing()
            wait_until(lambda: total(narrow.metrics(), "vllm:num_requests_waiting") == 1, 5, "it waits")
            second.read_to_end()
            text = "".join(choice["text"] for event in second.data()[:-1] for choice in event["choices"])
            assert text == " one two three four five six" * 3
        first.read_to_end()
    assert {each: finished(narrow, each) for each in before} == {"stop": before["stop"] + 2, "abort": before["abort"]}


@PATHS
def test_http_1_a_half_closed_plain_request_is_counted_as_aborted_and_closed_at_once(sim: Client, path: str) -> None:
    """Documented (docs/api.md): without a stream nothing is written before the end, so end-of-file counts as gone."""
    before = {each: finished(sim, each) for each in ("stop", "length", "abort")}
    with OpenRequest(sim, asked(path, sim={"runs": [RUN] * 300, "step_ms": 20}), path) as one:  # six seconds of work
        wait_until(lambda: total(sim.metrics(), "vllm:num_requests_running") == 1, 5, "it runs")
        with within_s(2.0, "closing the socket"):
            one.end_of_writing()
            assert one.read_to_end(within_s=10) == b""
    wait_until(lambda: total(sim.metrics(), "vllm:num_requests_running") == 0, 2, "the request is gone")
    assert {each: finished(sim, each) for each in before} == {**before, "abort": before["abort"] + 1}
    sim.assert_quiet()


# ---- HTTP-2: kserve/kserve#5446 ----


def raw_post(body: bytes) -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_responses(connection: socket.socket, count: int) -> list[bytes]:
    """Bodies of `count` responses, each with a Content-Length, in the order they came."""
    received, bodies = b"", []
    while len(bodies) < count:
        head, separator, rest = received.partition(b"\r\n\r\n")
        length = _content_length(head) if separator else None
        if length is not None and len(rest) >= length:
            assert head.startswith(b"HTTP/1.1 200"), head
            bodies.append(rest[:length])
            received = rest[length:]
            continue
        piece = connection.recv(65536)
        assert piece, "the connection was closed before its answer"
        received += piece
    return bodies


def _content_length(head: bytes) -> int:
    (line,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return int(line.split(b":")[1])


def test_http_2_an_idle_connection_is_kept_and_used_again(sim: Client) -> None:
    gaps = [4.9, 5.0, 5.1, 10, 30, 60] * 5 if IS_LONG else [0, 0.1, 5.1]
    where = urlsplit(sim.base_url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        for gap in gaps:
            time.sleep(gap)
            connection.sendall(raw_post(b'{"prompt":"hi","max_tokens":2}'))
            (body,) = read_responses(connection, 1)
            assert strict_json(body)["usage"]["completion_tokens"] == 2


def test_http_2_an_idle_connection_is_kept_for_longer_than_any_pool_keeps_it() -> None:
    assert FrontendConfig().keep_alive_s >= 75


def test_http_2_a_pool_of_fifty_connections_loses_no_request_and_no_connection(sim: Client) -> None:
    gap_s = 60.0 if IS_LONG else 1.0

    def use(session: requests.Session) -> list[int]:
        body = {"prompt": "hi", "max_tokens": 2}
        statuses = []
        for turn in range(4):
            statuses.append(session.post(sim.base_url + COMPLETIONS, json=body, timeout=30).status_code)
            time.sleep(gap_s if turn == 1 else 0.0)
        return statuses

    sessions = [requests.Session() for _ in range(50)]
    assert together([lambda s=s: use(s) for s in sessions], width=50) == [[200] * 4] * 50
    # The client library replaces a closed connection without a word, unless it is closed as it is used.
    assert [_num_connections(session) for session in sessions] == [1] * 50
    for session in sessions:
        session.close()


def _num_connections(session: requests.Session) -> int:
    """How many connections a session has opened in its life; it has spoken to one server."""
    adapter = session.get_adapter("http://")
    assert isinstance(adapter, requests.adapters.HTTPAdapter)
    pools = adapter.poolmanager.pools
    [key] = pools.keys()
    return int(pools[key].num_connections)


def test_http_2_pipelined_requests_are_answered_in_order(sim: Client) -> None:
    where = urlsplit(sim.base_url)
    bodies = [
        b'{"prompt":"x","max_tokens":60,"sim":{"runs":[[582],[827],[1296]],"step_ms":60}}',
        b'{"prompt":"x","max_tokens":60,"sim":{"runs":[[1876]]}}',
        b'{"prompt":"x","max_tokens":60,"sim":{"runs":[[2531],[2976]]}}',
    ]
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(b"".join(raw_post(body) for body in bodies))
        texts = [strict_json(body)["choices"][0]["text"] for body in read_responses(connection, 3)]
    assert texts == [" one two three", " four", " five six"]


# ---- HTTP-4: waybarrios/vllm-mlx#302 ----


def read_failed_stream(client: Client, body: dict[str, Any]) -> list[Any]:
    with OpenRequest(client, {**body, "stream": True}) as one:
        one.read_to_end(within_s=20)
        return one.data()


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text


def assert_one_error_then_done(events: list[Any], num_good: int) -> dict[str, Any]:
    """Good chunks, exactly one error event, [DONE], and no finish beside the error."""
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    errors = [event for event in events[:-1] if "error" in event]
    assert len(errors) == 1
    assert events[-2] is errors[0]
    choices = [choice for event in events[:-2] for choice in event["choices"]]
    assert (
        len([choice for choice in choices if _text(choice)]) == num_good
    )  # a chunk with the role alone may come before
    assert all(choice.get("finish_reason") is None for choice in choices)
    error: dict[str, Any] = errors[0]["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@PATHS
def test_http_4_a_request_that_fails_in_mid_stream_ends_with_one_error_event(sim: Client, path: str) -> None:
    others = [{"prompt": "x", "max_tokens": 200, "sim": {"runs": [RUN] * 12, "step_ms": 10}} for _ in range(4)]
    body: dict[str, Any] = {"max_tokens": 100, "sim": {"runs": [RUN] * 6, "fail_at": 3, "step_ms": 10}}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    errors = finished(sim, "error")
    with unharmed(sim):
        calls: list[Any] = [lambda: read_failed_path(sim, path, body)]
        calls += [lambda other=other: sim.stream(**other) for other in others]
        with within_s(2.0, "five streams of a tenth of a second"):
            failed, *good = together(calls, width=5)
        assert_one_error_then_done(failed, num_good=3)
        assert all(stream.text[0] == " one two three four five six" * 12 for stream in good)
        assert all(stream.finish == {0: "stop"} for stream in good)
    assert finished(sim, "error") == errors + 1
    sim.assert_quiet()


def read_failed_path(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    with OpenRequest(client, {**body, "stream": True}, path) as one:
        one.read_to_end(within_s=20)
        return one.data()


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_http_4_the_error_comes_wherever_the_request_fails(sim: Client, fail_at: int) -> None:
    body = {"prompt": "x", "max_tokens": 100, "sim": {"runs": [RUN] * 6, "fail_at": fail_at, "step_ms": 5}}
    response = requests.post(sim.base_url + COMPLETIONS, json={**body, "stream": True}, timeout=20)
    if response.status_code == 200:
        with OpenRequest(sim, {**body, "stream": True}) as one:
            one.read_to_end(within_s=20)
            assert_one_error_then_done(one.data(), num_good=fail_at)
    else:
        assert fail_at == 0, "after the first chunk the status cannot change"
        sim.assert_error(response, status=500)


@PATHS
def test_http_4_a_plain_request_that_fails_is_a_500_with_the_reason(sim: Client, path: str) -> None:
    with unharmed(sim):
        response = sim.post(path, asked(path, max_tokens=100, sim={"runs": [RUN] * 6, "fail_at": 3}))
        error = sim.assert_error(response, status=500)
        assert error["type"] == "server_error"
    sim.assert_quiet()


@pytest.mark.parametrize("frontends", [1, 2] if IS_LONG else [2])
def test_http_4_streams_end_with_an_error_when_the_engine_dies(frontends: int) -> None:
    with serve(*SIM, "--frontends", str(frontends)) as server:
        client = Client(server.base_url)
        paths = [COMPLETIONS, CHAT] * 4
        script = {"runs": [RUN] * 300, "step_ms": 20}
        bodies = [asked(path, stream=True, n=1 + index // 4, sim=script) for index, path in enumerate(paths)]
        opened = [OpenRequest(client, body, path) for path, body in zip(paths, bodies, strict=True)]
        together([lambda one=one: one.wait_for(4) for one in opened], width=8)
        with within_s(2.0, "telling everyone"):
            os.kill(processes_of(client).engine, signal.SIGKILL)
            together([lambda one=one: one.read_to_end(within_s=20) for one in opened], width=8)
        for one in opened:
            events = one.data()
            said = [choice for event in events[:-2] for choice in event["choices"]]
            error = assert_one_error_then_done(events, num_good=len([choice for choice in said if _text(choice)]))
            assert "engine" in error["message"]
            one.leave()


@PATHS
def test_http_4_every_normal_stream_has_exactly_one_terminal_event(sim: Client, path: str) -> None:
    for extra in ({}, {"n": 3}, {"stop": [" four"]}, {"max_tokens": 1}, {"stream_options": {"include_usage": True}}):
        body = asked(path, sim={"runs": [RUN] * 3}, **extra) if "max_tokens" not in extra else asked(path, **extra)
        stream = sim.stream(path, **body)  # checks that [DONE] comes once and nothing follows
        assert set(stream.finish) == set(range(extra.get("n", 1)))
        assert stream.error is None
