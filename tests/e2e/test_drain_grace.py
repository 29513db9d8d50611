"""Between SIGTERM and the moment a balancer knows of it, a frontend says that it goes and still serves."""

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import requests

from tests.cases.client import Client
from tests.e2e import servers
from tests.e2e.test_lifecycle import (
    LISTENING,
    SIM,
    Started,
    assert_whole,
    endless,
    pair,
    ready,
    refuses,
    soon,
    started,
    status_of,
    stream,
)
from tests.timing import within_s

BODY = {"prompt": "x", "max_tokens": 1}


def complete(url: str) -> requests.Response:
    return requests.post(f"{url}/v1/completions", json=BODY, timeout=30)


def test_new_requests_are_served_while_ready_says_no_and_a_second_signal_ends_it() -> None:
    options = ("--drain-grace-s", "600", "--drain-timeout-s", "600")
    with pair(frontend_options=options) as it:
        it.frontend.tell()
        soon(lambda: ready(it.client) == 503, "it is not ready")
        assert status_of(it.client, "/health") == 200
        with requests.Session() as kept:
            for _ in range(5):
                answer = kept.post(f"{it.client.base_url}/v1/completions", json=BODY, timeout=30)
                assert answer.status_code == 200 and answer.headers["Connection"] == "close"
            streamed = kept.post(f"{it.client.base_url}/v1/completions", json=BODY | {"stream": True}, timeout=30)
            assert streamed.text.endswith("data: [DONE]\n\n") and streamed.headers["Connection"] == "close"
        assert ready(it.client) == 503
        with within_s(5, "the end after a second signal"):
            it.frontend.tell(signal.SIGINT)
            assert it.frontend.code() == 0
        assert "stopped aborted_sequences=0" in it.frontend.log()


def test_after_the_grace_new_requests_are_refused_and_what_runs_goes_on() -> None:
    grace_s = 1.0
    options = ("--drain-grace-s", f"{grace_s:g}", "--drain-timeout-s", "600")
    with pair(frontend_options=options) as it, stream(it.client, 200) as running:
        told_s = time.monotonic()
        it.frontend.tell()
        num_served = 0
        while not refuses(it.client):
            num_served += 1
            assert time.monotonic() - told_s < 30
        assert time.monotonic() - told_s >= grace_s and num_served > 0
        assert_whole(running, 200)
        assert it.frontend.code() == 0


def test_the_grace_is_part_of_the_drain_time() -> None:
    options = ("--drain-grace-s", "1", "--drain-timeout-s", "1")
    with pair(frontend_options=options) as it, endless(it.client):
        told_s = time.monotonic()
        it.frontend.tell()
        assert it.frontend.code() == 0
        assert time.monotonic() - told_s >= 1
        assert "stopped aborted_sequences=1" in it.frontend.log()


@contextmanager
def two_frontends(*options: str) -> Iterator[list[tuple[Started, str]]]:
    """One engine, two frontends that are ready, and their URLs."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp"))
        address = f"ipc://{directory}/engine"
        stack.enter_context(servers.running("engine", "--listen", address, *SIM))
        processes = [
            stack.enter_context(started("frontend", "--engine", address, "--port", "0", *options)) for _ in range(2)
        ]
        found = []
        for process in processes:
            soon(lambda process=process: LISTENING.search(process.log()), "it listens", 60)
            listening = LISTENING.search(process.log())
            assert listening is not None
            found.append((process, listening[1]))
            soon(lambda url=listening[1]: ready(Client(url)) == 200, "it is ready", 60)
        yield found


class Balancer:
    """Asks every frontend for /ready, one after the other, and knows no more than the answers."""

    def __init__(self, urls: list[str]) -> None:
        self.known = list(urls)
        self._urls = urls
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> "Balancer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._ended.wait(0.25):
            self.known = [url for url in self._urls if self._is_ready(url)]

    @staticmethod
    def _is_ready(url: str) -> bool:
        try:
            return requests.get(f"{url}/ready", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False


def test_behind_a_balancer_that_asks_for_ready_no_request_is_refused_when_a_frontend_stops() -> None:
    # 60 s: it stops when the balancer knows, whatever the machine does; the test ends the waiting with a second signal.
    with two_frontends("--drain-grace-s", "60", "--drain-timeout-s", "60") as frontends:
        (leaving, leaving_url), (_, staying_url) = frontends
        with Balancer([leaving_url, staying_url]) as balancer:
            statuses: list[int] = []
            served_after = 0
            told = False
            deadline_s = time.monotonic() + 60
            while leaving_url in balancer.known or len(statuses) < 40:
                url = balancer.known[len(statuses) % len(balancer.known)]
                statuses.append(complete(url).status_code)
                served_after += told and url == leaving_url
                if len(statuses) == 20:
                    leaving.tell()
                    told = True
                assert time.monotonic() < deadline_s, "the balancer never knew"
            leaving.tell()
            assert leaving.code() == 0
            statuses += [complete(url).status_code for url in balancer.known]
        assert set(statuses) == {200}
        assert served_after > 0, "it was sent requests that it would have refused without a grace"


def test_an_engine_that_is_told_to_end_says_so_in_the_middle_of_a_step() -> None:
    step_s = 8.0
    with pair() as it, stream(it.client, num_steps=3, step_ms=1000 * step_s):  # the second step has just begun
        with within_s(step_s / 2, "the news of the engine's end"):
            it.engine.tell()
            soon(lambda: ready(it.client) == 503, "no engine takes requests")
        reason = requests.get(f"{it.client.base_url}/ready", timeout=5).json()["reason"]
        assert reason.endswith("is shutting down"), "it drains, it is not lost"
        assert refuses(it.client)
        refused = {
            sample.partition('reason="')[2].partition('"')[0]: value
            for sample, value in it.client.metrics().items()
            if sample.startswith("vllm:admission_rejections_total{")
        }
        assert {reason for reason, count in refused.items() if count} == {"draining"}


def test_a_grace_longer_than_the_drain_is_refused_by_name() -> None:
    with started("frontend", "--drain-grace-s", "9", "--port", "0") as one:
        assert one.code() == 2
        assert "--drain-grace-s 9 is longer than --drain-timeout-s 8" in one.log()
    with started("serve", "--drain-grace-s", "6", "--port", "0", *SIM) as whole:
        assert whole.code() == 2
        assert "--drain-grace-s 6 is longer than --drain-timeout-s 5" in whole.log()
