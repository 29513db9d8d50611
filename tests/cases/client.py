"""A plain HTTP client for the failure cases: JSON requests, SSE streams, /metrics, and the checks the cases name.

Knows nothing of the server's code. LIVE, QUIET, ERR, SUMS are the words of the case book.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import requests

from tests.timing import at_most_s

PAT = "red blue green one two three\n" * 12
# PAT with numbered lines. The embedded model leaves PAT at once (newline -1.09, `red` -1.63) but copies this for as long as
# it is let: every line gives drafts accepted in full, and one rejected at the number.
LIST = "".join(f"{number}. red blue green one two three\n" for number in range(1, 13))
PROBE = {"prompt": "The sky is", "temperature": 0, "max_tokens": 8}
T = TypeVar("T")
IS_LONG = os.environ.get("CASES_LONG") == "1"  # `make cases`: the full form of every case
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TIE = 0.001  # a top-2 log-prob gap below this is a near tie in fp32


@dataclass
class Logprob:
    """One position's log-probs, whichever API said them. `top` in the order given."""

    token: str
    logprob: float | None
    top: list[tuple[str, float]]


@dataclass
class Streamed:
    """One streamed answer, put together. Per choice index."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    entries: dict[int, list[Logprob]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    stop_reason: dict[int, Any] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: int = 0


class Client:
    """Talks to one server at `base_url`."""

    def __init__(self, base_url: str, timeout_s: float = 300.0 if IS_LONG else 60.0) -> None:
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._sessions = threading.local()

    @property
    def http(self) -> requests.Session:
        """This thread's session: sessions are not made for several threads."""
        if not hasattr(self._sessions, "http"):
            self._sessions.http = requests.Session()
        return self._sessions.http

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.http.get(self.base_url + path, timeout=self.timeout_s, **options)

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return self.http.post(self.base_url + path, json=body, timeout=self.timeout_s, **options)

    def post_raw(self, path: str, body: bytes, **options: Any) -> requests.Response:
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.http.post(self.base_url + path, data=body, headers=headers, timeout=self.timeout_s, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions, 200 expected; the body is parsed strictly."""
        return self._ok("/v1/completions", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._ok("/v1/chat/completions", body)

    def _ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return strict_json(response.content)

    def events(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[str]:
        """The data of every server-sent event; comments are skipped."""
        with self.http.post(
            self.base_url + path,
            json={**body, "stream": True},
            timeout=self.timeout_s,
            stream=True,
            headers=headers,
        ) as response:
            assert response.status_code == 200, response.text
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    yield line[6:].decode("utf-8")

    def stream(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Streamed:
        """Read a stream to its end, checking the shape every stream must have."""
        result = Streamed()
        for data in self.events(path, body, headers):
            assert not result.done, "data after [DONE]"
            if data == "[DONE]":
                result.done += 1
                continue
            _add_chunk(result, strict_json(data))
        assert result.done == 1, "a stream ends with exactly one [DONE]"
        return result

    def ask(self, path: str, streamed: bool, prompt: Any = "x", **body: Any) -> Streamed:
        """One answer in one form, whichever of the four ways was asked: completions or chat, streamed or not.

        `prompt` and an integer `logprobs` are turned into what chat calls them; a stream also reports its usage.
        """
        if path == CHAT:
            body.setdefault("messages", [{"role": "user", "content": prompt}])
            if body.get("logprobs") is not None:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        else:
            body["prompt"] = prompt
        if streamed:
            return self.stream(path, stream_options={"include_usage": True}, **body)
        result = Streamed(done=1)
        _add_chunk(result, self._ok(path, body))
        return result

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by its full series name."""
        response = self.get("/metrics")
        assert response.status_code == 200
        return parse_metrics(response.text)

    # ---- the checks the cases name ----

    def assert_error(self, response: requests.Response, *names: str, status: int = 400) -> dict[str, Any]:
        """ERR: the status, JSON, an error object whose message names one of `names`, and nothing of our insides."""
        assert response.status_code == status, (response.status_code, response.text[:300])
        assert response.headers["Content-Type"].startswith("application/json")
        error = strict_json(response.content)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert not names or any(name in error["message"] for name in names), error
        for leak in ("Traceback", ".py", "msgspec", "Error(", "<class"):
            assert leak not in error["message"], error
        return error

    def probe(self) -> str:
        return self.complete(**PROBE)["choices"][0]["text"]

    def assert_live(self, before: str) -> None:
        """LIVE: healthy, and the probe still answers the same."""
        started = time.monotonic()
        assert self.get("/health").status_code == 200
        at_most_s(time.monotonic() - started, 1.0, "/health")
        assert self.probe() == before

    def assert_quiet(self, within_s: float = 2.0, steady_s: float = 1.0) -> None:
        """QUIET: gauges fall to 0 by themselves and stay there. Falling late is TooSlow; never falling is a leak, not tried again."""
        started = time.monotonic()
        while not self._is_quiet():
            assert time.monotonic() - started < 10 * within_s, self._gauges()
            time.sleep(0.05)
        at_most_s(time.monotonic() - started, within_s, "becoming quiet")
        until = time.monotonic() + steady_s
        while time.monotonic() < until:
            assert self._is_quiet(), self._gauges()
            time.sleep(0.2)

    def _gauges(self) -> dict[str, float]:
        samples = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: total(samples, f"vllm:{name}") for name in names}

    def _is_quiet(self) -> bool:
        return all(value == 0 for value in self._gauges().values())


