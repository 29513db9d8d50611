"""HTTP-3: huge bodies stall nobody, are refused before they are read, and leave no memory behind.

Source: HKUDS/LightRAG#3544, a body parsed and tokenised on the event loop.
"""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, Client, strict_json
from tests.cases.crowd import Watch, bystanders
from tests.cases.processes import processes_of, resident_bytes, unharmed
from tests.e2e.servers import serve
from tests.timing import at_most_s, within_s

RUN = [582, 827, 1296, 1876, 2531, 2976]
SLOW = {"runs": [RUN] * 60, "step_ms": 20}
WORD = "the quick brown fox "
MB = 1_000_000
MAX_LEFT_BYTES = 100 * MB  # of memory that a frontend may keep of it all


def text_of(num_bytes: int) -> str:
    return WORD * (num_bytes // len(WORD))


def bodies(num_bytes: int) -> list[tuple[str, dict[str, Any]]]:
    """The same text in either API."""
    text = text_of(num_bytes)
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return [(COMPLETIONS, {"prompt": text, "max_tokens": 1}), (CHAT, chat)]


def assert_too_long(client: Client, num_bytes: int) -> None:
    for path, body in bodies(num_bytes):
        error = client.assert_error(client.post(path, body), "context is 8192 tokens")
        assert error["code"] == "context_length_exceeded"


def assert_nobody_waited(watch: Watch) -> None:
    assert watch.errors == []
    at_most_s(watch.longest_health_s, 1.0, "the slowest /health")
    at_most_s(watch.longest_gap_s, 1.0, "the longest gap of a bystander")


@pytest.mark.parametrize("name", ["sim", "spec"])
def test_http_3_huge_bodies_stall_nobody_and_leave_no_memory_behind(setup: Callable[[str], Client], name: str) -> None:
    client = setup(name)
    frontend = processes_of(client).frontends[0]
    slow = {"sim": SLOW} if name == "sim" else {}
    # Eight streams of the embedded model take a processor for themselves for longer than a second at a time.
    num_streams = 2 if name == "spec" and IS_LONG else 8
    with unharmed(client):
        assert_too_long(client, 8 * MB)  # what a frontend keeps for the next one is no loss
        before = resident_bytes(frontend)
        with bystanders(client, num_streams=num_streams, **slow) as watch:
            for path, body in bodies(60 * MB):
                assert refused_unread(client, path, json.dumps(body).encode()) == 413
            assert_too_long(client, 8 * MB)
            assert_too_long(client, 1 * MB)
        assert_nobody_waited(watch)
        assert resident_bytes(frontend) - before < MAX_LEFT_BYTES


@pytest.fixture(scope="module")
def patient() -> Iterator[Client]:
    """A limit of characters so high that a text of megabytes is tokenised before it turns out to be too long."""
    with serve("--executor", "sim", "--num-draft-tokens", "5", "--max-prompt-chars", "16000000") as server:
        yield Client(server.base_url)


def test_http_3_a_text_of_megabytes_under_the_limit_is_tokenised_beside_the_streams(patient: Client) -> None:
    frontend = processes_of(patient).frontends[0]
    # Of a prompt's length the tokenizer has a bound, of messages' not. The first text sets the level that malloc keeps.
    path, body = bodies((8 if IS_LONG else 2) * MB)[1]
    with unharmed(patient):
        for _ in range(2):
            patient.assert_error(patient.post(path, body), "context is 8192 tokens")
        before = resident_bytes(frontend)
        with bystanders(patient, num_streams=8, sim=SLOW) as watch:
            error = patient.assert_error(patient.post(path, body), "context is 8192 tokens")
            assert "tokens and max_tokens" in error["message"], "it was tokenised"
        assert_nobody_waited(watch)
        assert resident_bytes(frontend) - before < MAX_LEFT_BYTES


def refused_unread(client: Client, path: str, payload: bytes) -> int:
    """The status that comes after the first megabyte of a body that goes on: sending stops there until it came."""
    where = urlsplit(client.base_url)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(head.encode() + payload[:MB])
        with within_s(2.0, "the refusal"):
            return status_of_refusal(connection)


def status_of_refusal(connection: socket.socket) -> int:
    received = b""
    while b"}}" not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    assert strict_json(received.split(b"\r\n\r\n", 1)[1])["error"]["message"]
    return int(received.split(b" ", 2)[1])


def test_http_3_a_body_of_unknown_length_is_refused_where_it_passes_the_limit(sim: Client) -> None:
    where = urlsplit(sim.base_url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
    with unharmed(sim), socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(head.encode() + b'b\r\n{"prompt":"\r\n' + 16 * chunk)
        assert status_of_refusal(connection) == 413


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_http_3_a_body_over_the_limit_gets_an_error_object(sim: Client, path: str) -> None:
    field = '"prompt":"' if path == COMPLETIONS else '"messages":[{"role":"user","content":"'
    sim.assert_error(sim.post_raw(path, f"{{{field}".encode() + b"a" * (17 * 1024 * 1024)), status=413)
