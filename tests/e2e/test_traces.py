"""Real servers: every span of a request ends whatever ends the request, and all of them add up to what /metrics counted."""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import requests

from tests.cases.client import CHAT, COMPLETIONS, Client, together
from tests.cases.client import total as metric
from tests.cases.crowd import OpenRequest
from tests.cases.laws import Increments, engine_scope, increments
from tests.cases.processes import processes_of, wait_until
from tests.e2e.servers import serve
from tests.frontend.otlp_receivers import answer, http_receiver
from tests.traced import ENGINE, FRONTEND, Span, by_trace, named, total
from tests.traced_server import (
    WIDTH,
    Parent,
    TracedServer,
    ask,
    body_of,
    checked,
    counted,
    errors,
    exporting_to,
    traced_server,
)

ONE, TWO, THREE, FOUR, FIVE, SIX, END = 582, 827, 1296, 1876, 2531, 2976, 36588
RUN = [ONE, TWO, THREE, FOUR, FIVE, SIX]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
SLOW = {"runs": [RUN] * 400, "step_ms": 20}
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedServer]:
    """One frontend, every request traced."""
    with traced_server(*SIM, "--trace-max-per-second", "1000000") as server:
        yield server


def assert_sums(spans: Sequence[Span], counted_: Increments) -> None:
    """The spans of all requests of a stretch tell as much as its counters."""
    assert len(named(spans, "spec_draft")) == counted_.speculation.drafts
    assert len(named(spans, "spec_verify")) == counted_.rounds
    assert total(spans, "spec_draft", "num_draft_tokens") == counted_.speculation.draft_tokens
    assert total(spans, "spec_verify", "num_correct_drafts") == counted_.speculation.accepted
    assert total(spans, "decode_forward", "num_rounds") == counted_.rounds
    assert total(spans, "decode_forward", "num_cut_tokens") == counted_.cut
    assert total(spans, "decode_forward", "num_trimmed_tokens") == counted_.trimmed
    retracted = sum(event == "retract" for span in spans for event in span.events)
    assert retracted == counted_.preemptions


# ---- requests that succeed ----

ENDS: dict[str, dict[str, Any]] = {
    "end of text": {"sim": {"runs": [RUN, RUN[:3], [ONE]], "drafted": [5, 5, 0]}},
    "stop token": {"sim": {"runs": [RUN, [ONE, END, TWO]]}, "stop_token_ids": [END]},
    "length": {"sim": {"runs": [RUN, RUN]}, "max_tokens": 8},
    "one token": {"max_tokens": 1},
    "stop string": {"sim": {"runs": [[TWO, END, ONE], *[RUN] * 40], "step_ms": 20}, "stop": [" END"]},
    "stop string at the end": {"sim": {"runs": [RUN, [TWO, END]]}, "stop": [" END", "six"]},
    "two children": {"sim": {"runs": [RUN, RUN[:2]]}, "n": 2},
    "two children and a stop string": {"sim": {"runs": [RUN, RUN], "step_ms": 10}, "n": 2, "stop": [" four"]},
    "no script": {"max_tokens": 30, "ignore_eos": True},
}
SEVERAL = {"two children": 2, "two children and a stop string": 2}


@FORMS
@pytest.mark.parametrize("name", ENDS)
def test_every_end_of_an_answer_leaves_a_whole_trace_that_adds_up(
    traced: TracedServer, name: str, path: str, streamed: bool
) -> None:
    with counted(traced) as found:
        parent = ask(traced, body_of(path, streamed, **ENDS[name]), path)
    spans = traced.trace(parent.trace_id)
    server = checked(spans, parent.span_id)
    assert_sums(spans, found[0])
    assert errors(spans) == {}
    assert server.name == f"POST {path}"
    assert server.attributes["http.response.status_code"] == 200
    generated = found[0].generation - found[0].trimmed
    assert server.attributes["gen_ai.usage.output_tokens"] == generated
    children = SEVERAL.get(name, 1)
    counts = Counter(span.name for span in spans)
    assert counts["prefill_waiting"] == counts["prefill_forward"] == children
    assert counts["decode_forward"] == (0 if name == "one token" else children)
    assert counts["tokenize"] == counts["api_server_dispatch"] == counts["request_process"] == 1
    if name == "stop string":
        assert found[0].trimmed > 0
        assert found[0].rounds > 1, "rounds behind the stop have spans too"