def _add_chunk(result: Streamed, chunk: dict[str, Any]) -> None:
    result.chunks.append(chunk)
    if "error" in chunk:
        result.error = chunk["error"]
        return
    if chunk.get("usage"):
        result.usage = chunk["usage"]
    for choice in chunk["choices"]:
        index = choice["index"]
        assert index not in result.finish, "a choice goes on after its finish"
        delta = choice["text"] if "text" in choice else choice.get("delta", choice.get("message", {})).get("content")
        result.text[index] = result.text.get(index, "") + (delta or "")
        result.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        entries = _logprob_entries(choice.get("logprobs"))
        result.entries.setdefault(index, []).extend(entries)
        result.logprobs.setdefault(index, []).extend(entry.logprob for entry in entries)
        if choice.get("finish_reason"):
            result.finish[index] = choice["finish_reason"]
            result.stop_reason[index] = choice.get("stop_reason")


def _logprob_entries(logprobs: dict[str, Any] | None) -> list[Logprob]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [
            Logprob(entry["token"], entry["logprob"], [(t["token"], t["logprob"]) for t in entry["top_logprobs"]])
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], tops, logprobs["text_offset"])
    assert len({len(column) for column in columns}) == 1, logprobs
    return [Logprob(token, value, list((top or {}).items())) for token, value, top, _ in zip(*columns)]


def strict_json(text: bytes | str) -> Any:
    """Parse JSON as RFC 8259 has it: no NaN, no Infinity, valid UTF-8."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=refuse)


def parse_metrics(page: str) -> dict[str, float]:
    samples = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            assert " " not in series, f"a bench client cannot read this line: {line}"
            samples[series] = float(value)
    return samples


def total(samples: dict[str, float], family: str) -> float:
    """Sum over the series of one family, as a bench client sums them."""
    return sum(value for series, value in samples.items() if series.split("{")[0] == family)


@dataclass
class Speculation:
    """The increments of the speculation counters between two scrapes."""

    drafts: float
    draft_tokens: float
    accepted: float
    per_pos: list[float]
    generation: float


def speculation_delta(before: dict[str, float], after: dict[str, float], width: int) -> Speculation:
    """Increments, with SUMS checked: conservation, monotone counters, no NaN."""
    for series, value in after.items():
        assert not math.isnan(value), series
        name = series.split("{")[0]
        if name.endswith(("_total", "_bucket", "_count")):
            assert value >= before.get(series, 0.0), f"{series} fell"

    def delta(family: str) -> float:
        return total(after, family) - total(before, family)

    def position(i: int) -> float:
        name, label = "vllm:spec_decode_num_accepted_tokens_per_pos_total", f'position="{i}"'
        return sum(v - before.get(s, 0.0) for s, v in after.items() if s.startswith(name) and label in s)

    result = Speculation(
        drafts=delta("vllm:spec_decode_num_drafts_total"),
        draft_tokens=delta("vllm:spec_decode_num_draft_tokens_total"),
        accepted=delta("vllm:spec_decode_num_accepted_tokens_total"),
        per_pos=[position(i) for i in range(width)],
        generation=delta("vllm:generation_tokens_total"),
    )
    assert sum(result.per_pos) == result.accepted
    assert all(a >= b for a, b in zip(result.per_pos, result.per_pos[1:], strict=False))
    assert result.accepted <= result.draft_tokens <= width * result.drafts
    return result


def assert_same(ref: Streamed, spec: Streamed, index: int = 0) -> bool:
    """SAME: equal ids and text; True if they part at a near tie, which the case book forgives once in 50 requests.

    Both must carry token ids and at least two log-probs.
    """
    wanted, got = ref.token_ids[index], spec.token_ids[index]
    assert wanted and got, "nothing to compare: ask for return_token_ids"
    parted = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), None)
    if parted is None:
        assert len(wanted) == len(got)
        assert (ref.text[index], ref.finish[index]) == (spec.text[index], spec.finish[index])
        return False
    top = sorted((value for _, value in ref.entries[index][parted].top), reverse=True)
    assert top[0] - top[1] < TIE, f"position {parted}: {wanted[parted]} became {got[parted]} without a near tie"
    return True


def together(calls: Iterable[Callable[[], T]], width: int = 8) -> list[T]:
    """Run the calls with `width` of them in flight; the results in the order of the calls."""
    with ThreadPoolExecutor(width) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
