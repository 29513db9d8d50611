"""ABORT: clients that leave, at every moment a client can leave, and what the server must show afterwards."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.cases.client import CHAT, IS_LONG, PAT, Client, parse_metrics, together, total
from tests.cases.crowd import OpenRequest, leave_all, seeded
from tests.cases.laws import gauges, increments, labelled
from tests.cases.processes import wait_until
from tests.e2e.servers import fleet, serve
from tests.timing import at_most_s

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SLOW_SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true", "--max-num-seqs", "15")
SLOW_SIM += ("--sim-step-ms", "20")
LONG_ANSWER = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
LONG_CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow_fleet() -> Iterator[Callable[[int], list[Client]]]:
    """`slow_fleet(frontends)`: a simulated engine of 15 rows that needs seconds for a long answer, behind so many frontends."""
    with ExitStack() as stack:
        fleets: dict[int, list[Client]] = {}

        def get(frontends: int) -> list[Client]:
            if frontends not in fleets:
                fleets[frontends] = [Client(url) for url in stack.enter_context(fleet(frontends, *SLOW_SIM))]
            return fleets[frontends]

        yield get


@pytest.fixture
def slow(slow_fleet: Callable[[int], list[Client]]) -> Client:
    return slow_fleet(1)[0]


def running(client: Client) -> float:
    return total(client.metrics(), "vllm:num_requests_running")


def waiting(client: Client) -> float:
    return total(client.metrics(), "vllm:num_requests_waiting")


def finished(samples: dict[str, float], reason: str) -> float:
    return labelled(samples, "vllm:request_success_total", finished_reason=reason)


def added(pages: list[dict[str, float]]) -> Counter[str]:
    """What the frontends count, each for itself, put together."""
    counted: Counter[str] = Counter()
    for page in pages:
        counted.update(page)
    return counted


def assert_only_aborts(before: Counter[str], after: Counter[str], count: int) -> None:
    assert finished(after, "abort") - finished(before, "abort") == count
    for reason in ("stop", "length", "error"):
        assert finished(after, reason) == finished(before, reason), reason


def open_long(client: Client, index: int, stream: bool = True) -> OpenRequest:
    """A request that takes seconds; every second one is a chat."""
    if index % 2:
        return OpenRequest(client, {**LONG_CHAT, "stream": stream}, CHAT)
    return OpenRequest(client, {**LONG_ANSWER, "stream": stream})


# ---- ABORT-1: vllm-project/vllm#29928 ----


@pytest.mark.parametrize("frontends", [1, 4])
def test_abort_1_gauges_fall_by_themselves_when_every_client_leaves_at_once(
    slow_fleet: Callable[[int], list[Client]], frontends: int
) -> None:
    clients = slow_fleet(frontends)
    before = added([client.metrics() for client in clients])
    opened = together([lambda i=i: open_long(clients[i // 2 % frontends], i) for i in range(64)], width=64)
    for client in clients:  # every frontend sees the whole engine, not its own clients
        wait_until(lambda client=client: waiting(client) == 64 - 15, 5, "a queue longer than the batch")
        assert running(client) == 15
    started = time.thread_time()  # this thread's own work: what another process takes of the core is not the clients'
    leave_all(opened)
    at_most_s(time.thread_time() - started, 0.05, "all clients leaving")
    clients[0].assert_quiet(within_s=2.0, steady_s=5.0 if IS_LONG else 1.0)
    for client in clients:
        client.assert_quiet(within_s=0.5, steady_s=0.0)
    pages = [parse_metrics(client.get("/metrics/engine").text) for client in clients]
    assert all(gauges(page) == dict.fromkeys(gauges(page), 0) for page in pages)
    assert all(page == pages[0] for page in pages), "every frontend says the same of the engine"
    after = added([client.metrics() for client in clients])
    assert_only_aborts(before, after, 64)


def test_abort_1_the_real_model_stops_when_every_client_leaves_at_once(spec: Client) -> None:
    body = {"prompt": PAT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 0}
    opened = together([lambda: OpenRequest(spec, body) for _ in range(12)], width=12)
    together([lambda one=one: one.wait_for(1) for one in opened], width=12)
    assert running(spec) == 12
    leave_all(opened)
    spec.assert_quiet(within_s=3.0 if IS_LONG else 2.0)


# ---- ABORT-2: vllm-project/vllm#31503 ----

PER_REQUEST = (
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_max_num_generation_tokens_count",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_count",
)


@pytest.mark.parametrize("frontends", [1, 4])
def test_abort_2_every_client_that_left_is_counted_once_as_aborted(
    slow_fleet: Callable[[int], list[Client]], frontends: int
) -> None:
    clients = slow_fleet(frontends)
    before = added([client.metrics() for client in clients])
    streams = [open_long(clients[index % frontends], index // frontends) for index in range(10)]
    together([lambda one=one: one.wait_for(3) for one in streams], width=10)
    plain = [open_long(clients[index % frontends], index // frontends, stream=False) for index in range(5)]
    wait_until(lambda: running(clients[0]) == 15, 5, "every row taken")
    queued = [open_long(clients[index % frontends], index, stream=index < 3) for index in range(5)]
    wait_until(lambda: waiting(clients[0]) == 5, 5, "five in the queue")
    time.sleep(0.2)
    leave_all([*queued, *plain, *streams])
    for client in clients:
        client.assert_quiet(within_s=2.0, steady_s=0.2)
    after = added([client.metrics() for client in clients])
    assert_only_aborts(before, after, 20)
    grown = {family: total(after, family) - total(before, family) for family in PER_REQUEST}
    assert grown == dict.fromkeys(PER_REQUEST, 20)
    first_token = "vllm:time_to_first_token_seconds_count"
    assert total(after, first_token) - total(before, first_token) == 15, "who waited never got a token"


def test_abort_2_each_child_of_an_abandoned_request_is_counted(slow: Client) -> None:
    client = slow
    before = client.metrics()
    with OpenRequest(client, {**LONG_ANSWER, "n": 3, "stream": True}) as one:
        one.wait_for(4)
    client.assert_quiet(within_s=2.0)
    after = client.metrics()
    assert finished(after, "abort") - finished(before, "abort") == 3
    n = "vllm:request_params_n_count"
    assert total(after, n) - total(before, n) == 1, "parameters are counted once per request"


# ---- ABORT-3: vllm-project/vllm#10806 ----

KILLED_CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(len(urllib.request.urlopen(request).read()))
"""