def test_every_prompt_of_a_list_has_its_own_stages_under_one_root(traced: TracedServer) -> None:
    with counted(traced) as found:
        parent = ask(traced, body_of(COMPLETIONS, False, prompt=["x", "y z", "w"], sim={"runs": [RUN]}, n=2))
    spans = traced.trace(parent.trace_id)
    checked(spans, parent.span_id)
    assert_sums(spans, found[0])
    counts = Counter(span.name for span in spans)
    assert (counts["request_process"], counts["prefill_waiting"], counts["decode_forward"]) == (3, 6, 6)
    assert counts["spec_verify"] == found[0].rounds == 6


# ---- requests that do not ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_trace_of_a_client_that_leaves_its_stream_is_whole_to_the_last_round(
    traced: TracedServer, path: str
) -> None:
    parents = [Parent() for _ in range(5)]
    with counted(traced) as found:
        for parent in parents:
            with OpenRequest(traced.client, body_of(path, True, sim=SLOW), path, parent.lines) as one:
                one.wait_for(3)
        traced.client.assert_quiet(within_s=5, steady_s=0)
    everything: list[Span] = []
    for parent in parents:
        spans = traced.trace(parent.trace_id, "decode_forward")
        server = checked(spans, parent.span_id)
        assert errors(spans) == {"server": "client_closed_request", "decode_forward": "abort"}
        assert server.attributes["http.response.status_code"] == 499
        everything += spans
    assert_sums(everything, found[0])
    assert found[0].aborted_rounds > 0, "the last round ran while its client left, and is there"


def test_so_is_that_of_a_client_that_does_not_wait_for_its_answer(traced: TracedServer) -> None:
    parent = Parent()
    running = metric(traced.client.metrics(), "vllm:num_requests_running")
    with OpenRequest(traced.client, body_of(COMPLETIONS, False, sim=SLOW), headers=parent.lines):
        wait_until(lambda: metric(traced.client.metrics(), "vllm:num_requests_running") > running, 5, "it runs")
    spans = traced.trace(parent.trace_id, "request_process")
    traced.client.assert_quiet(within_s=5, steady_s=0)
    spans = traced.trace(parent.trace_id, "prefill_forward")
    assert checked(spans, parent.span_id).attributes["http.response.status_code"] == 499
    assert errors(spans)["server"] == "client_closed_request"
    assert len(errors(spans)) == 2


def test_a_client_that_leaves_before_the_engine_hears_of_it_has_a_server_span(traced: TracedServer) -> None:
    parent = Parent()
    lines = f"{parent.lines}X-Padding: 1\r\n"
    # The length announced is that of two bodies: the second never comes.
    body = json.dumps(body_of(COMPLETIONS, False)).encode()
    with OpenRequest(traced.client, b"", headers=lines + f"Content-Length: {2 * len(body)}\r\n\r\n{body.decode()}"):
        time.sleep(0.1)
    [server] = traced.trace(parent.trace_id)
    assert (server.is_error, server.message) == (True, "client_closed_request")
    assert server.attributes["http.response.status_code"] == 499


@pytest.mark.parametrize("preempt_at", [0, 2])
def test_a_preemption_is_an_event_and_its_rounds_are_there_once(traced: TracedServer, preempt_at: int) -> None:
    with counted(traced) as found:
        parent = ask(traced, body_of(COMPLETIONS, False, sim={"runs": [RUN] * 4, "preempt_at": preempt_at}))
    spans = traced.trace(parent.trace_id)
    checked(spans, parent.span_id)
    assert found[0].preemptions == 1
    assert_sums(spans, found[0])
    assert errors(spans) == {}
    told = [span.attributes["num_correct_drafts"] for span in named(spans, "spec_verify")]
    assert told == [5] * preempt_at + [0] + [5] * (4 - preempt_at), "the last chunk of computing again is a plain round"
    assert len(named(spans, "spec_draft")) == 4


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_request_that_the_engine_cannot_go_on_with_says_so_and_its_neighbour_does_not(
    traced: TracedServer, fail_at: int, streamed: bool
) -> None:
    parent = Parent()
    script = {"runs": [RUN] * 6, "fail_at": fail_at, "step_ms": 5}
    body = body_of(COMPLETIONS, streamed, sim=script)
    url = traced.server.base_url + COMPLETIONS
    with counted(traced) as found:
        failed, fine = together(
            [
                lambda: requests.post(url, json=body, headers=parent.headers, timeout=20),
                lambda: ask(traced, body_of(COMPLETIONS, False, sim={"runs": [RUN] * 8, "step_ms": 5})),
            ]
        )
    assert b'"error"' in failed.content
    spans, others = traced.trace(parent.trace_id), traced.trace(fine.trace_id)
    server = checked(spans, parent.span_id)
    checked(others, fine.span_id)
    assert errors(others) == {}
    assert server.attributes["http.response.status_code"] == failed.status_code
    assert set(errors(spans)) == {"server", "decode_forward"}
    assert errors(spans)["server"] == "server_error"
    assert len(named(spans, "spec_verify")) == fail_at, "a failed step has no verdict and counts no round"
    assert_sums([*spans, *others], found[0])


