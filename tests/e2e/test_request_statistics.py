"""Real servers: what requests report of their own speculation adds up to what /metrics counted, whatever ends them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, LIST, PAT, Client, Streamed, together
from tests.cases.laws import Increments, engine_scope, increments
from tests.e2e.servers import serve
from tests.stand_in import write_stand_in

WIDTH = 5
ONE, TWO, THREE, FOUR, FIVE, SIX, END = 582, 827, 1296, 1876, 2531, 2976, 36588
RUN = [ONE, TWO, THREE, FOUR, FIVE, SIX]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true", "--frontends", "2")
NGRAM = ("--dtype", "fp32", "--check-laws", "true", "--speculator", "ngram", "--num-draft-tokens", "5",
         "--lookup-min", "1", "--lookup-max", "4")  # fmt: skip
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)


@pytest.fixture(scope="module")
def sim() -> Iterator[Client]:
    """Two frontends that report details unless a request says otherwise."""
    with serve(*SIM, "--per-request-spec-decode-metrics", "detailed") as server:
        yield Client(server.base_url)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A real engine with a lookup drafter; nothing is reported unless a request asks."""
    stand_in: Path = write_stand_in(tmp_path_factory.mktemp("model"))
    with serve(*NGRAM, "--model", str(stand_in)) as server:
        yield Client(server.base_url)


def metrics_of(answer: Streamed) -> dict[str, Any] | None:
    """The `metrics` object of an answer: on its last chunk, and on no other."""
    assert not any("metrics" in chunk for chunk in answer.chunks[:-1])
    return answer.chunks[-1].get("metrics")


def report_of(answer: Streamed) -> dict[str, Any]:
    metrics = metrics_of(answer)
    assert metrics is not None
    assert isinstance(metrics["speculative_decoding"], dict), metrics
    return metrics["speculative_decoding"]


@contextmanager
def reconciled(client: Client) -> Iterator[tuple[list[dict[str, Any]], list[Increments]]]:
    """Reports put into the first list inside the block must add up to what was counted, which comes into the second."""
    reports: list[dict[str, Any]] = []
    counted: list[Increments] = []
    before = engine_scope(client.metrics())
    yield reports, counted
    counted.append(increments(before, engine_scope(client.metrics()), WIDTH))
    total = counted[0].speculation
    assert sum(report["num_spec_steps"] for report in reports) == total.drafts == counted[0].draft_rounds
    assert sum(report["num_draft_tokens"] for report in reports) == total.draft_tokens
    assert sum(report["num_accepted_draft_tokens"] for report in reports) == total.accepted
    for position in range(WIDTH):
        tails = [sum(report["acceptance_histogram"][position + 1 :]) for report in reports]
        assert sum(tails) == total.per_pos[position], position


# ---- a scripted engine ----


