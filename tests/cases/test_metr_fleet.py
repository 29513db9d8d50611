"""METR-1 and METR-2: the same true numbers in every launch mode, through every frontend, at the last byte.

METR-4 for the launch modes that have no shared server: what they show before their first request.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from deploy.keys import make_keys
from tests.cases.bench_reader import scrape
from tests.cases.client import CHAT, COMPLETIONS, LIST, Client, parse_metrics, together, total
from tests.cases.laws import assert_laws, assert_well_formed, engine_scope, labelled
from tests.cases.processes import free_port
from tests.e2e.servers import _attached_url as attached_url
from tests.e2e.servers import fleet, running, serve
from tests.tiny import write_tiny_model

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
SPEC = ("--speculator", "ngram", "--num-draft-tokens", "5", "--lookup-min", "1", "--lookup-max", "4")
ALL_FORMS = [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
PER_POS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Launched:
    """A launch mode at work. `first_pages`: /metrics as it was before any request, from several connections."""

    urls: Sequence[str]
    first_pages: Sequence[str]


def launched(urls: Sequence[str]) -> Launched:
    return Launched(urls, [scrape(url) for url in urls for _ in range(8 // len(urls))])


# ---- METR-1: pegainfer-project/pegainfer#896 ----


def assert_counters_are_right_at_the_last_byte(
    urls: Sequence[str], forms: Sequence[tuple[str, bool]] = ALL_FORMS, **extra: Any
) -> None:
    """Every form of request, each through another frontend than the scrape behind it, where there are several."""
    for turn, (path, streamed) in enumerate(forms):
        asked, scraped = urls[turn % len(urls)], urls[(turn + 1) % len(urls)]
        before = engine_scope(parse_metrics(scrape(scraped)))
        body = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, **extra}
        answer = Client(asked).ask(path, streamed, LIST, **body)
        after = engine_scope(parse_metrics(scrape(scraped)))
        counted = assert_laws(before, after, WIDTH, first_tokens=1)
        assert answer.usage is not None
        assert counted.generation == answer.usage["completion_tokens"] == 48
        assert counted.prompt == answer.usage["prompt_tokens"]
        assert counted.speculation.drafts > 0
        assert counted.speculation.accepted > 0
        assert counted.speculation.per_pos[0] > 0


@pytest.mark.parametrize("name", ["spec", "sim", "sim_4f"])
def test_metr_1_counters_are_right_when_the_last_byte_arrives(setup: Callable[[str], Client], name: str) -> None:
    assert_counters_are_right_at_the_last_byte([setup(name).base_url])


@pytest.fixture(scope="module")
def real_4f(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
    with serve("--model", str(model), "--dtype", "fp32", *SPEC, "--frontends", "4") as server:
        yield launched([server.base_url])


@pytest.fixture(scope="module")
def by_hand() -> Iterator[Launched]:
    """One engine and four frontends, a port each."""
    with fleet(4, *SIM) as urls:
        yield launched(urls)


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Launched]:
    """As on two machines: encrypted, an engine on tcp and a frontend."""
    with ExitStack() as stack:
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drafthouse-test-"))) / "keys"
        make_keys(keys)
        address = f"tcp://127.0.0.1:{free_port()}"
        theirs = ("--curve-key-file", f"{keys}/engine.key", "--curve-client-keys", f"{keys}/frontend.pub")
        ours = ("--curve-key-file", f"{keys}/frontend.key", "--curve-server-key-file", f"{keys}/engine.pub")
        stack.enter_context(running("engine", "--listen", address, *SIM, *theirs))
        log = stack.enter_context(running("frontend", "--engine", address, "--port", "0", *ours))
        yield launched([attached_url(log)])


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Launched]:
    with serve(*SIM, "--engines", "2", "--frontends", "2") as server:
        yield launched([server.base_url])


def test_metr_1_counters_are_right_with_a_real_engine_behind_four_frontends(real_4f: Launched) -> None:
    # A random model copies nothing by itself: the bias makes it repeat one token, which the lookup finds.
    forms = [(COMPLETIONS, True), (COMPLETIONS, False)] * 3  # new connections reach different frontends
    assert_counters_are_right_at_the_last_byte(real_4f.urls, forms, logit_bias={"300": 100})


@pytest.mark.parametrize("mode", ["by_hand", "over_tcp", "two_engines"])
def test_metr_1_counters_are_right_in_every_other_launch_mode(request: pytest.FixtureRequest, mode: str) -> None:
    assert_counters_are_right_at_the_last_byte(request.getfixturevalue(mode).urls)


# ---- METR-4: ggml-org/llama.cpp#26389 ----


@pytest.mark.parametrize(("mode", "engines"), [("real_4f", 1), ("by_hand", 1), ("over_tcp", 1), ("two_engines", 2)])
def test_metr_4_the_spec_families_are_there_at_zero_through_every_frontend(
    request: pytest.FixtureRequest, mode: str, engines: int
) -> None:
    for page in request.getfixturevalue(mode).first_pages:
        assert_well_formed(page)
        spec = {series: value for series, value in parse_metrics(page).items() if series.startswith("vllm:spec_decode")}
        assert len(spec) == engines * (3 + WIDTH), spec
        assert set(spec.values()) == {0}
        assert {series.split('position="')[1].split('"')[0] for series in spec if series.startswith(PER_POS)} == set(
            "01234"
        )


# ---- METR-2: vllm-project/vllm#18053 ----

BATCHED = (  # engine-scope families that tell how the work was batched or timed, and when the process began
    "vllm:iteration_tokens_total",
    "drafthouse:step_seconds",
    "drafthouse:observe_seconds",
    "drafthouse:draft_seconds",
    "drafthouse:verify_seconds",
    "drafthouse:accept_seconds",
    "drafthouse:steps_total",
    "drafthouse:target_forwards_total",
    "drafthouse:engine_step",
    "drafthouse:engine_epoch_start_time_seconds",
    "drafthouse:frontends_attached",
    "vllm:prefix_cache_hits_total",  # of two prompts with one beginning, whichever comes first computes it
    "vllm:prompt_tokens_cached_total",
)


def engine_page(base_url: str) -> dict[str, float]:
    response = requests.get(base_url + "/metrics/engine", timeout=10)
    assert response.status_code == 200
    return parse_metrics(response.text)


def forty_requests() -> list[dict[str, Any]]:
    """Fixed answers, so that the totals are fixed too."""
    bodies: list[dict[str, Any]] = []
    for index in range(40):
        runs = [RUN[: 1 + (index + step) % 6] for step in range(1 + index % 4)]
        bodies.append({"prompt": [582] * (1 + index), "max_tokens": 100, "sim": {"runs": runs}})
    return bodies


def determined(samples: dict[str, float]) -> dict[str, float]:
    """Totals that follow from the requests alone."""
    return {series: value for series, value in samples.items() if not series.startswith(BATCHED)}


def test_metr_2_every_scrape_shows_the_same_whole_engine_for_any_number_of_frontends() -> None:
    totals, names = [], []
    for frontends in (1, 2, 4):
        with serve(*SIM, "--frontends", str(frontends)) as server:
            bodies = forty_requests()
            together([lambda body=body: Client(server.base_url).complete(**body) for body in bodies], width=8)
            pages = [engine_page(server.base_url) for _ in range(20)]
            assert all(page == pages[0] for page in pages), "all of it: nothing of an idle engine moves"
            whole = [parse_metrics(scrape(server.base_url)) for _ in range(20)]
            halves = [{series: page[series] for series in pages[0]} for page in whole]
            assert all(half == pages[0] for half in halves), "/metrics says what its engine half says"
            assert not [series for page in whole for series in page if "pid=" in series]
            assert total(pages[0], "drafthouse:frontends_attached") == frontends
            totals.append(determined(pages[0]))
            names.append(set(pages[0]))
    assert totals[0] == totals[1] == totals[2]
    assert names[0] == names[1] == names[2], "no series per process, none for a number of frontends"
    assert not [series for series in names[0] if "pid=" in series]
    assert_totals_of_forty(totals[0])


def assert_totals_of_forty(samples: dict[str, float]) -> None:
    runs = [run for body in forty_requests() for run in body["sim"]["runs"]]
    drafts = [run for run in runs if len(run) > 1]
    spec = "vllm:spec_decode_num"
    assert total(samples, "vllm:generation_tokens_total") == sum(map(len, runs))
    assert total(samples, "vllm:prompt_tokens_total") == sum(range(1, 41))
    assert total(samples, f"{spec}_drafts_total") == len(drafts)
    accepted = sum(len(run) - 1 for run in drafts)
    assert total(samples, f"{spec}_draft_tokens_total") == total(samples, f"{spec}_accepted_tokens_total") == accepted
    for position in range(WIDTH):
        reached = sum(len(run) - 1 > position for run in drafts)
        assert labelled(samples, PER_POS, position=str(position)) == reached
    assert labelled(samples, "drafthouse:verify_rounds_total", kind="plain") == len(runs) - len(drafts)


def test_metr_2_totals_never_fall_between_scrapes_of_different_frontends(by_hand: Launched) -> None:
    over, falls = threading.Event(), list[str]()

    def watch() -> None:
        last: dict[str, float] = {}
        while not over.is_set():
            for url in by_hand.urls:
                now = engine_page(url)
                falls.extend(s for s, v in now.items() if _is_total(s) and v < last.get(s, 0.0))
                last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    clients = [Client(url) for url in by_hand.urls]
    bodies = forty_requests() * 3
    together([lambda c=clients[i % 4], body=body: c.stream(**body) for i, body in enumerate(bodies)], width=8)
    over.set()
    watcher.join()
    assert falls == []


def _is_total(series: str) -> bool:
    return series.split("{")[0].endswith(("_total", "_bucket", "_count", "_sum"))
