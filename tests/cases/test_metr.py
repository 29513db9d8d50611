"""METR: numbers on /metrics in every epoch, before the first request, and step by step. Launch modes: test_metr_fleet.py."""

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import requests

from tests.cases.bench_reader import read_as_python, read_as_rust, scrape
from tests.cases.client import IS_LONG, PAT, Client, parse_metrics, speculation_delta, total
from tests.cases.crowd import OpenRequest, seeded
from tests.cases.laws import assert_laws, assert_well_formed, families, increments
from tests.cases.processes import processes_of, unharmed, wait_until
from tests.e2e.servers import Server, serve

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
SPEC_FAMILIES = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


def engine_page(base_url: str) -> dict[str, float]:
    """Of whichever frontend takes a new connection."""
    response = requests.get(base_url + "/metrics/engine", timeout=10)
    assert response.status_code == 200
    return parse_metrics(response.text)


# ---- METR-3: vllm-project/vllm#6642 ----


def one_of_everything(rng: random.Random) -> dict[str, Any]:
    """Preemption, cache hits, n > 1, repeated ids, stop strings: whatever could turn an increment negative."""
    body: dict[str, Any] = {"prompt": PAT, "max_tokens": rng.randint(1, 60), "request_id": rng.choice("abc")}
    kind = rng.randrange(5)
    if kind == 0:
        runs = [RUN[: rng.randint(1, 6)] for _ in range(5)]
        body["sim"] = {"runs": runs, "preempt_at": rng.randrange(5)}
    elif kind == 1:
        body |= {"n": rng.randint(2, 4), "seed": 3}
    elif kind == 2:
        body["prompt"] = [rng.randrange(17, 49152) for _ in range(rng.randint(1, 300))]
    elif kind == 3:
        body |= {"sim": {"runs": [RUN] * 3}, "stop": [" four"]}
    return body


def disturb(client: Client, seed: int, until: float) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        body = {**one_of_everything(rng), "stream": rng.random() < 0.7}
        with OpenRequest(client, body) as request:
            if rng.random() < 0.4:
                time.sleep(rng.random() * 0.05)
            else:
                request.read_to_end()
                assert request.status in (200, 400, 409), request.received[:300]


def test_metr_3_totals_never_fall_under_preemption_cache_hits_children_and_aborts() -> None:
    rng = seeded("METR-3")
    with serve(*SIM, "--kv-cache-tokens", "640", "--max-model-len", "640", "--sim-step-ms", "2") as server:
        client = Client(server.base_url)
        with unharmed(client):
            until = time.monotonic() + (30 if IS_LONG else 4)
            seeds = [rng.randrange(2**32) for _ in range(12)]
            threads = [threading.Thread(target=disturb, args=(client, seed, until)) for seed in seeds]
            for thread in threads:
                thread.start()
            first = last = client.metrics()
            while time.monotonic() < until:
                now = client.metrics()
                speculation_delta(last, now, WIDTH)
                last = now
            for thread in threads:
                thread.join()
            client.assert_quiet()
            counted = increments(first, client.metrics(), WIDTH)
        assert counted.preemptions > 0, "the pool was never too small"
        assert counted.speculation.drafts > 0
        assert counted.trimmed > 0
        assert total(client.metrics(), "vllm:prefix_cache_hits_total") > 0
        assert_nothing_raised(server)


def assert_nothing_raised(server: Server) -> None:
    """No exception reached the token path, and none was swallowed with a log line either."""
    log = server.log()
    assert "Traceback" not in log, log[-4000:]
    assert not [line for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line]


@pytest.mark.parametrize("frontends", [1, 2] if IS_LONG else [2])
def test_metr_3_a_restarted_engine_counts_from_its_own_zero(frontends: int) -> None:
    body = {"prompt": "x", "max_tokens": 100, "sim": {"runs": [RUN] * 10}}
    with serve(*SIM, "--frontends", str(frontends)) as server:
        client = Client(server.base_url)
        for _ in range(5):
            client.complete(**body)
        old = engine_page(server.base_url)
        assert total(old, "vllm:spec_decode_num_accepted_tokens_total") == 250
        epoch = total(old, "drafthouse:engine_epoch_start_time_seconds")
        os.kill(processes_of(client).engine, signal.SIGKILL)
        wait_until(lambda: _new_epoch(server.base_url, epoch), 15, "a new engine")
        fresh = [engine_page(server.base_url) for _ in range(6)]
        assert all(total(page, family) == 0 for page in fresh for family in SPEC_FAMILIES)
        client.complete(**body)
        counted = [engine_page(server.base_url) for _ in range(6)]
        assert {total(page, "vllm:spec_decode_num_accepted_tokens_total") for page in counted} == {50}
        assert {total(page, "vllm:generation_tokens_total") for page in counted} == {60}
        restarts = [line for line in server.log().splitlines() if " engine_restarted engine=0 epoch=" in line]
        assert len(restarts) == frontends
        assert all("totals=from_zero" in line for line in restarts)
        assert "Traceback" not in server.log()


def _new_epoch(base_url: str, old: float) -> bool:
    """True when every frontend serves the new engine (scrapes go round over them)."""
    for _ in range(6):
        if requests.get(base_url + "/ready", timeout=5).status_code != 200:
            return False
        if total(engine_page(base_url), "drafthouse:engine_epoch_start_time_seconds") <= old:
            return False
    return True


# ---- METR-4: ggml-org/llama.cpp#26389 ----