@pytest.mark.parametrize("stream", [False, True])
def test_abort_3_killing_the_client_process_frees_its_request(slow: Client, stream: bool) -> None:
    client = slow
    aborts = finished(client.metrics(), "abort")
    flag = "true" if stream else "false"
    body = f'{{"prompt":"x","max_tokens":4000,"ignore_eos":true,"stream":{flag}}}'
    url = client.base_url + "/v1/completions"
    process = subprocess.Popen([sys.executable, "-c", KILLED_CLIENT, url, body], stdout=subprocess.DEVNULL)
    wait_until(lambda: running(client) == 1, 10, "the request runs")
    time.sleep(1.0 if IS_LONG else 0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: running(client) == 0, 2, "the request is gone")
    assert_generation_stands_still(client)
    client.assert_quiet()
    assert finished(client.metrics(), "abort") == aborts + 1


def assert_generation_stands_still(client: Client) -> None:
    first = total(client.metrics(), "vllm:generation_tokens_total")
    time.sleep(0.3)
    assert total(client.metrics(), "vllm:generation_tokens_total") == first


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_abort_3_a_non_streaming_client_of_the_real_model_frees_its_request(spec: Client, path: str) -> None:
    what = {"prompt": PAT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PAT}]}
    with OpenRequest(spec, {**what, "max_tokens": 4000, "ignore_eos": True}, path):
        wait_until(lambda: running(spec) == 1, 10, "the request runs")
    wait_until(lambda: running(spec) == 0, 2, "the request is gone")
    assert_generation_stands_still(spec)
    spec.assert_quiet()


@pytest.fixture(scope="module")
def slow_prompt() -> Iterator[Client]:
    """A prompt of 6000 tokens takes six seconds, and a stream that has nothing to say yet sends its headers soon."""
    prefill = ("--sim-prefill-ms", "1000", "--max-num-batched-tokens", "256", "--sse-ping-interval-s", "0.1")
    with serve("--executor", "sim", "--check-laws", "true", *prefill) as server:
        yield Client(server.base_url)


