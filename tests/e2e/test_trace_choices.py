"""Real servers: who decides what is traced and how deep, what answers and logs say of it, and what no span ever holds."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.cases.client import CHAT, COMPLETIONS
from tests.cases.laws import labelled
from tests.cases.processes import wait_until
from tests.traced import ENGINE, named
from tests.traced_server import GRPC, Parent, TracedServer, ask, body_of, checked, counted, errors, traced_server

RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
KEY = "the-admin-of-this-test-0123456789"
FORMS = pytest.mark.parametrize(
    ("path", "streamed"), [(path, streamed) for path in (COMPLETIONS, CHAT) for streamed in (False, True)]
)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServer]:
    """One frontend, every request traced, log lines as JSON."""
    key_file = tmp_path_factory.mktemp("admin") / "keys"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    options = ("--admin-key-file", str(key_file), "--log-format", "json", "--access-log", "true")
    with traced_server(*SIM, *options, "--trace-max-per-second", "1000000") as server:
        yield server


# ---- how deep, and who decides ----

STAGES = {"tokenize", "prefill_waiting", "prefill_forward", "decode_forward"}
ROUNDS = {"api_server_dispatch", "request_process", "spec_draft", "spec_verify"}
STEPS = {"chunked_prefill", "decode_loop"}
LEVELS = {1: STAGES, 2: STAGES | ROUNDS, 3: STAGES | ROUNDS | STEPS}


@pytest.mark.parametrize("level", LEVELS)
def test_an_admin_chooses_the_level_of_a_request(traced: TracedServer, level: int) -> None:
    admin = {"X-Trace-Level": str(level), "Authorization": f"Bearer {KEY}"}
    body = body_of(COMPLETIONS, False, sim={"runs": [RUN] * 3, "preempt_at": 1})
    with counted(traced) as found:
        parent = ask(traced, body, **admin)
    spans = traced.trace(parent.trace_id)
    server = checked(spans, parent.span_id, level)
    assert {span.name for span in spans if span is not server} == LEVELS[level]
    assert len(named(spans, "decode_loop")) == (found[0].rounds if level == 3 else 0)
    events = Counter(event for span in spans for event in span.events)
    assert events == ({"retract": 1, "schedule": 2} if level == 3 else {"retract": 1})


def test_level_0_leaves_nothing(traced: TracedServer) -> None:
    before, parent = traced.client.metrics(), Parent()
    headers = {**parent.headers, "X-Trace-Level": "0", "Authorization": f"bearer {KEY}"}
    response = traced.client.post(COMPLETIONS, body_of(COMPLETIONS, False, sim={"runs": [RUN]}), headers=headers)
    assert response.status_code == 200
    assert "X-Trace-Id" not in response.headers
    after = traced.client.metrics()
    name = "drafthouse:requests_traced_total"
    assert labelled(after, name, decision="unsampled") == labelled(before, name, decision="unsampled") + 1
    assert not [span for span in traced.settled() if span.trace_id == parent.trace_id]


@pytest.mark.parametrize("level", ["0", "1", "2", "3"])
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong-key-of-32-characters-0123", KEY, f"Basic {KEY}", "Bearer"]
)
def test_nobody_else_chooses_a_level(traced: TracedServer, level: str, authorization: str | None) -> None:
    headers = {"X-Trace-Level": level} | ({} if authorization is None else {"Authorization": authorization})
    response = traced.client.post(COMPLETIONS, body_of(COMPLETIONS, False, sim={"runs": [RUN]}), headers=headers)
    error = traced.client.assert_error(response, "X-Trace-Level", status=403)
    assert "--admin-key-file" in error["message"]
    assert KEY not in response.text
    [refused] = traced.trace(response.headers["X-Trace-Id"])
    assert errors([refused]) == {"server": "forbidden: X-Trace-Level"}


@pytest.mark.parametrize("level", ["4", "-1", "02", "two", "", "1.0", "9" * 3000])
def test_a_level_that_does_not_exist_is_refused_by_name(traced: TracedServer, level: str) -> None:
    headers = {"X-Trace-Level": level, "Authorization": f"Bearer {KEY}"}
    response = traced.client.post(COMPLETIONS, body_of(COMPLETIONS, False), headers=headers)
    error = traced.client.assert_error(response, "X-Trace-Level must be 0, 1, 2 or 3", status=400)
    assert len(error["message"]) < 300


# ---- the id in answers and logs ----


@FORMS
def test_the_trace_id_is_in_the_answer_and_in_its_log_line(traced: TracedServer, path: str, streamed: bool) -> None:
    body = body_of(path, streamed, sim={"runs": [RUN]})
    response = requests.post(traced.server.base_url + path, json=body, timeout=10)
    trace_id = response.headers["X-Trace-Id"]
    checked(traced.trace(trace_id), parent_id="")

    def lines() -> list[dict[str, str]]:
        return [line for line in json_lines(traced) if line.get("trace_id") == trace_id]

    wait_until(lambda: bool(lines()), 5, "a log line with the trace id")
    assert [line["logger"] for line in lines()] == ["frontend.access"]
    assert f"route={path} status=200" in lines()[0]["message"]


def json_lines(server: TracedServer) -> list[dict[str, str]]:
    """What the processes logged; the supervisor's own words are no JSON."""
    return [json.loads(line) for line in server.server.log().splitlines() if line.startswith("{")]


