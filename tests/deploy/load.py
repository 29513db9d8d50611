"""Clients of the compose test: many requests at once, and what became of each, told apart without mercy.

A request is `complete` when everything it was promised arrived, `refused` when an error said so in OpenAI's shape (an
HTTP status, or an error event in a stream), `cut` when the connection broke under it, and `wrong` in every other case.
"""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

TIMEOUT_S = 60.0
DEFAULT_RETRY_S = 0.5  # what OpenAI's client waits first when an error names no time
Kind = Literal["complete", "refused", "cut", "wrong"]


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    detail: str = ""
    completion_tokens: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None  # set where a client of the OpenAI API would ask again


def ask(port: int, number: int, *, stream: bool, max_tokens: int) -> Outcome:
    """One completion through the balancer."""
    body = {
        "prompt": f"Request {number} of a crowd asks for a story that goes on and on.",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "spec_decode_metrics": "summary",
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return _refusal(answer)
        return _streamed(answer, max_tokens) if stream else _whole(json.loads(answer.read()), max_tokens)
    except (OSError, http.client.HTTPException) as error:
        return Outcome("cut", type(error).__name__)
    finally:
        connection.close()


def _refusal(answer: http.client.HTTPResponse) -> Outcome:
    status, body = answer.status, answer.read()
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Outcome("wrong", f"{status} without an error in OpenAI's shape: {body[:200]!r}")
    if not message:
        return Outcome("wrong", f"{status} without a message")
    wait_s = float(answer.headers.get("Retry-After", DEFAULT_RETRY_S)) if status >= 500 else None
    return Outcome("refused", f"{status} {message}", retry_after_s=wait_s)


def _whole(answer: dict[str, Any], max_tokens: int) -> Outcome:
    usage, choice = answer["usage"], answer["choices"][0]
    if choice["finish_reason"] != "length" or usage["completion_tokens"] != max_tokens:
        return Outcome("wrong", f"finish {choice['finish_reason']!r} with {usage['completion_tokens']} tokens")
    return Outcome("complete", "", max_tokens, answer["metrics"]["speculative_decoding"])


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Data of server-sent events. A connection that breaks raises: http.client notices a missing last chunk."""
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].strip().decode()


def _streamed(answer: http.client.HTTPResponse, max_tokens: int) -> Outcome:
    finish, usage, statistics, error, is_done = None, None, {}, None, False
    for data in _events(answer):
        if data == "[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        error = chunk.get("error", error)
        for choice in chunk.get("choices", ()):
            finish = choice["finish_reason"] or finish
        if chunk.get("usage"):
            usage = chunk["usage"]
            statistics = chunk["metrics"]["speculative_decoding"]
    if error is not None:
        return Outcome("refused", f"event {error['message']}") if is_done else Outcome("wrong", "error, but no [DONE]")
    if not is_done:
        return Outcome("cut", "no [DONE]")
    if finish != "length" or usage is None or usage["completion_tokens"] != max_tokens:
        return Outcome("wrong", f"[DONE] after finish {finish!r} and usage {usage}")
    return Outcome("complete", "", max_tokens, statistics)


class Load:
    """Threads that ask, each one request after the other, until they are told to stop or have asked enough."""

    def __init__(
        self, port: int, num_threads: int, *, max_tokens: int, num_requests: int | None = None, retries: int = 0
    ) -> None:
        """`retries`: how often a client asks again after an HTTP error of 500 or more; OpenAI's own does it twice."""
        self._port = port
        self._retries = retries
        self.num_retries = 0
        self._max_tokens = max_tokens
        self._limit = num_requests
        self._lock = threading.Lock()
        self._asked = 0
        self._is_stopping = False
        self.outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask nothing more, and wait for what was asked."""
        self._is_stopping = True
        self.wait()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a client hangs beyond every time limit"

    def _next(self) -> int | None:
        with self._lock:
            if self._is_stopping or (self._limit is not None and self._asked >= self._limit):
                return None
            self._asked += 1
            return self._asked

    def _work(self) -> None:
        while (number := self._next()) is not None:
            outcome = self._ask_patiently(number)
            with self._lock:
                self.outcomes.append(outcome)

    def _ask_patiently(self, number: int) -> Outcome:
        left = self._retries
        while True:
            outcome = ask(self._port, number, stream=number % 2 == 0, max_tokens=self._max_tokens)
            if outcome.retry_after_s is None or left == 0:
                return outcome
            left -= 1
            with self._lock:
                self.num_retries += 1
            time.sleep(outcome.retry_after_s)  # the server's word, as a client keeps it

    def count(self, holds: Callable[[Outcome], bool] = lambda _: True) -> int:
        with self._lock:
            return sum(map(holds, self.outcomes))

    def summary(self) -> Counter[str]:
        return Counter(f"{each.kind} {each.detail}".strip() for each in self.outcomes)
