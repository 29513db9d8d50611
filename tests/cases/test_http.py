"""HTTP: half-closed sockets, idle and pipelined connections, huge bodies, errors in the middle of a stream."""

import os
import signal
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.cases.client import COMPLETIONS, IS_LONG, Client, strict_json, together, total
from tests.cases.crowd import OpenRequest, bystanders
from tests.cases.laws import labelled
from tests.cases.processes import processes_of, resident_bytes, unharmed, wait_until
from tests.e2e.servers import serve
from tests.timing import at_most_s

RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
SLOW_SCRIPT = {"runs": [RUN] * 30, "step_ms": 20}


def finished(client: Client, reason: str) -> float:
    return labelled(client.metrics(), "vllm:request_success_total", finished_reason=reason)


# ---- HTTP-1: agentgateway/agentgateway#2427 ----


def test_http_1_a_stream_goes_on_after_the_client_closed_its_writing_half(sim: Client) -> None:
    stops, aborts = finished(sim, "stop"), finished(sim, "abort")
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "return_token_ids": True, "sim": SLOW_SCRIPT}
    with OpenRequest(sim, body) as one:
        one.end_of_writing()
        one.read_to_end()
        events = one.data()
    assert events[-1] == "[DONE]"
    ids = [token for event in events[:-1] for choice in event["choices"] for token in choice.get("token_ids") or []]
    assert ids == RUN * 30
    assert finished(sim, "stop") == stops + 1
    assert finished(sim, "abort") == aborts


def test_http_1_a_half_closed_stream_whose_writes_fail_is_aborted(sim: Client) -> None:
    aborts = finished(sim, "abort")
    body = {"prompt": "x", "max_tokens": 2000, "stream": True, "sim": {"runs": [RUN] * 200, "step_ms": 20}}
    with OpenRequest(sim, body) as one:
        one.end_of_writing()
        one.wait_for(2)
    wait_until(lambda: total(sim.metrics(), "vllm:num_requests_running") == 0, 2, "the request is gone")
    assert finished(sim, "abort") == aborts + 1


