"""Many clients at once: requests sent together, requests a test can leave at any moment, and answers held against each other.

Knows HTTP only. SAME is the case book's word: equal, or a near tie of the reference at the first difference.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import requests

from tests.cases.client import IS_LONG, TIE, Client, strict_json, together

MAX_TIES = 0.02  # near ties the case book forgives, of all requests


@dataclass(frozen=True)
class Answer:
    """One finished completion: what SAME compares."""

    token_ids: list[int]
    text: str
    finish: str
    gaps: list[float]  # between the two best log-probs at each position; empty when not asked for
    completion_tokens: int
    prompt_tokens: int


def answer(client: Client, **body: Any) -> Answer:
    """One completion of its own connection, with token ids; `logprobs` 2 is asked for unless the body says otherwise."""
    asked = {"logprobs": 2, **body, "return_token_ids": True}
    response = requests.post(client.base_url + "/v1/completions", json=asked, timeout=client.timeout_s)
    assert response.status_code == 200, response.text
    parsed = strict_json(response.content)
    choice = parsed["choices"][0]
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return Answer(
        token_ids=choice["token_ids"],
        text=choice["text"],
        finish=choice["finish_reason"],
        gaps=[_gap(top) for top in tops],
        completion_tokens=parsed["usage"]["completion_tokens"],
        prompt_tokens=parsed["usage"]["prompt_tokens"],
    )


def answers(client: Client, bodies: Sequence[dict[str, Any]], width: int = 64) -> list[Answer]:
    """One answer per body, `width` of them in flight."""
    return together([lambda body=body: answer(client, **body) for body in bodies], width)


def _gap(top: dict[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def assert_same(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    """SAME: token for token what the reference gave, but for near ties in at most 1 request of 50."""
    assert len(got) == len(want)
    ties = 0
    for index, (mine, reference) in enumerate(zip(got, want, strict=True)):
        assert len(mine.token_ids) == mine.completion_tokens
        if mine.token_ids == reference.token_ids:
            assert (mine.text, mine.finish) == (reference.text, reference.finish)
            continue
        first = _first_difference(mine.token_ids, reference.token_ids)
        detail = (
            f"request {index} differs from position {first}: {mine.token_ids[first:]} != {reference.token_ids[first:]}"
        )
        assert first < len(reference.gaps), detail
        assert reference.gaps[first] < TIE, f"{detail}; the gap is {reference.gaps[first]}"
        ties += 1
    assert ties <= MAX_TIES * len(got), f"{ties} near ties in {len(got)} requests"


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class OpenRequest:
    """One HTTP/1.1 request on a socket of its own, read piece by piece, left when the test says so."""

    def __init__(self, client: Client, body: Any, path: str = "/v1/completions", headers: str = "") -> None:
        where = urlsplit(client.base_url)
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.received = b""
        self.socket = socket.create_connection((where.hostname or "127.0.0.1", where.port or 80), timeout=30)
        self.socket.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"{headers}Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def wait_for(self, num_chunks: int, within_s: float = 30.0) -> Self:
        """Read until that many data lines came."""
        deadline = time.monotonic() + within_s
        while self.num_chunks < num_chunks:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self.socket.recv(65536)
            assert piece, f"the stream ended after {self.num_chunks} chunks: {self.received[-300:]!r}"
            self.received += piece
        return self

    def wait_for_headers(self, within_s: float = 30.0) -> Self:
        self.socket.settimeout(within_s)
        while b"\r\n\r\n" not in self.received:
            piece = self.socket.recv(65536)
            assert piece, f"no answer: {self.received!r}"
            self.received += piece
        return self

    def read_to_end(self, within_s: float = 30.0) -> bytes:
        deadline = time.monotonic() + within_s
        while True:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self.socket.recv(65536)
            if not piece:
                return self.received
            self.received += piece

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1])

    @property
    def num_chunks(self) -> int:
        return self.received.count(b"data: {")

    def data(self) -> list[Any]:
        """Every data event so far, parsed strictly; [DONE] stays a string."""
        events = [line[6:] for line in self.received.split(b"\n") if line.startswith(b"data: ")]
        return ["[DONE]" if event.strip() == b"[DONE]" else strict_json(event) for event in events]

    def end_of_writing(self) -> None:
        """Half-close: the client has said all it will say, and reads on."""
        self.socket.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        self.socket.close()


def leave_all(requests_: Iterable[OpenRequest]) -> None:
    """Close all sockets in the same moment."""
    for request in requests_:
        request.leave()


@dataclass
class Watch:
    """What a bystander saw while something else happened. Times in seconds."""

    longest_gap_s: float = 0.0
    longest_health_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    num_chunks: int = 0


@contextmanager
def bystanders(client: Client, num_streams: int = 1, **body: Any) -> Iterator[Watch]:
    """Keep streams running and /health polled during the block; the gaps between chunks are measured inside it only."""
    watch, over = Watch(), threading.Event()
    threads = [threading.Thread(target=_watch_stream, args=(client, body, watch, over)) for _ in range(num_streams)]
    threads.append(threading.Thread(target=_watch_health, args=(client, watch, over)))
    started = time.monotonic()
    for thread in threads:
        thread.start()
    while watch.num_chunks < 2 * num_streams and time.monotonic() < started + 30 and not watch.errors:
        time.sleep(0.02)
    watch.longest_gap_s = 0.0
    try:
        yield watch
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=30)
    assert watch.num_chunks >= 2 * num_streams, "the bystanders never ran"


def _watch_stream(client: Client, body: dict[str, Any], watch: Watch, over: threading.Event) -> None:
    try:
        while not over.is_set():
            with OpenRequest(
                client, {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, **body, "stream": True}
            ) as one:
                last = None
                while not over.is_set() and b"[DONE]" not in one.received:
                    one.socket.settimeout(20)
                    piece = one.socket.recv(65536)
                    assert piece, one.received[-200:]
                    one.received = (one.received + piece)[-4096:]
                    now = time.monotonic()
                    if last is not None:
                        watch.longest_gap_s = max(watch.longest_gap_s, now - last)
                    last = now
                    watch.num_chunks += 1
    except (OSError, AssertionError) as error:
        watch.errors.append(repr(error))


def _watch_health(client: Client, watch: Watch, over: threading.Event) -> None:
    while not over.wait(0.1):
        started = time.monotonic()
        try:
            response = requests.get(client.base_url + "/health", timeout=10)
            if response.status_code != 200:
                watch.errors.append(f"/health {response.status_code}")
        except requests.RequestException as error:
            watch.errors.append(repr(error))
        watch.longest_health_s = max(watch.longest_health_s, time.monotonic() - started)


def seeded(name: str) -> random.Random:
    """A generator whose seed is printed, new in the long form and fixed otherwise."""
    seed = random.SystemRandom().randrange(2**32) if IS_LONG else 20261130
    print(f"{name}: seed {seed}")
    return random.Random(seed)