@pytest.mark.parametrize("k", [1, 5, 15] if IS_LONG else [5])
def test_metr_4_all_spec_families_are_there_at_zero_before_any_request(k: int) -> None:
    with serve("--executor", "sim", "--num-draft-tokens", str(k)) as server:
        page = scrape(server.base_url, accept="*/*")
    samples = parse_metrics(page)
    assert families(samples, "vllm:spec_decode") == set(SPEC_FAMILIES)
    assert all(value == 0 for series, value in samples.items() if series.startswith("vllm:spec_decode"))
    positions = {s.split('position="')[1].split('"')[0] for s in samples if s.startswith(SPEC_FAMILIES[3])}
    assert positions == {str(position) for position in range(k)}
    for read in (read_as_python, read_as_rust):
        snapshot = read(page)
        assert snapshot.found
        assert snapshot.per_pos == dict.fromkeys(range(k), 0)
    assert_spec_lines(page)


def assert_spec_lines(page: str) -> None:
    """`_total` once, one blank before the value, no time stamp, no `_created`, help and type for each family."""
    assert_well_formed(page)
    for line in page.splitlines():
        if "spec_decode" in line and not line.startswith("#"):
            assert line.split("{")[0].count("_total") == 1, line
            assert "_created" not in line
    for family in SPEC_FAMILIES:
        assert f"# TYPE {family} counter" in page
        assert f"# HELP {family} " in page


def test_metr_4_every_engine_family_is_there_before_any_request() -> None:
    with serve(*SIM) as server:
        before = set(engine_page(server.base_url))
        Client(server.base_url).complete(prompt=PAT, max_tokens=20)
        assert set(engine_page(server.base_url)) == before, "no series appears with the first request"


def test_metr_4_without_a_drafter_there_are_no_spec_families(ref: Client) -> None:
    assert families(ref.metrics(), "vllm:spec_decode") == set()
    snapshot = read_as_python(scrape(ref.base_url))
    assert not snapshot.found


@pytest.mark.parametrize("accept", [None, "*/*", "text/plain", "text/html,application/json;q=0.9,*/*;q=0.8", "garbage"])
def test_metr_4_the_format_is_classic_text_unless_openmetrics_is_asked_for(sim: Client, accept: str | None) -> None:
    response = requests.get(sim.base_url + "/metrics", headers={"Accept": accept}, timeout=10)
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "# EOF" not in response.text
    assert "_created" not in response.text
    assert_spec_lines(response.text)


def test_metr_4_openmetrics_is_served_when_asked_for_by_name(sim: Client) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    response = requests.get(sim.base_url + "/metrics", headers={"Accept": accept}, timeout=10)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert "# TYPE vllm:spec_decode_num_drafts counter" in response.text
    assert "vllm:spec_decode_num_drafts_total{" in response.text


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics/engine"])
def test_metr_4_the_page_is_served_directly_without_a_redirect(sim: Client, path: str) -> None:
    response = requests.get(sim.base_url + path, timeout=10, allow_redirects=False)
    assert response.status_code == 200
    assert read_as_python(response.text).found


def test_metr_4_the_two_halves_make_the_page(sim: Client) -> None:
    engine = families(parse_metrics(requests.get(sim.base_url + "/metrics/engine", timeout=10).text), "")
    frontend = families(parse_metrics(requests.get(sim.base_url + "/metrics/frontend", timeout=10).text), "")
    assert engine & frontend == set()
    assert engine | frontend == families(sim.metrics(), "")


# ---- METR-5: lightseekorg/tokenspeed#1443 ----

ROUNDS = [RUN[:3]] * 10 + [[582]] * 5
DRAFTED = [3] * 10 + [0] * 5


@pytest.mark.parametrize("order", ["as_written", "plain_first", "interleaved"])
@pytest.mark.parametrize("stream", [False, True])
def test_metr_5_only_real_draft_tokens_are_counted(sim: Client, order: str, stream: bool) -> None:
    steps = list(zip(ROUNDS, DRAFTED, strict=True))
    if order == "plain_first":
        steps.reverse()
    elif order == "interleaved":
        steps = [*steps[10:], *steps[:10]]
        steps = steps[::2] + steps[1::2]
    script = {"runs": [run for run, _ in steps], "drafted": [drafted for _, drafted in steps]}
    before = sim.metrics()
    body = {"prompt": "x", "max_tokens": 100, "sim": script}
    if stream:
        sim.stream(**body)
    else:
        sim.complete(**body)
    counted = assert_laws(before, sim.metrics(), WIDTH, first_tokens=0)
    assert counted.speculation.drafts == 10
    assert counted.speculation.draft_tokens == 30
    assert counted.speculation.accepted == 20
    assert counted.speculation.per_pos == [10, 10, 0, 0, 0]
    assert counted.plain_rounds == 5
    assert counted.generation == 35


def test_metr_5_rejected_drafts_are_drafts_with_nothing_accepted(sim: Client) -> None:
    before = sim.metrics()
    sim.complete(prompt="x", max_tokens=100, sim={"runs": [[582]] * 4, "drafted": [5, 1, 0, 3]})
    counted = assert_laws(before, sim.metrics(), WIDTH, first_tokens=0)
    assert (counted.speculation.drafts, counted.speculation.draft_tokens, counted.speculation.accepted) == (3, 9, 0)
    assert (counted.plain_rounds, counted.generation) == (1, 4)