def test_a_refused_request_is_one_span_in_error(traced: TracedServer) -> None:
    parent = Parent()
    response = traced.client.post(COMPLETIONS, {"prompt": "x", "max_tokens": -1}, headers=parent.headers)
    assert response.status_code == 400
    [server] = traced.trace(parent.trace_id)
    assert errors([server]) == {"server": "invalid_request_error: max_tokens"}
    assert server.attributes["http.response.status_code"] == 400


# ---- engines and servers that end ----


def test_an_engine_that_dies_leaves_error_spans_and_returns_as_another_instance() -> None:
    with traced_server(*SIM, "--max-num-seqs", "1") as server:
        first = ask(server, body_of(COMPLETIONS, False, sim={"runs": [RUN]}))
        running, waiting, leaving = Parent(), Parent(), Parent()
        with (
            OpenRequest(server.client, body_of(COMPLETIONS, True, sim=SLOW), headers=running.lines) as one,
            OpenRequest(server.client, body_of(COMPLETIONS, True, sim=SLOW), headers=waiting.lines) as other,
        ):
            one.wait_for(3)
            with OpenRequest(server.client, body_of(COMPLETIONS, True, sim=SLOW), headers=leaving.lines):
                wait_until(lambda: num_waiting(server) == 2, 5, "both wait")
            left = server.trace(leaving.trace_id, "prefill_waiting")
            assert errors(left) == {"server": "client_closed_request", "prefill_waiting": "abort"}
            checked(left, leaving.span_id)
            os.kill(processes_of(server.client).engine, signal.SIGKILL)
            one.read_to_end(within_s=10)
            other.read_to_end(within_s=10)
        for parent, stage in ((running, "decode_forward"), (waiting, "prefill_waiting")):
            spans = server.trace(parent.trace_id)
            checked(spans, parent.span_id)
            failed = errors(spans)
            assert set(failed) == {"server", stage}
            assert failed[stage].startswith("engine lost: ")
            assert failed["server"] == "overloaded_error"
        wait_until(
            lambda: requests.get(server.client.base_url + "/ready", timeout=5).status_code == 200, 20, "a new engine"
        )
        again = ask(server, body_of(COMPLETIONS, False, sim={"runs": [RUN]}))
        instances = [engine_instances(server.trace(parent.trace_id)) for parent in (first, running, again)]
        assert all(len(found) == 1 for found in instances)
        assert instances[0] == instances[1] != instances[2]


def num_waiting(server: TracedServer) -> float:
    return metric(server.client.metrics(), "vllm:num_requests_waiting")


def engine_instances(spans: Sequence[Span]) -> set[str]:
    return {span.instance for span in spans if span.service == ENGINE}


def stop_amid_streams(server: TracedServer) -> tuple[list[Parent], float]:
    """SIGTERM while streams run that outlast the drain; their callers and the seconds until the last process is gone."""
    parents = [Parent() for _ in range(4)]
    opened = [OpenRequest(server.client, body_of(COMPLETIONS, True, sim=SLOW), headers=one.lines) for one in parents]
    for one in opened:
        one.wait_for(2)
    started = time.monotonic()
    assert server.server.stop() == 0
    seconds = time.monotonic() - started
    for one in opened:
        assert one.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        one.leave()
    assert "killing it" not in server.server.log()
    return parents, seconds


