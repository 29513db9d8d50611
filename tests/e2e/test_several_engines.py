"""Two real engines behind two real frontends: load, prefixes, a killed engine, and totals that still add up."""

import json
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

from tests.e2e.servers import _attached_url, running, serve
from tests.traced import named
from tests.traced_server import Parent, checked, errors, traced_server

GENERATED = "vllm:generation_tokens_total"
READY_S = 30.0


def soon(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def per_engine(url: str, family: str) -> dict[str, float]:
    """The family's value by engine, summed over its other labels; a scrape of `url`."""
    found: Counter[str] = Counter()
    for line in get(url + "/metrics")[1].splitlines():
        if line.startswith(family + "{"):
            found[line.partition('engine="')[2].partition('"')[0]] += float(line.rsplit(" ", 1)[1])
    return dict(found)


def ready_engines(url: str) -> list[str]:
    return [engine["id"] for engine in json.loads(get(url + "/ready")[1])["engines"] if engine["ready"]]


@dataclass
class Answer:
    """One streamed request as its client saw it."""

    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    status: int = 200
    is_done: bool = False
    first: threading.Event = field(default_factory=threading.Event)


def stream(url: str, answer: Answer, **body: object) -> Answer:
    """Run a request to its last byte, into `answer`."""
    data = json.dumps({"prompt": "x", "stream": True, "return_token_ids": True, **body}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    answer.is_done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        answer.errors.append(event["error"]["message"])
                    for choice in event.get("choices", ()):
                        answer.num_tokens += len(choice["token_ids"] or ())
                    if answer.num_tokens:
                        answer.first.set()
    except urllib.error.HTTPError as error:
        with error:
            answer.status = error.code
    finally:
        answer.first.set()
    return answer


@contextmanager
def two_by_two(*options: str) -> Iterator[tuple[list[str], dict[str, psutil.Process], Callable[[str], None]]]:
    """(frontend URLs, engine processes by id, start an engine again)."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="drafthouse-test-"))
        processes: dict[str, psutil.Process] = {}

        def start(engine_id: str) -> None:
            before = set(psutil.Process().children())
            listen = f"ipc://{directory}/{engine_id}.sock"
            arguments = ("--listen", listen, "--engine-id", engine_id, "--executor", "sim", *options)
            stack.enter_context(running("engine", *arguments))
            [processes[engine_id]] = set(psutil.Process().children()) - before

        for engine_id in ("0", "1"):
            start(engine_id)
        addresses = f"ipc://{directory}/0.sock,ipc://{directory}/1.sock"
        logs = [stack.enter_context(running("frontend", "--engine", addresses, "--port", "0")) for _ in range(2)]
        urls = [_attached_url(log) for log in logs]
        for url in urls:
            soon(lambda url=url: ready_engines(url) == ["0", "1"], READY_S)
        yield urls, processes, start


def test_load_is_spread_prefixes_stay_together_and_any_frontend_reads_true_deltas():
    with two_by_two("--check-laws") as (urls, _, _):
        before = per_engine(urls[0], GENERATED)
        assert before == {"0": 0, "1": 0}
        jobs = [(urls[number % 2], {"prompt": f"{number} " * 30, "max_tokens": 3 + number % 5}) for number in range(24)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda job: stream(job[0], Answer(), **job[1]), jobs))
        assert all(answer.is_done and not answer.errors for answer in answers)
        after = per_engine(urls[1], GENERATED)
        assert sum(after.values()) == sum(answer.num_tokens for answer in answers)
        assert min(after.values()) > 0, "both engines had work"
        assert per_engine(urls[0], GENERATED) == after, "every frontend says the same"
        for url, number in ((urls[0], 0), (urls[1], 0), (urls[0], 1), (urls[1], 2)):
            stream(
                url,
                Answer(),
                prompt=f"the same long beginning of many words {' and so on' * 120} {number}",
                max_tokens=2,
            )
        grown = {engine: count - after[engine] for engine, count in per_engine(urls[0], GENERATED).items()}
        assert sorted(grown.values()) == [0, 8], "the same prefix goes to the same engine, through either frontend"
        finished = Counter[str]()
        for url in urls:
            finished.update(per_engine(url, "vllm:request_success_total"))
        assert sum(finished.values()) == 28 and min(finished.values()) > 0, "by the engine that ran the request"


def test_a_killed_engine_costs_only_what_had_begun_and_comes_back_as_a_new_epoch():
    options = ("--check-laws", "--sim-step-ms", "60", "--max-num-seqs", "3", "--num-draft-tokens", "2")
    with two_by_two(*options) as (urls, processes, start):
        epochs = per_engine(urls[0], "drafthouse:engine_epoch_start_time_seconds")
        answers = [Answer() for _ in range(20)]
        with ThreadPoolExecutor(20) as pool:
            jobs = [
                pool.submit(stream, urls[number % 2], answer, prompt=f"{number}", max_tokens=30)
                for number, answer in enumerate(answers)
            ]
            soon(lambda: sum(answer.num_tokens > 0 for answer in answers) >= 5)
            soon(lambda: per_engine(urls[0], "vllm:num_requests_waiting")["0"] > 0)
            os.kill(processes["0"].pid, signal.SIGKILL)
            for job in jobs:
                job.result(60)
        broken = [answer for answer in answers if answer.errors]
        whole = [answer for answer in answers if not answer.errors]
        assert broken and all(len(answer.errors) == 1 and answer.num_tokens for answer in broken)
        assert all("engine was lost" in answer.errors[0] for answer in broken)
        assert all(answer.is_done and answer.status == 200 for answer in answers)
        assert all(answer.num_tokens == 30 for answer in whole)
        retried = sum(sum(per_engine(url, "drafthouse:requests_retried_total").values()) for url in urls)
        assert 0 < retried <= 20 - len(broken)
        for url in urls:
            status, text = get(url + "/ready")
            assert status == 200 and [engine["ready"] for engine in json.loads(text)["engines"]] == [False, True]
            assert per_engine(url, "drafthouse:engine_up") == {"0": 0, "1": 1}
        old = per_engine(urls[0], GENERATED)
        assert per_engine(urls[1], GENERATED)["1"] == old["1"]
        # Whoever was broken off may have been sent less than its engine had counted, never more.
        assert sum(old.values()) >= sum(answer.num_tokens for answer in answers)
        start("0")
        for url in urls:
            soon(lambda url=url: ready_engines(url) == ["0", "1"])
        now = per_engine(urls[1], GENERATED)
        assert now == {"0": 0, "1": old["1"]}
        assert per_engine(urls[0], "drafthouse:engine_epoch_start_time_seconds")["0"] > epochs["0"]
        with ThreadPoolExecutor(6) as pool:
            later = list(pool.map(lambda number: stream(urls[number % 2], Answer(), max_tokens=4), range(6)))
        then = per_engine(urls[0], GENERATED)
        assert sum(then.values()) - sum(now.values()) == sum(answer.num_tokens for answer in later) == 24


def test_a_retried_request_has_the_stages_of_both_engines_and_those_of_the_first_end_in_error():
    slow = {
        "runs": [[582, 827], [582]],
        "step_ms": 1500,
    }  # the prompt gives no token, and the first round takes its time
    with traced_server("--executor", "sim", "--engines", "2", "--check-laws", "true") as traced:
        url, parent = traced.server.base_url, Parent()
        with ThreadPoolExecutor(1) as pool:
            headers = parent.headers
            asking = pool.submit(
                requests.post, url + "/v1/completions", json={"prompt": "x", "sim": slow}, headers=headers, timeout=60
            )
            soon(lambda: 1 in per_engine(url, "vllm:num_requests_running").values())
            soon(lambda: sum(per_engine(url, "vllm:prompt_tokens_total").values()) > 0)
            [lost] = [engine for engine, count in per_engine(url, "vllm:num_requests_running").items() if count == 1]
            [pid] = [
                pid for pid in traced.server.pids("engine") if f"--engine-id={lost}" in psutil.Process(pid).cmdline()
            ]
            os.kill(pid, signal.SIGKILL)
            answer = asking.result(60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        spans = traced.trace(parent.trace_id, "decode_forward")
        checked(spans, parent.span_id)
        decodes = {span.instance.partition("/")[0]: span for span in named(spans, "decode_forward")}
        other = "1" if lost == "0" else "0"
        assert decodes[lost].is_error and "engine lost" in decodes[lost].message
        assert not decodes[other].is_error and decodes[other].attributes["num_rounds"] == 2
        assert len(named(spans, "prefill_forward")) == 2 and errors(spans).keys() == {"decode_forward"}
        assert sum(per_engine(url, "drafthouse:requests_retried_total").values()) == 1


def test_a_frontend_follows_a_name_to_its_engine_and_waits_for_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running("frontend", "--engine", f"tcp://localhost:{port}", "--port", "0") as log:
        soon(lambda: " listening url=" in log.read_text(), READY_S)
        url = log.read_text().partition(" listening url=")[2].split()[0]
        soon(lambda: f"tcp://127.0.0.1:{port}" in get(url + "/ready")[1])
        assert get(url + "/ready")[0] == 503 and get(url + "/health")[0] == 200
        with running("engine", "--listen", f"tcp://127.0.0.1:{port}", "--executor", "sim"):
            soon(lambda: get(url + "/ready")[0] == 200, READY_S)
            assert stream(url, Answer(), max_tokens=5).num_tokens == 5
        soon(lambda: get(url + "/ready")[0] == 503)


def test_serve_starts_several_engines_and_all_of_them_are_ready():
    with serve("--executor", "sim", "--engines", "2", "--frontends", "2") as server:
        assert len(server.pids("engine")) == 2
        assert ready_engines(server.base_url) == ["0", "1"]
        assert per_engine(server.base_url, "drafthouse:engine_up") == {"0": 1, "1": 1}
        directory = Path(psutil.Process(server.pids("engine")[0]).cmdline()[-1].removeprefix("--listen=ipc://")).parent
        assert server.stop() == 0 and not directory.exists()
