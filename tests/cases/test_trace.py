"""TRACE: spans of every round, headers of any form, the sampled flag, refused requests. Speed: test_trace_load.py."""

import json
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, IS_LONG, PAT, Client, strict_json, together, total
from tests.cases.laws import engine_scope, increments, labelled
from tests.traced import Span, named
from tests.traced import total as total_of
from tests.traced_server import Parent, TracedServer, checked, roots, traced_server

WIDTH = 5
RUN = [582, 827, 1296, 1876, 2531, 2976]
SIM = ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true")
SPEC = ("--dtype", "fp32", "--check-laws", "true", "--speculator", "ngram", "--num-draft-tokens", "5",
        "--lookup-min", "1", "--lookup-max", "4")  # fmt: skip
UNLIMITED = ("--trace-max-per-second", "1000000")
STAGES = ("tokenize", "api_server_dispatch", "request_process", "prefill_waiting", "prefill_forward", "decode_forward")


@pytest.fixture(scope="module")
def traced_sim() -> Iterator[TracedServer]:
    with traced_server(*SIM, *UNLIMITED) as server:
        yield server


def full_tree(num_drafts: int, num_rounds: int) -> Counter[str]:
    """Names of the spans below the SERVER span of a request with one child."""
    return Counter({**dict.fromkeys(STAGES, 1), "spec_draft": num_drafts, "spec_verify": num_rounds})


def names_below(spans: list[Span]) -> Counter[str]:
    return Counter(span.name for span in spans) - Counter(span.name for span in roots(spans))


# ---- TRACE-1: sgl-project/sglang#37128 ----