DRAIN_S = 0.5


def test_a_server_that_is_stopped_amid_streams_flushes_every_span() -> None:
    # Nothing is sent before the end: the batch is never full and never late.
    with traced_server(*SIM, "--drain-timeout-s", str(DRAIN_S), OTEL_BSP_SCHEDULE_DELAY="600000") as server:
        finished = ask(server, body_of(COMPLETIONS, False, sim={"runs": [RUN]}))
        assert server.spans() == []
        parents, seconds = stop_amid_streams(server)
        assert seconds < DRAIN_S + 5
        checked(server.arrived(finished.trace_id), finished.span_id)
        for parent in parents:
            spans = server.arrived(parent.trace_id)
            checked(spans, parent.span_id)
            assert errors(spans) == {
                "server": "overloaded_error",
                "decode_forward": "engine lost: this frontend is shutting down",
            }
        assert len(by_trace(server.spans())) == 5


def test_a_server_ends_in_time_when_its_collector_hangs() -> None:
    with (
        http_receiver(answer(hangs=True)) as receiver,
        serve(*SIM, "--drain-timeout-s", str(DRAIN_S), **exporting_to(receiver.address)) as server,
    ):
        _, seconds = stop_amid_streams(TracedServer(server, receiver))
        assert receiver.attempts > 0
        assert 4 < seconds < DRAIN_S + 5 + 3, "the flush was tried for five seconds and no longer"


# ---- two frontends ----


def test_behind_two_frontends_every_trace_is_whole_and_all_add_up() -> None:
    rng = random.Random(7)
    with traced_server(*SIM, "--frontends", "2", "--trace-max-per-second", "1000000") as server:
        before = engine_scope(server.client.metrics())
        parents = together([lambda body=body: one_of_a_crowd(server, body) for body in crowd(rng)], width=8)
        server.client.assert_quiet(within_s=5, steady_s=0)
        counted_ = increments(before, engine_scope(server.client.metrics()), WIDTH)
        assert server.server.stop() == 0
    traces = by_trace(server.spans())
    assert set(traces) == {parent.trace_id for parent in parents}
    assert len(parents) == 40
    servers = [checked(traces[parent.trace_id], parent.span_id) for parent in parents]
    assert len({span.instance for span in servers}) == 2, "both frontends have served"
    for parent, span in zip(parents, servers):
        frontends = {one.instance for one in traces[parent.trace_id] if one.service == FRONTEND}
        assert frontends == {span.instance}
    assert len(engine_instances(server.spans())) == 1
    assert_sums(server.spans(), counted_)
    assert counted_.trimmed > 0
    assert counted_.cut > 0
    assert counted_.aborted_rounds > 0
    assert counted_.preemptions > 0
    left = Counter(span.attributes["http.response.status_code"] for span in servers)
    assert left == {200: 34, 499: 6}


def crowd(rng: random.Random) -> list[dict[str, Any]]:
    """40 requests; a body with "leaves" is abandoned by its client after so many chunks."""
    bodies: list[dict[str, Any]] = []
    for number in range(34):
        runs = [RUN[: rng.randint(1, 6)] for _ in range(rng.randint(1, 12))]
        drafted = [rng.randint(len(run) - 1, WIDTH) for run in runs]
        script: dict[str, Any] = {"runs": runs, "drafted": drafted, "step_ms": 3}
        if number % 5 == 0:
            script["preempt_at"] = rng.randrange(len(runs))
        extra = [{}, {"stop": [" four"]}, {"max_tokens": rng.randint(1, 12)}, {"n": 2}, {"prompt": ["x", "y"]}][
            number % 5
        ]
        bodies.append(body_of(COMPLETIONS, rng.random() < 0.5, sim=script) | extra)
    bodies += [body_of(COMPLETIONS, True, sim=SLOW) | {"leaves": 1 + number} for number in range(6)]
    rng.shuffle(bodies)
    return bodies


def one_of_a_crowd(server: TracedServer, body: dict[str, Any]) -> Parent:
    if "leaves" not in body:
        return ask(server, body)
    parent, fields = Parent(), {name: value for name, value in body.items() if name != "leaves"}
    with OpenRequest(Client(server.client.base_url), fields, headers=parent.lines) as one:
        one.wait_for(body["leaves"])
    return parent