@pytest.mark.parametrize("moment", ["plain", "stream before its headers", "stream with its headers"])
def test_abort_3_leaving_while_the_prompt_is_processed_stops_it(slow_prompt: Client, moment: str) -> None:
    before = slow_prompt.metrics()
    # A prompt of its own each time: what was computed of an abandoned one may be kept.
    prompt = [1000 + len(moment)] * 6000
    with OpenRequest(slow_prompt, {"prompt": prompt, "max_tokens": 10, "stream": moment != "plain"}) as one:
        wait_until(lambda: running(slow_prompt) == 1, 5, "the prompt is being processed")
        if moment == "stream with its headers":
            one.wait_for_headers(within_s=4)
            assert one.num_chunks == 0
        elif moment == "plain":
            time.sleep(0.3)
    slow_prompt.assert_quiet(within_s=2.0)
    after = slow_prompt.metrics()
    for family in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert total(after, family) == total(before, family), "a prompt that did not end counts nothing"
    assert finished(after, "abort") == finished(before, "abort") + 1


def test_abort_3_leaving_while_the_real_model_works_on_a_long_prompt_stops_it(spec: Client) -> None:
    before = spec.metrics()
    prompt = [1000 + 7 * index for index in range(4000)]
    with OpenRequest(spec, {"prompt": prompt, "max_tokens": 10, "stream": True}):
        wait_until(lambda: running(spec) == 1, 10, "the prompt is being processed")
    # One chunk of 512 tokens of the embedded model takes seconds on a slow machine.
    spec.assert_quiet(within_s=6.0 if IS_LONG else 2.0)
    after = spec.metrics()
    assert increments(before, after, WIDTH).prompt == 0
    assert finished(after, "abort") - finished(before, "abort") == 1


# ---- ABORT-4: pegainfer-project/pegainfer#952 ----


def test_abort_4_a_round_is_counted_in_full_or_not_at_all(sim: Client) -> None:
    """Documented: the work was done, so a round aborted in flight is counted in full, and what it drew is cut."""
    rng = seeded("ABORT-4")
    aborted = 0
    for _ in range(50 if IS_LONG else 12):
        before = sim.metrics()
        script = {"runs": [RUN] * 60, "step_ms": 60}
        with OpenRequest(sim, {"prompt": "x", "max_tokens": 400, "stream": True, "sim": script}):
            wait_until(lambda: running(sim) == 1, 5, "it was dispatched")
            time.sleep(rng.random() * 0.2)
        wait_until(
            lambda before=before: finished(sim.metrics(), "abort") == finished(before, "abort") + 1, 2, "it ended"
        )
        sim.assert_quiet(within_s=2.0, steady_s=5.0 if IS_LONG else 0.0)
        after = sim.metrics()
        counted = increments(before, after, WIDTH)
        rounds = counted.speculation.drafts
        assert counted.plain_rounds == 0
        assert counted.speculation.draft_tokens == counted.speculation.accepted == 5 * rounds
        assert counted.speculation.per_pos == [rounds] * 5
        assert counted.cut == 6 * counted.aborted_rounds
        assert counted.generation == 6 * (rounds - counted.aborted_rounds)
        aborted += int(counted.aborted_rounds)
        sim.complete(prompt="x", max_tokens=9, sim={"runs": [[582, 827], [582]]})
        following = increments(after, sim.metrics(), WIDTH)
        assert (following.speculation.drafts, following.speculation.accepted, following.generation) == (1, 1, 3)
        assert following.aborted_rounds == 0, "the next request inherits nothing"
    assert aborted > 0, "no client ever left in the middle of a round"


def leave_soon(client: Client, body: dict[str, object], after_s: float) -> None:
    with OpenRequest(client, {**body, "stream": True, "logprobs": 1}):
        time.sleep(after_s)


def test_abort_every_frontend_tells_the_same_after_a_storm_of_aborts(
    slow_fleet: Callable[[int], list[Client]],
) -> None:
    clients, rng, count = slow_fleet(4), seeded("ABORT storm"), 200 if IS_LONG else 60

    def num_left() -> float:
        """Counted by now, of those who have left: at whatever stage of their request they did."""
        pages = added([client.metrics() for client in clients])
        return finished(pages, "abort") + total(pages, "drafthouse:requests_abandoned_total")

    before = num_left()
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "sim": {"runs": [RUN] * 60, "step_ms": 20}}
    delays = [rng.random() * 0.15 for _ in range(count)]
    together([lambda i=i, d=d: leave_soon(clients[i % 4], body, d) for i, d in enumerate(delays)], width=32)
    wait_until(lambda: num_left() == before + count, 5, "everyone who left is counted")
    for client in clients:
        client.assert_quiet(within_s=2.0, steady_s=0.2)
    pages = [parse_metrics(client.get("/metrics/engine").text) for client in clients]
    assert all(page == pages[0] for page in pages)