SCRIPTS = {
    "plain last": [(5, 5), (0, 5), (2, 5), (5, 5), (0, 0), (0, 0), (0, 0)],
    "plain first": [(0, 0), (0, 0), (0, 0), (5, 5), (0, 5), (2, 5), (5, 5)],
    "mixed": [(5, 5), (0, 0), (0, 5), (2, 5), (0, 0), (0, 0), (5, 5)],
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", SCRIPTS)
def test_trace_1_every_round_of_the_script_has_its_spans(traced_sim: TracedServer, name: str, path: str) -> None:
    script = SCRIPTS[name]  # (accepted, drafted) per verify step
    parent, client = Parent(), traced_sim.client
    before = engine_scope(client.metrics())
    runs = [[582] * (accepted + 1) for accepted, _ in script]
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    body = {**prompt, "max_tokens": 100, "sim": {"runs": runs, "drafted": [drafted for _, drafted in script]}}
    response = client.post(path, body, headers=parent.headers)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 19
    counted = increments(before, engine_scope(client.metrics()), WIDTH)

    spans = traced_sim.trace(parent.trace_id)
    checked(spans, parent.span_id)
    assert names_below(spans) == full_tree(num_drafts=4, num_rounds=7)
    [decode], [prefill] = named(spans, "decode_forward"), named(spans, "prefill_forward")
    drafts, verifies = named(spans, "spec_draft"), named(spans, "spec_verify")
    assert [span.attributes for span in verifies] == [{"num_correct_drafts": accepted} for accepted, _ in script]
    assert [span.attributes["num_draft_tokens"] for span in drafts] == [5, 5, 5, 5]
    assert {span.parent_id for span in drafts + verifies} == {decode.span_id}
    assert not [span for span in spans if span.parent_id == prefill.span_id]
    assert (counted.speculation.drafts, counted.rounds, counted.speculation.accepted) == (4, 7, 12)


@pytest.fixture(scope="module")
def traced_spec(stand_in: Path) -> Iterator[TracedServer]:
    with traced_server(*SPEC, *(() if IS_LONG else ("--model", str(stand_in)))) as server:
        yield server


@pytest.mark.parametrize("streamed", [False, True])
def test_trace_1_the_spans_of_a_real_drafter_add_up_to_the_counters(traced_spec: TracedServer, streamed: bool) -> None:
    parent, client = Parent(), traced_spec.client
    before = engine_scope(client.metrics())
    body: dict[str, Any] = {"prompt": PAT, "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    if streamed:
        assert client.stream(**body, headers=parent.headers).finish == {0: "length"}
    else:
        assert client.post(COMPLETIONS, body, headers=parent.headers).status_code == 200
    counted = increments(before, engine_scope(client.metrics()), WIDTH)
    assert counted.speculation.drafts > 0
    assert counted.speculation.accepted > 0

    spans = traced_spec.trace(parent.trace_id)
    checked(spans, parent.span_id)
    assert len(named(spans, "spec_draft")) == counted.speculation.drafts
    assert len(named(spans, "spec_verify")) == counted.rounds
    assert total_of(spans, "spec_draft", "num_draft_tokens") == counted.speculation.draft_tokens
    assert total_of(spans, "spec_verify", "num_correct_drafts") == counted.speculation.accepted


# ---- TRACE-2: freeunitorg/freeunit#110 ----

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"
MALFORMED: dict[str, list[bytes]] = {
    "a letter": [b"x"],
    "nothing": [b""],
    "all zeros": [b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"],
    "no trace id": [GOOD.replace(TRACE_ID, "0" * 32).encode()],
    "no parent id": [GOOD.replace(SPAN_ID, "0" * 16).encode()],
    "upper case": [GOOD.upper().encode()],
    "version ff": [b"ff" + GOOD[2:].encode()],
    "version g0": [b"g0" + GOOD[2:].encode()],
    "54 characters": [GOOD[:-1].encode()],
    "56 characters": [GOOD.encode() + b"0"],
    "more behind version 00": [GOOD.encode() + b"-more"],
    "flags gg": [GOOD[:-2].encode() + b"gg"],
    "blanks within": [GOOD.replace("-", " ").encode()],
    "10 kB": [GOOD.encode() + b"a" * 10_000],
    "two headers": [GOOD.encode(), GOOD.encode()],
    "two different headers": [GOOD.encode(), b"x"],
    "two values in one": [GOOD.encode() + b"," + GOOD.encode()],
    "UTF-8": [GOOD.replace("a", "ä", 1).encode()],
    "bytes of no encoding": [GOOD.encode().replace(b"a", b"\xff", 1)],
    "digits of another script": [GOOD.replace("0", "\u0660").encode()],
}
SIX = {"prompt": "x", "max_tokens": 20, "sim": {"runs": [[582, 827], [1296], [1876, 2531, 2976]], "drafted": [1, 0, 5]}}
SIX_TEXT = " one two three four five six"


@dataclass(frozen=True)
class Reply:
    status: int
    trace_id: str | None  # X-Trace-Id
    text: str


def ask_with(server: TracedServer, *headers: tuple[bytes, bytes]) -> Reply:
    """The script above, with these very bytes as headers."""
    body = json.dumps(SIX).encode()
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=20) as connection:
        connection.sendall(head + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    about, _, content = received.partition(b"\r\n\r\n")
    status, *fields = about.decode().split("\r\n")
    named_fields = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    answered = strict_json(content)
    text = answered["choices"][0]["text"] if "choices" in answered else str(answered)
    return Reply(int(status.split(" ")[1]), named_fields.get("x-trace-id"), text)


def malformed(client: Client) -> float:
    return total(client.metrics(), "drafthouse:traceparent_malformed_total")


@pytest.mark.parametrize("name", MALFORMED)
def test_trace_2_a_malformed_traceparent_starts_a_new_trace(traced_sim: TracedServer, name: str) -> None:
    before = malformed(traced_sim.client)
    headers = [(b"traceparent", value) for value in MALFORMED[name]]
    reply = ask_with(traced_sim, *headers, (b"tracestate", b"vendor=1"))
    assert (reply.status, reply.text) == (200, SIX_TEXT)
    assert malformed(traced_sim.client) == before + 1
    assert reply.trace_id is not None
    assert_fresh(reply.trace_id)
    spans = traced_sim.trace(reply.trace_id)
    checked(spans, parent_id="")
    assert names_below(spans) == full_tree(num_drafts=2, num_rounds=3)
    assert {span.state for span in spans} == {""}, "the state of a broken header belongs to another trace"
    assert not [span for span in traced_sim.spans() if span.trace_id in (TRACE_ID, "0" * 32)]


def assert_fresh(trace_id: str) -> None:
    assert len(trace_id) == 32
    assert int(trace_id, 16) > 0
    assert trace_id != TRACE_ID


def test_trace_2_fresh_ids_are_128_random_bits(traced_sim: TracedServer) -> None:
    replies = [ask_with(traced_sim, (b"traceparent", b"x")) for _ in range(16)]
    ids = [int(str(reply.trace_id), 16) for reply in replies]
    for shift in (0, 32, 64, 96):  # 16 equal draws of 32 bits: less than one in 10 million
        assert len({(trace_id >> shift) & 0xFFFFFFFF for trace_id in ids}) == 16


STATES = {
    "no members": b"=,=,\xff",
    "no value": b"vendor",
    "upper case": b"Vendor=1",
    "a key twice": b"a=1,a=2",
    "a value too long": b"a=" + b"v" * 257,
    "too long in all": b",".join(b"a%d=" % number + b"v" * 200 for number in range(3)),
    "not ASCII": b"\xc3\xa4=1",
    "too many": b",".join(b"a%d=1" % number for number in range(33)),
}


@pytest.mark.parametrize("name", STATES)
def test_trace_2_a_bad_tracestate_costs_itself_and_not_the_traceparent(traced_sim: TracedServer, name: str) -> None:
    before, parent = malformed(traced_sim.client), Parent()
    reply = ask_with(traced_sim, (b"traceparent", parent.header.encode()), (b"tracestate", STATES[name]))
    assert (reply.status, reply.text, reply.trace_id) == (200, SIX_TEXT, parent.trace_id)
    spans = traced_sim.trace(parent.trace_id)
    checked(spans, parent.span_id)
    assert {span.state for span in spans} == {""}
    assert malformed(traced_sim.client) == before


def test_trace_2_a_good_tracestate_goes_on(traced_sim: TracedServer) -> None:
    parent = Parent()
    headers = ((b"traceparent", parent.header.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b@c=2"))
    assert ask_with(traced_sim, *headers).status == 200
    assert {span.state for span in traced_sim.trace(parent.trace_id)} == {"a=1,b@c=2"}


@pytest.mark.parametrize(("version", "more"), [("01", "-what-ever"), ("01", ""), ("cc", "-"), ("fe", "-00")])
def test_trace_2_a_future_version_is_accepted(traced_sim: TracedServer, version: str, more: str) -> None:
    before, parent = malformed(traced_sim.client), Parent()
    reply = ask_with(traced_sim, (b"traceparent", (version + parent.header[2:] + more).encode()))
    assert (reply.status, reply.text, reply.trace_id) == (200, SIX_TEXT, parent.trace_id)
    checked(traced_sim.trace(parent.trace_id), parent.span_id)
    assert malformed(traced_sim.client) == before


# ---- TRACE-4: triton-inference-server/server#8474 ----


def test_trace_4_the_callers_flag_decides_and_without_one_all_are_traced(traced_sim: TracedServer) -> None:
    client, seen = traced_sim.client, {span.trace_id for span in traced_sim.settled()}
    before = client.metrics()
    unsampled = [Parent("00") for _ in range(20)]
    sampled = [Parent("01") for _ in range(20)]
    callers = [caller for three in zip(unsampled, sampled, [None] * 20) for caller in three]

    def ask(caller: Parent | None) -> str | None:
        response = Client(client.base_url).post(COMPLETIONS, SIX, headers=caller.headers if caller else {})
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == SIX_TEXT
        return response.headers.get("X-Trace-Id")

    told = together([lambda caller=caller: ask(caller) for caller in callers], width=6)
    after, spans = client.metrics(), traced_sim.settled()
    assert [told[index] for index in range(0, 60, 3)] == [None] * 20
    assert [told[index] for index in range(1, 60, 3)] == [caller.trace_id for caller in sampled]
    new = {span.trace_id for span in spans} - seen
    assert new == {trace_id for trace_id in told if trace_id is not None}
    assert len(new) == 40
    parents = {caller.trace_id: caller.span_id for caller in sampled}
    for trace_id in new:
        own = [span for span in spans if span.trace_id == trace_id]
        checked(own, parents.get(trace_id, ""))
        assert names_below(own) == full_tree(num_drafts=2, num_rounds=3)

    def decided(decision: str) -> float:
        return sum(
            sign * labelled(samples, "drafthouse:requests_traced_total", decision=decision)
            for sign, samples in ((1, after), (-1, before))
        )

    assert (decided("sampled"), decided("unsampled"), decided("limited")) == (40, 20, 0)


# ---- TRACE-5: vllm-project/vllm#17528 ----

TOKEN_IDS = "token ids too long"  # which chat does not take
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "prompt too long": (400, {"prompt": "word " * 9000}, "invalid_request_error"),
    TOKEN_IDS: (400, {"prompt": [582] * 9000}, "invalid_request_error"),
    "bad temperature": (400, {"prompt": "x", "temperature": -1}, "invalid_request_error: temperature"),
    "unknown model": (404, {"prompt": "x", "model": "no-such-model"}, "not_found_error: model"),
    "structured output": (400, {"prompt": "x", "structured_outputs": {"regex": "a"}}, "invalid_request_error: structured_outputs"),
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETIONS, name) for name in REFUSED] + [(CHAT, name) for name in REFUSED if name != TOKEN_IDS],
)
def test_trace_5_a_refused_request_leaves_its_span_in_the_callers_trace(
    traced_sim: TracedServer, path: str, name: str, streamed: bool
) -> None:
    status, body, reason = REFUSED[name]
    if path == CHAT:
        body = {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
        del body["prompt"]
    parent = Parent()
    response = traced_sim.client.post(path, {**body, "stream": streamed}, headers=parent.headers)
    assert response.status_code == status
    assert response.headers["X-Trace-Id"] == parent.trace_id
    [server] = traced_sim.trace(parent.trace_id)  # no engine children, nor any other
    assert server.name == f"POST {path}"
    assert (server.parent_id, server.is_error) == (parent.span_id, True)
    assert server.end_ns > server.start_ns
    assert server.attributes["http.response.status_code"] == status
    assert str(server.attributes["error.type"]).startswith(reason)
    assert server.message == server.attributes["error.type"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"{", 400),
        (CHAT, b'{"messages":[]}', 400),
        (CHAT, b'{"model":5}', 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
        (COMPLETIONS, b" " * (17 << 20), 413),
    ],
    ids=["no JSON", "no message", "wrong type", "no route", "no such method", "too large"],
)
def test_trace_5_so_does_what_was_refused_before_it_was_understood(
    traced_sim: TracedServer, path: str, body: bytes, status: int
) -> None:
    parent = Parent()
    response = traced_sim.client.post_raw(path, body, headers=parent.headers)
    assert response.status_code == status
    [server] = traced_sim.trace(parent.trace_id)
    assert server.is_error
    assert server.parent_id == parent.span_id
    assert server.attributes["http.response.status_code"] == status