def test_an_untraced_request_has_no_trace_id_in_its_answer_and_log(traced: TracedServer) -> None:
    def num_lines() -> int:
        return sum(line["logger"] == "frontend.access" and "trace_id" not in line for line in json_lines(traced))

    body, before = body_of(COMPLETIONS, False, sim={"runs": [RUN]}), num_lines()
    response = requests.post(traced.server.base_url + COMPLETIONS, json=body, headers=Parent("00").headers, timeout=10)
    assert response.status_code == 200
    assert "X-Trace-Id" not in response.headers
    wait_until(lambda: num_lines() > before, 5, "its log line")


MARKER = "quixotic-marker"


def test_nothing_that_a_client_wrote_is_in_a_span_or_a_log_line(traced: TracedServer) -> None:
    told: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": f"{MARKER} and more", "stop": [MARKER], "user": MARKER, "max_tokens": 8}),
        (CHAT, {"messages": [{"role": "system", "content": MARKER}, {"role": "user", "content": MARKER, "name": MARKER}]}),
        (COMPLETIONS, {"prompt": "x", "model": MARKER}),
        (COMPLETIONS, {"prompt": "x", "request_id": MARKER, "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "x", "temperature": MARKER}),
        (COMPLETIONS, {"prompt": "x", MARKER: 1, "metadata": {MARKER: MARKER}, "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {MARKER: 1}}),
        (CHAT, {"messages": [{"role": MARKER, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": MARKER, MARKER: 1}]}]}),
        (COMPLETIONS, {"prompt": f"{MARKER} " * 9000}),
        (COMPLETIONS, {"prompt": MARKER, "echo": True, "max_tokens": 2, "logprobs": 1}),
        ("/tokenize", {"prompt": MARKER}),
        (COMPLETIONS, {"prompt": MARKER, "max_tokens": 50, "sim": {"runs": [RUN] * 5, "fail_at": 2}}),
    ]  # fmt: skip
    headers = {
        "Authorization": f"Bearer {MARKER}",
        "User-Agent": MARKER,
        "X-Api-Key": MARKER,
        "Cookie": f"a={MARKER}",
        "Referer": f"http://{MARKER}/",
        "baggage": f"a={MARKER}",
        "X-Trace-Level": MARKER,
        "X-Request-Id": MARKER,
    }
    seen = set()
    for path, body in told:
        for stream in (False, True):
            for leaving_out in ("X-Trace-Level", None):
                sent = {name: value for name, value in headers.items() if name != leaving_out} | Parent().headers
                asked = body if path == "/tokenize" else {**body, "stream": stream}
                response = traced.client.post(f"{path}?key={MARKER}", asked, headers=sent)
                seen.add(response.status_code)
    broken = traced.client.post_raw(COMPLETIONS, MARKER.encode(), headers={**headers, **Parent().headers})
    twice = f'{{"prompt":"x","{MARKER}":1,"{MARKER}":2}}'.encode()
    assert traced.client.post_raw(COMPLETIONS, twice, headers=Parent().headers).status_code == 400
    parent = ask(traced, body_of(COMPLETIONS, True, sim={"runs": [RUN]}, prompt=MARKER))
    traced.trace(parent.trace_id)
    assert {200, 400, 403, 404, 500} <= {*seen, broken.status_code}
    assert len(traced.settled()) > 100
    assert MARKER.encode() not in traced.exported()
    assert KEY.encode() not in traced.exported()
    assert MARKER not in traced.server.log()
    assert KEY not in traced.server.log()


# ---- limits, names, gRPC ----


def test_the_rate_limit_is_counted_and_a_new_name_is_the_frontends_alone() -> None:
    renamed = {
        "OTEL_SERVICE_NAME": "shop-front",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test,service.name=x",
    }
    with traced_server(*SIM, "--trace-max-per-second", "0.001", protocol=GRPC, **renamed) as server:
        body = body_of(COMPLETIONS, False, sim={"runs": [RUN]})
        responses = [server.client.post(COMPLETIONS, body, headers=Parent().headers) for _ in range(10)]
        assert [response.status_code for response in responses] == [200] * 10
        told = [response.headers.get("X-Trace-Id") for response in responses]
        assert told[0] is not None
        assert told[1:] == [None] * 9
        unsampled = server.client.post(COMPLETIONS, body, headers=Parent("00").headers)
        assert "X-Trace-Id" not in unsampled.headers
        samples = server.client.metrics()
        decisions = {
            decision: labelled(samples, "drafthouse:requests_traced_total", decision=decision)
            for decision in ("sampled", "limited", "unsampled")
        }
        assert decisions == {"sampled": 1, "limited": 9, "unsampled": 1}
        spans = server.trace(told[0])
        assert {span.trace_id for span in server.spans()} == {told[0]}
        services = {span.service for span in spans if span.name not in ("tokenize", "api_server_dispatch")}
        assert services == {"shop-front", ENGINE}
        assert {span.service for span in named(spans, "tokenize")} == {"shop-front"}
        assert {span.service for span in named(spans, "spec_verify")} == {ENGINE}
        environments = [
            one.value.string_value
            for request in server.receiver.requests
            for group in request.resource_spans
            for one in group.resource.attributes
            if one.key == "deployment.environment"
        ]
        assert len(environments) == sum(len(request.resource_spans) for request in server.receiver.requests)
        assert set(environments) == {"test"}