@FORMS
def test_the_report_is_the_script(sim: Client, path: str, streamed: bool) -> None:
    script = {"runs": [RUN[:4], [ONE], [TWO], RUN, RUN[:2]], "drafted": [5, 0, 3, 5, 1]}
    with reconciled(sim) as (reports, counted):
        answer = sim.ask(path, streamed, sim=script, max_tokens=64)
        reports.append(report_of(answer))
    assert reports[0] == {
        "mean_acceptance_length": 1 + 9 / 4,
        "draft_acceptance_rate": 9 / 14,
        "acceptance_histogram": [1, 1, 0, 1, 0, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 9,
        "num_draft_tokens": 14,
        "num_spec_tokens": 5,
        "per_step_accepted": [3, 0, 5, 1],
        "per_step_drafted": [5, 3, 5, 1],
    }
    assert counted[0].plain_rounds == 1
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 14


@FORMS
def test_rounds_that_ran_behind_a_stop_string_are_reported_even_the_aborted_one(
    sim: Client, path: str, streamed: bool
) -> None:
    # The match is in the first round. The next ones take 30 ms each: our Close arrives while one of them runs.
    script = {"runs": [[TWO, END, ONE], *[RUN] * 40], "step_ms": 30}
    with reconciled(sim) as (reports, counted):
        answer = sim.ask(path, streamed, sim=script, stop=[" END"], max_tokens=512)
        reports.append(report_of(answer))
    assert answer.finish[0] == "stop"
    assert answer.text[0] == " two"
    assert counted[0].aborted_rounds == 1
    num_behind = reports[0]["num_spec_steps"] - 1
    assert num_behind >= 1
    assert reports[0]["per_step_accepted"] == [2] + [5] * num_behind


@FORMS
def test_what_max_tokens_cuts_was_accepted_and_is_reported(sim: Client, path: str, streamed: bool) -> None:
    with reconciled(sim) as (reports, counted):
        answer = sim.ask(path, streamed, sim={"runs": [RUN, RUN]}, max_tokens=8)
        reports.append(report_of(answer))
    assert answer.finish[0] == "length"
    assert reports[0]["per_step_accepted"] == [5, 5]
    assert counted[0].cut == 4


def test_a_round_that_a_preemption_dropped_is_reported_once(sim: Client) -> None:
    with reconciled(sim) as (reports, counted):
        script = {"runs": [RUN[:2], RUN[:3], RUN[:4]], "preempt_at": 1}
        reports.append(report_of(sim.ask(COMPLETIONS, False, sim=script, max_tokens=64)))
    assert counted[0].preemptions == 1
    assert reports[0]["per_step_accepted"] == [1, 2, 3]


@FORMS
def test_several_sequences_are_counted_and_not_reported(sim: Client, path: str, streamed: bool) -> None:
    before = engine_scope(sim.metrics())
    two = sim.ask(path, streamed, sim={"runs": [RUN]}, n=2)
    assert metrics_of(two) == {"speculative_decoding": None}
    if path == COMPLETIONS:
        listed = sim.ask(path, streamed, prompt=["x", "y"], sim={"runs": [RUN]})
        assert metrics_of(listed) == {"speculative_decoding": None}
    counted = increments(before, engine_scope(sim.metrics()), WIDTH)
    assert counted.speculation.drafts == (4 if path == COMPLETIONS else 2)


def test_a_crowd_behind_two_frontends_adds_up(sim: Client) -> None:
    rng = random.Random(20)
    bodies: list[dict[str, Any]] = []
    for _ in range(48):
        runs = [RUN[: rng.randint(1, 6)] for _ in range(rng.randint(1, 12))]
        drafted = [rng.randint(len(run) - 1, WIDTH) for run in runs]
        body: dict[str, Any] = {"sim": {"runs": runs, "drafted": drafted, "step_ms": 2}, "max_tokens": 512}
        body |= rng.choice([{}, {"stop": [" four"]}, {"stop": [" five six"]}, {"max_tokens": rng.randint(1, 12)}])
        bodies.append(body | {"path": rng.choice([COMPLETIONS, CHAT]), "streamed": rng.random() < 0.5})
    with reconciled(sim) as (reports, counted):
        reports += [
            report_of(answer)
            for answer in together([lambda body=body: Client(sim.base_url).ask(**body) for body in bodies], width=12)
        ]
    assert len(reports) == 48
    assert counted[0].trimmed > 0
    assert counted[0].cut > 0


def test_a_request_may_want_less_than_the_server_offers(sim: Client) -> None:
    body = {"prompt": "x", "sim": {"runs": [RUN]}}
    assert "per_step_accepted" in sim.complete(**body)["metrics"]["speculative_decoding"]
    summary = sim.complete(**body, spec_decode_metrics="summary")["metrics"]["speculative_decoding"]
    assert "per_step_accepted" not in summary
    assert "metrics" not in sim.complete(**body, spec_decode_metrics="none")
    unseen = sim.stream(**body)  # without usage there is no chunk for them
    assert not any("metrics" in chunk for chunk in unseen.chunks)


# ---- a real engine ----


@FORMS
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 0, "max_tokens": 120, "stop": [" ha", " six", " said"]},
        {"temperature": 1, "seed": 5, "max_tokens": 40},
    ],
    ids=["greedy", "stop", "sampled"],
)
def test_a_lookup_drafter_reports_what_the_ledger_counted(
    model: Client, path: str, streamed: bool, fields: dict[str, Any]
) -> None:
    finishes = set()
    with reconciled(model) as (reports, counted):
        for prompt in (LIST, PAT, "The sky is"):
            answer = model.ask(path, streamed, prompt=prompt, spec_decode_metrics="detailed", **fields)
            report = report_of(answer)
            assert sum(report["per_step_drafted"]) == report["num_draft_tokens"]
            assert sum(report["per_step_accepted"]) == report["num_accepted_draft_tokens"]
            assert report["num_spec_tokens"] == WIDTH
            reports.append(report)
            finishes.add(answer.finish[0])
    assert counted[0].speculation.drafts > 0
    if fields["temperature"] == 0:
        assert counted[0].speculation.accepted > 0
    if "stop" in fields:
        assert "stop" in finishes


def test_a_server_that_was_not_told_to_reports_only_when_asked(model: Client) -> None:
    body = {"prompt": PAT, "temperature": 0, "max_tokens": 8}
    assert "metrics" not in model.complete(**body)
    with reconciled(model) as (reports, counted):
        asked = model.complete(**body, spec_decode_metrics="summary")
        reports.append(asked["metrics"]["speculative_decoding"])
    assert counted[0].generation == 8
    response = model.post(COMPLETIONS, {**body, "stream": True, "spec_decode_metrics": "summary"})
    error = model.assert_error(response)
    assert error["param"] == "spec_decode_metrics"
    assert "include_usage" in error["message"]