def test_http_1_a_half_closed_plain_request_is_answered_or_counted_as_aborted_and_closed(sim: Client) -> None:
    """Documented: without a stream nothing is written before the end, so end-of-file counts as gone (A-ABORT-3)."""
    ended = {reason: finished(sim, reason) for reason in ("stop", "abort")}
    with OpenRequest(sim, {"prompt": "x", "max_tokens": 200, "sim": SLOW_SCRIPT}) as one:
        one.end_of_writing()
        received = one.read_to_end(within_s=5)
    now = {reason: finished(sim, reason) for reason in ended}
    if received:
        assert strict_json(received.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"] == 180
        assert now == {"stop": ended["stop"] + 1, "abort": ended["abort"]}
    else:
        assert now == {"stop": ended["stop"], "abort": ended["abort"] + 1}
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


def test_http_2_a_pool_of_fifty_connections_loses_no_request(sim: Client) -> None:
    def use(session: requests.Session) -> list[int]:
        body = {"prompt": "hi", "max_tokens": 2}
        return [session.post(sim.base_url + COMPLETIONS, json=body, timeout=30).status_code for _ in range(4)]

    sessions = [requests.Session() for _ in range(50)]
    assert together([lambda s=s: use(s) for s in sessions], width=50) == [[200] * 4] * 50
    for session in sessions:
        session.close()


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


# ---- HTTP-3: HKUDS/LightRAG#3544 ----


@pytest.mark.parametrize("name", ["sim", "spec"])
def test_http_3_huge_bodies_stall_nobody_and_leave_no_memory_behind(setup: Any, name: str) -> None:
    client = setup(name)
    frontend = processes_of(client).frontends[0]
    word = "the quick brown fox "
    eight_mb = {"prompt": word * (8_000_000 // len(word)), "max_tokens": 1}
    one_mb = {"prompt": word * (1_000_000 // len(word)), "max_tokens": 1}
    with unharmed(client):
        client.post(COMPLETIONS, eight_mb)
        before = resident_bytes(frontend)
        slow = {} if name == "spec" else {"sim": {"runs": [RUN] * 60, "step_ms": 20}}
        with bystanders(client, num_streams=8 if name == "sim" else 2, **slow) as watch:
            assert refused_without_reading(client, 64_000_000) == 413
            assert client.post(COMPLETIONS, eight_mb).status_code in (400, 413)
            assert client.post(COMPLETIONS, one_mb).status_code == 400, "the context is 8192 tokens"
        assert watch.errors == []
        at_most_s(watch.longest_health_s, 1.0, "the slowest /health")
        at_most_s(watch.longest_gap_s, 1.0, "the longest gap of a bystander")
        assert resident_bytes(frontend) - before < 100_000_000


def refused_without_reading(client: Client, num_bytes: int) -> int:
    """Announce a body of that size and send it piece by piece: the refusal comes long before its end."""
    where = urlsplit(client.base_url)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    sent = 0
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(head.encode() + b'{"prompt":"')
        received = b""
        try:
            while sent < num_bytes:
                sent += connection.send(b"a" * min(1 << 20, num_bytes - sent))
        except (ConnectionResetError, BrokenPipeError):
            pass
        connection.settimeout(5)
        try:
            received = connection.recv(65536)
        except ConnectionResetError:
            return 413 if sent < num_bytes // 2 else 0
    return int(received.split(b" ", 2)[1])


def test_http_3_a_body_over_the_limit_gets_an_error_object(sim: Client) -> None:
    body = b'{"prompt":"' + b"a" * (17 * 1024 * 1024) + b'"}'
    sim.assert_error(sim.post_raw(COMPLETIONS, body), status=413)


# ---- HTTP-4: waybarrios/vllm-mlx#302 ----


def read_failed_stream(client: Client, body: dict[str, Any]) -> list[Any]:
    with OpenRequest(client, {**body, "stream": True}) as one:
        one.read_to_end(within_s=20)
        return one.data()


def assert_one_error_then_done(events: list[Any], num_good: int) -> dict[str, Any]:
    """Good chunks, exactly one error event, [DONE], and no finish beside the error."""
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    errors = [event for event in events[:-1] if "error" in event]
    assert len(errors) == 1
    assert events[-2] is errors[0]
    choices = [choice for event in events[:-2] for choice in event["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    assert len([text for text in texts if text]) == num_good  # a chunk with the role alone may come before
    assert all(choice.get("finish_reason") is None for choice in choices)
    error: dict[str, Any] = errors[0]["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_http_4_a_request_that_fails_in_mid_stream_ends_with_one_error_event(sim: Client, path: str) -> None:
    others = [{"prompt": "x", "max_tokens": 200, "sim": {"runs": [RUN] * 12, "step_ms": 10}} for _ in range(4)]
    body: dict[str, Any] = {"max_tokens": 100, "sim": {"runs": [RUN] * 6, "fail_at": 3, "step_ms": 10}}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    errors = finished(sim, "error")
    with unharmed(sim):
        calls: list[Any] = [lambda: read_failed_path(sim, path, body)]
        calls += [lambda other=other: sim.stream(**other) for other in others]
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


def test_http_4_a_plain_request_that_fails_is_a_500_with_the_reason(sim: Client) -> None:
    with unharmed(sim):
        body = {"prompt": "x", "max_tokens": 100, "sim": {"runs": [RUN] * 6, "fail_at": 3}}
        error = sim.assert_error(sim.post(COMPLETIONS, body), status=500)
        assert error["type"] == "server_error"
    sim.assert_quiet()


def test_http_4_streams_end_with_an_error_when_the_engine_dies(tmp_path: Any) -> None:
    with serve(*SIM) as server:
        client = Client(server.base_url)
        body = {"prompt": "x", "max_tokens": 2000, "stream": True, "sim": {"runs": [RUN] * 300, "step_ms": 20}}
        opened = together([lambda: OpenRequest(client, body) for _ in range(6)], width=6)
        together([lambda one=one: one.wait_for(2) for one in opened], width=6)
        os.kill(processes_of(client).engine, signal.SIGKILL)
        killed = time.monotonic()
        together([lambda one=one: one.read_to_end(within_s=5) for one in opened], width=6)
        at_most_s(time.monotonic() - killed, 2.0, "telling everyone")
        for one in opened:
            events = one.data()
            assert_one_error_then_done(events, num_good=len(events) - 2)
            one.leave()


def test_http_4_every_normal_stream_has_exactly_one_terminal_event(sim: Client) -> None:
    for extra in ({}, {"n": 3}, {"stop": [" four"]}, {"max_tokens": 1}, {"stream_options": {"include_usage": True}}):
        body = {"prompt": "x", "max_tokens": 100, "sim": {"runs": [RUN] * 3}, **extra}
        stream = sim.stream(**body)  # checks that [DONE] comes once and nothing follows
        assert set(stream.finish) == set(range(extra.get("n", 1)))
        assert stream.error is None
