"""The bug this product was built against: counters that stay 0 on the path users launch, and gauges that freeze.

In real processes, over HTTP, a bench client's two scrapes bracket a run. Source: pegainfer #896 and #952.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cases.bench_reader import Section, read_as_python, read_as_rust, scrape, section
from tests.cases.client import LIST, Client, Streamed, parse_metrics, together, total
from tests.cases.crowd import OpenRequest, leave_all
from tests.cases.laws import Increments, assert_laws, assert_well_formed, engine_scope, gauges, increments

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]  # six tokens: five accepted and the bonus
SETUPS = ["embedded", "sim", "sim_4f"]
SAMPLING = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.4, "seed": 11},
    "server_default": {},  # no temperature at all, as both bench clients send it
}


def bench_requests(sampling: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What a bench client sends, on both endpoints, with enough repetition in it to draft from."""
    common = {**sampling, "stream_options": {"include_usage": True}}
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Repeat this.\n" + LIST}]}],
        "max_completion_tokens": 24,
        "ignore_eos": True,
    }
    completion = {"prompt": LIST, "repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None}
    plain = {"prompt": "The sky is", "max_tokens": 8}
    return [
        ("/v1/completions", {**common, **completion}),
        ("/v1/chat/completions", {**common, **chat}),
        ("/v1/completions", {**common, **plain}),
        ("/v1/completions", {**common, **completion, "max_tokens": 17}),
        ("/v1/completions", {**common, **completion, "stop": ["two"]}),
        ("/v1/completions", {**common, **plain, "n": 2}),
    ]


def run_bench(client: Client, sampling: dict[str, Any]) -> tuple[str, list[Streamed], str]:
    """BEFORE at once before the load, AFTER at once behind the last answer, each on a connection of its own."""
    load = bench_requests(sampling)
    before = scrape(client.base_url)
    streams = together([lambda p=path, b=body: Client(client.base_url).stream(p, **b) for path, body in load], width=4)
    return before, streams, scrape(client.base_url)


def engine_page(page: str) -> dict[str, float]:
    return engine_scope(parse_metrics(page))


def printed_section(before: str, after: str) -> Section:
    by_python = section(read_as_python(before), read_as_python(after))
    by_rust = section(read_as_rust(before), read_as_rust(after))
    assert by_python is not None, "the bench client leaves its Speculative Decoding section out"
    assert by_python == by_rust
    return by_python


@pytest.mark.parametrize("sampling", list(SAMPLING), ids=str)
@pytest.mark.parametrize("name", SETUPS)
def test_two_scrapes_around_a_run_give_a_bench_client_true_numbers(
    setup: Callable[[str], Client], name: str, sampling: str
) -> None:
    client = setup(name)
    before, streams, after = run_bench(client, SAMPLING[sampling])
    printed = printed_section(before, after)
    assert_well_formed(after)
    children = sum(len(stream.finish) for stream in streams)
    counted = assert_laws(engine_page(before), engine_page(after), WIDTH, first_tokens=children)
    assert printed.drafts == counted.speculation.drafts > 0
    assert printed.accepted == counted.speculation.accepted > 0
    assert printed.length == pytest.approx(1 + sum(printed.per_pos) / 100)
    assert counted.generation - counted.trimmed == sum(
        stream.usage["completion_tokens"] for stream in streams if stream.usage
    )
    assert counted.prompt == sum(stream.usage["prompt_tokens"] for stream in streams if stream.usage)
    assert_nothing_moves(client, after)


def assert_nothing_moves(client: Client, after: str) -> None:
    """What a bench client read at the last byte is what stays, two heartbeats of the engine later."""
    time.sleep(1.2)
    counted = increments(engine_page(after), engine_page(scrape(client.base_url)), WIDTH)
    assert (counted.generation, counted.rounds, counted.prompt, counted.speculation.drafts) == (0, 0, 0, 0)


def test_scripted_rounds_appear_in_the_bench_section_to_the_digit(sim: Client) -> None:
    body = {"prompt": "x", "max_tokens": 100, "sim": {"runs": [RUN, [582], RUN[:3], RUN], "drafted": [5, 4, 2, 5]}}
    before = scrape(sim.base_url)
    stream = sim.stream(**body)
    printed = printed_section(before, scrape(sim.base_url))
    assert stream.finish == {0: "stop"}
    assert (printed.drafts, printed.draft_tokens, printed.accepted) == (4, 16, 12)
    assert printed.rate == pytest.approx(75.0)
    assert printed.length == pytest.approx(4.0)
    assert printed.per_pos == [75.0, 75.0, 50.0, 50.0, 50.0]


def leave_in_mid_step(client: Client, num_requests: int) -> tuple[dict[str, float], Increments]:
    """All requests read their first run and leave while the engine works on the second; nobody else is there."""
    before = engine_page(scrape(client.base_url))
    script = {"runs": [RUN] * 4, "step_ms": 400}
    body = {"prompt": "x", "max_tokens": 100, "stream": True, "sim": script}
    opened = together([lambda: OpenRequest(client, body) for _ in range(num_requests)], width=num_requests)
    together([lambda one=one: one.wait_for(1) for one in opened], width=num_requests)
    leave_all(opened)
    client.assert_quiet(within_s=3.0)
    after = engine_page(scrape(client.base_url))
    return after, increments(before, after, WIDTH)


@pytest.mark.parametrize("name", ["sim", "sim_4f"])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_step_whose_rows_were_all_aborted_in_flight_is_published(
    setup: Callable[[str], Client], name: str, num_requests: int
) -> None:
    client = setup(name)
    after, counted = leave_in_mid_step(client, num_requests)
    assert counted.aborted_rounds == num_requests, "every client left while its second round ran"
    rounds = counted.speculation.drafts
    assert counted.speculation.accepted == counted.speculation.draft_tokens == 5 * rounds
    assert counted.cut == 6 * num_requests, "what an aborted round drew is cut, not delivered"
    assert counted.generation == 6 * (rounds - num_requests)
    assert gauges(after) == dict.fromkeys(gauges(after), 0)


def test_the_request_after_an_aborted_step_inherits_nothing(sim: Client) -> None:
    after_abort, _ = leave_in_mid_step(sim, 1)
    sim.complete(prompt="x", max_tokens=100, sim={"runs": [RUN[:3], [582]]})
    counted = assert_laws(after_abort, engine_scope(sim.metrics()), WIDTH, first_tokens=0)
    assert (counted.speculation.drafts, counted.speculation.accepted, counted.plain_rounds) == (1, 2, 1)
    assert (counted.generation, counted.aborted_rounds, counted.cut) == (4, 0, 0)


def test_streams_of_the_real_model_that_are_left_still_obey_the_laws(setup: Callable[[str], Client]) -> None:
    spec = setup("embedded")
    before = spec.metrics()
    body = {"prompt": LIST, "temperature": 0, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    opened = together([lambda: OpenRequest(spec, body) for _ in range(4)])
    together([lambda one=one: one.wait_for(12) for one in opened])
    leave_all(opened)
    spec.assert_quiet(within_s=3.0)
    counted = assert_laws(before, spec.metrics(), WIDTH, first_tokens=4)
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0
    assert counted.generation < 4 * 500, "the engine stopped soon after the clients left"


@pytest.mark.parametrize("name", SETUPS)
def test_gauges_rise_under_load_and_fall_to_zero_when_idle(setup: Callable[[str], Client], name: str) -> None:
    client = setup(name)
    body: dict[str, Any] = {"prompt": LIST, "max_tokens": 40}
    if name != "embedded":
        body["sim"] = {"runs": [RUN] * 6, "step_ms": 60}
    count = 4 if name == "embedded" else 80
    with watched_gauges(client) as peaks:
        together([lambda: Client(client.base_url).complete(**body) for _ in range(count)], width=count)
    assert peaks["vllm:num_requests_running"] > 0
    assert peaks["vllm:kv_cache_usage_perc"] > 0
    client.assert_quiet(within_s=2.0, steady_s=2.0)
    assert total(client.metrics(), "vllm:num_requests_running") == 0


@contextmanager
def watched_gauges(client: Client) -> Iterator[dict[str, float]]:
    """The highest value each gauge shows during the block."""
    peaks: dict[str, float] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for family, value in gauges(client.metrics()).items():
                peaks[family] = max(peaks.get(family, 0.0), value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()
