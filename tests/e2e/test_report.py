"""`drafthouse report`: what it reads, what it refuses, what it draws, and the whole thing against a real server."""

import asyncio
import base64
import gzip
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from deploy import report
from deploy.report_acceptance import acceptance
from deploy.report_numbers import (
    Acceptance,
    acceptance_in,
    acceptance_of,
    is_complete,
    key_figures,
    milliseconds,
    rounds_of,
)
from deploy.report_receiver import MAX_BODY_BYTES, Receiver, from_protobuf, only_trace, read_dump
from deploy.report_server import ServerTrouble, server_environment
from deploy.report_spans import MalformedTrace, Request, Span, find_requests, read_lines
from deploy.report_waterfall import waterfall
from tests.e2e.servers import ROOT, clean_environment, command, serve

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
STARTED_NS = 1_796_038_901_000_000_000


class MadeTrace:
    """OTLP JSON of one request, as spec/telemetry.md section 4 has it. `drafts`: per child, (drafted, correct) per round."""

    def __init__(
        self,
        *drafts: list[tuple[int, int]],
        trace_id: str = TRACE_ID,
        step_ms: float = 10.0,
        level: int = 2,
        error: str | None = None,
    ) -> None:
        self.trace_id, self.level, self.error = trace_id, level, error
        self.spans: dict[str, list[dict]] = {"drafthouse-frontend": [], "drafthouse-engine": []}
        self.root_id = self._new_id()
        self._add("tokenize", self.root_id, 0.4, 1.3, of="drafthouse-frontend")
        self._add("prefill_waiting", self.root_id, 1.3, 4.0)
        self._add("prefill_forward", self.root_id, 4.0, 30.0, num_cached_tokens=16)
        end_ms = max([self._child(*child, step_ms) for child in enumerate(drafts)], default=30.0)
        self._add(
            "POST /v1/chat/completions", "00f067aa0ba902b7", 0.0, end_ms + 0.5, of="drafthouse-frontend",
            span_id=self.root_id, kind=2, **{"gen_ai.usage.input_tokens": 37, "gen_ai.usage.output_tokens": 60},
        )  # fmt: skip

    def _child(self, index: int, rounds: list[tuple[int, int]], step_ms: float) -> float:
        decode_id, at_ms = self._new_id(), 30.0
        for number, (drafted, correct) in enumerate(rounds):
            if drafted:
                self._add("spec_draft", decode_id, at_ms, at_ms + 0.2, num_draft_tokens=drafted, source="ngram")
            self._add("spec_verify", decode_id, at_ms + 0.2, at_ms + step_ms - 0.1, num_correct_drafts=correct)
            if self.level >= 3:
                self._add("decode_loop", decode_id, at_ms, at_ms + step_ms, decode_ct=number)
            at_ms += step_ms
        self._add(
            "decode_forward", self.root_id, 30.0, at_ms, span_id=decode_id, num_rounds=len(rounds),
            num_drafts=sum(drafted > 0 for drafted, _ in rounds), num_draft_tokens=sum(one[0] for one in rounds),
            num_correct_drafts=sum(one[1] for one in rounds), num_cut_tokens=1, num_trimmed_tokens=0, clock="host",
            **({"index": index} if index else {}),
        )  # fmt: skip
        return at_ms

    def _new_id(self) -> str:
        number = 1 + getattr(self, "_last", 0)
        self._last = number
        return f"{number:016x}"

    def _add(
        self, name: str, parent: str, start_ms: float, end_ms: float, *, of="drafthouse-engine", span_id=None, kind=1, **attributes
    ) -> None:  # fmt: skip
        span = {
            "traceId": self.trace_id, "spanId": span_id or self._new_id(), "parentSpanId": parent, "name": name,
            "kind": kind, "startTimeUnixNano": str(STARTED_NS + round(start_ms * 1e6)),
            "endTimeUnixNano": str(STARTED_NS + round(end_ms * 1e6)),
            "attributes": [
                {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
                for key, value in attributes.items()
            ],
        }  # fmt: skip
        if self.error is not None and name in ("decode_forward", "POST /v1/chat/completions"):
            span |= {
                "status": {"code": 2, "message": self.error},
                "events": [{"name": "retract", "timeUnixNano": str(STARTED_NS + 31_000_000)}],
            }
        self.spans[of].append(span)

    def export(self) -> dict:
        return {
            "resourceSpans": [
                {
                    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
                    "scopeSpans": [{"scope": {"name": "drafthouse"}, "spans": spans}],
                }
                for service, spans in self.spans.items()
            ]
        }

    def line(self) -> bytes:
        return json.dumps(self.export()).encode()

    def protobuf(self) -> bytes:
        from google.protobuf.json_format import ParseDict
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        content = json.loads(self.line())
        for entry in content["resourceSpans"]:
            for span in entry["scopeSpans"][0]["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):  # ParseDict wants base64 where OTLP JSON has hex
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        return ParseDict(content, ExportTraceServiceRequest()).SerializeToString()

    def request(self) -> Request:
        return find_requests(read_lines([self.line()], "made"))[0]


def rounds(count: int, drafted: int = 5, seed: int = 1) -> list[tuple[int, int]]:
    """Every tenth is plain; the others accept 0 to all."""
    draw = random.Random(seed)
    return [(0, 0) if number % 10 == 9 else (drafted, draw.randint(0, drafted)) for number in range(count)]


# ---- reading ----


def test_the_spans_of_a_line_become_one_tree():
    request = MadeTrace([(5, 5), (0, 0), (5, 2)]).request()
    assert request.root.name == "POST /v1/chat/completions" and request.root.service == "drafthouse-frontend"
    assert [span.name for span in request.children(request.root)] == [
        "tokenize", "prefill_waiting", "prefill_forward", "decode_forward",
    ]  # fmt: skip
    decode = request.named("decode_forward")[0]
    assert decode.service == "drafthouse-engine" and decode.number("num_rounds") == 3
    assert [span.name for span in request.children(decode)] == [
        "spec_draft", "spec_verify", "spec_verify", "spec_draft", "spec_verify",
    ]  # fmt: skip
    assert is_complete(request)


def test_a_draft_belongs_to_the_verify_behind_it_and_a_round_without_one_is_plain():
    request = MadeTrace([(5, 5), (0, 0), (3, 2)]).request()
    assert [(one.drafted, one.correct) for one in rounds_of(request)] == [(5, 5), (0, 0), (3, 2)]


def test_numbers_may_be_numbers_and_a_span_sent_twice_counts_once():
    made = MadeTrace([(5, 1)])
    content = json.loads(made.line())
    for entry in content["resourceSpans"]:
        for span in entry["scopeSpans"][0]["spans"]:
            span["startTimeUnixNano"] = int(span["startTimeUnixNano"])
    twice = read_lines([made.line(), json.dumps(content).encode(), b"", b'{"resourceMetrics": []}'], "file")
    assert twice == read_lines([made.line()], "file")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "truncated"),
        (b"[1]", "Expected object, got array"),
        (b"{}", "it has no resourceSpans"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', "traceId"),
        (b"\xff\xfe", "line 2"),
        ("ends early", "ends before it starts"),
        ("not a number", "startTimeUnixNano"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(line: bytes | str, reason: str):
    if isinstance(line, str):
        content = json.loads(MadeTrace([(1, 1)]).line())
        span = content["resourceSpans"][1]["scopeSpans"][0]["spans"][0]
        span["startTimeUnixNano"] = str(int(span["endTimeUnixNano"]) + 1) if line == "ends early" else "soon"
        line = json.dumps(content).encode()
    with pytest.raises(MalformedTrace, match=r"file, line 2, is not an OTLP trace export") as caught:
        read_lines([b'{"resourceSpans": []}', line], "file")
    assert reason in str(caught.value)


def test_protobuf_says_the_same_as_json_alone_and_with_lengths_before_each():
    made = MadeTrace([(5, 5), (0, 0), (5, 2)])
    expected = read_lines([made.line()], "file")
    assert read_lines(read_dump(made.protobuf(), "file"), "file") == expected
    framed = len(made.protobuf()).to_bytes(4, "big") + made.protobuf()
    assert read_lines(read_dump(framed + framed, "file"), "file") == expected


@pytest.mark.parametrize("content", [b"\x00\x00\x00\x09short", b"\nnot protobuf at all", b"(\xb5/\xfd zstd"])
def test_other_binary_files_are_refused(content: bytes):
    with pytest.raises(MalformedTrace, match="file is neither OTLP JSON lines nor protobuf exports"):
        read_dump(content, "file")


def test_the_slowest_request_comes_first_and_spans_of_others_do_not_matter():
    quick, slow = MadeTrace([(5, 5)], trace_id="1" * 32), MadeTrace(rounds(9), trace_id="2" * 32)
    foreign = json.loads(quick.line().replace(b"1" * 32, b"3" * 32).replace(b'"name": "', b'"name": "their '))
    found = find_requests(read_lines([quick.line(), slow.line(), json.dumps(foreign).encode()], "file"))
    assert [request.root.trace_id for request in found] == ["2" * 32, "1" * 32]


def test_a_request_whose_own_span_is_missing_is_made_of_its_stages():
    made = MadeTrace([(5, 5)])
    made.spans["drafthouse-frontend"].pop()
    request = made.request()
    assert not request.has_own_span and len(request.named("spec_verify")) == 1
    assert "its own span is missing" in request.root.name
    assert request.root.start_ns == min(span.start_ns for span in request.spans)


# ---- counting ----


def test_acceptance_follows_the_counting_of_the_counters():
    own = acceptance_of(rounds_of(MadeTrace([(5, 5), (0, 0), (5, 2), (3, 0), (5, 3)]).request()))
    assert own == Acceptance(num_drafts=4, num_draft_tokens=18, num_accepted=10, per_position=(3, 3, 2, 1, 1))
    assert sum(own.per_position) == own.num_accepted
    assert own.length == 1 + 10 / 4 and own.rate_per_position[0] == 3 / 4


def test_acceptance_is_read_from_a_metrics_page_whatever_the_labels():
    page = "\n".join(
        f'vllm:spec_decode_num_{name}{{engine="{engine}",model_name="a, position=\\"9\\""{position}}} {value}'
        for engine in "01"
        for name, position, value in [
            ("drafts_total", "", 10), ("draft_tokens_total", "", 50.0), ("accepted_tokens_total", "", 1.2e1),
            ("accepted_tokens_per_pos_total", ',position="1"', 4), ("accepted_tokens_per_pos_total", ',position="0"', 8),
        ]
    )  # fmt: skip
    assert acceptance_in(page) == Acceptance(20, 100, 24, (16, 8), ("0", "1"))
    assert acceptance_in("vllm:num_requests_running 1\n# HELP vllm:spec_decode_num_drafts_total x\n") is None


def test_key_figures_say_what_the_spans_say():
    figures = dict(key_figures(MadeTrace([(5, 5), (0, 0), (5, 2)], error="aborted").request()))
    assert figures["trace id"] == TRACE_ID and figures["tokens"] == "37 in, 60 out"
    assert figures["rounds"] == "3, 2 with a draft" and figures["draft tokens"] == "10, 7 accepted"
    assert figures["accept rate"] == "70.0%" and figures["accept length"] == "4.50"
    assert figures["error"] == "aborted" and figures["not delivered"] == "1 cut, 0 behind a stop string"
    assert figures["time in rounds"] == "0.400 ms draft, 29.1 ms verify"
    assert figures["decode_forward"] == milliseconds(30_000_000) == "30.0 ms"


# ---- drawing ----


def bars(axes) -> list[int]:
    """Number of bars on each line, from the top."""
    return [len(collection.get_paths()) for collection in axes.collections]


def labels(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("count", [3, 500])
def test_a_waterfall_has_one_line_per_stage_and_one_lane_for_all_rounds(count: int):
    figure = waterfall(MadeTrace(rounds(count)).request())
    first = figure.axes[0]
    assert [label.strip() for label in labels(first)] == [
        "POST /v1/chat/completions", "tokenize", "prefill_waiting", "prefill_forward", "decode_forward", "spec_draft",
        "spec_verify",
    ]  # fmt: skip
    assert bars(first) == [1, 1, 1, 1, 1, count - count // 10, count]
    assert labels(first)[6].startswith("   " * 2) and not labels(first)[0].startswith(" ")


def test_bars_stand_where_the_spans_were():
    figure = waterfall(MadeTrace([(5, 5), (5, 0)]).request())
    verify = figure.axes[0].collections[-1].get_paths()[1].get_extents()
    assert (verify.x0, verify.x1) == (pytest.approx(40.2), pytest.approx(49.9))


def test_the_shade_tells_accepted_tokens_apart_and_plain_rounds_from_all_of_them():
    figure = waterfall(MadeTrace([(5, 0), (5, 2), (5, 5), (0, 0), (5, 0)]).request())
    faces = [tuple(face) for face in figure.axes[0].collections[-1].get_facecolor()]
    assert len({*faces}) == 4 and faces[0] == faces[4] != faces[3]
    numbers = [text.get_text() for text in figure.axes[0].texts if text.get_text().isdigit()]
    assert numbers == ["0", "2", "5", "0"]


def test_many_rounds_are_enlarged_around_the_slowest():
    made = MadeTrace(rounds(200))
    slow = [span for span in made.spans["drafthouse-engine"] if span["name"] == "spec_verify"][120]
    slow["endTimeUnixNano"] = str(int(slow["endTimeUnixNano"]) + 9_000_000)
    figure = waterfall(made.request())
    enlarged = figure.axes[1]
    low, high = enlarged.get_xlim()
    assert low < 30 + 120 * 10 < high and 200 < high - low < 300
    assert len([text for text in enlarged.texts if text.get_text().isdigit()]) >= 20
    assert len(waterfall(MadeTrace(rounds(40)).request()).axes) == 2  # the lines and the colour scale, nothing enlarged


def test_of_many_children_the_first_get_lines_and_the_rest_are_counted():
    figure = waterfall(MadeTrace(*[rounds(4, seed=child) for child in range(9)]).request())
    names = [label.strip() for label in labels(figure.axes[0])]
    assert [name for name in names if name.startswith("decode_forward")] == [
        "decode_forward", *(f"decode_forward {index}" for index in range(1, 6)), "decode_forward, 3 more",
    ]  # fmt: skip
    assert names.count("spec_verify") == 6


@pytest.mark.parametrize(
    "made",
    [
        MadeTrace(rounds(3)),
        MadeTrace(rounds(30), level=3),
        MadeTrace(rounds(500, drafted=16), step_ms=1.0),
        MadeTrace(rounds(60), error="engine lost: " + "because " * 20),
        MadeTrace(rounds(1), step_ms=5000.0),
        MadeTrace(),
    ],
    ids=["few", "steps", "many", "failed", "one", "none"],
)
def test_no_two_texts_of_a_waterfall_overlap_and_none_leaves_the_picture(made: MadeTrace):
    figure = waterfall(made.request())
    figure.canvas.draw()
    page = figure.bbox
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        boxes += [label.get_window_extent() for label in axes.get_yticklabels()]
        boxes += [] if axes.get_legend() is None else [axes.get_legend().get_window_extent()]
        for number, box in enumerate(boxes):
            assert box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1
            assert not any(box.overlaps(other) for other in boxes[:number])


def test_dollars_in_names_and_errors_are_no_formula():
    """matplotlib reads what stands between two of them as mathematics, and refuses this."""
    bad = r"$\nosuch{$"
    line = MadeTrace([(5, 5)], error=bad).line().replace(b"/v1/chat/completions", json.dumps(bad)[1:-1].encode())
    figure = waterfall(find_requests(read_lines([line], "made"))[0])
    figure.canvas.draw()
    assert bad in figure.get_suptitle() and bad in labels(figure.axes[0])[0]
    assert any(bad in text.get_text() for text in figure.axes[0].texts)


def test_acceptance_draws_server_and_request_side_by_side():
    server = Acceptance(100, 500, 150, (60, 40, 30, 15, 5))
    figure = acceptance(server, rounds_of(MadeTrace([(5, 5), (0, 0), (5, 2), (5, 0)]).request()))
    assert figure is not None
    by_position, histogram = figure.axes
    heights = [round(bar.get_height(), 1) for bar in by_position.patches]
    assert heights == [60, 40, 30, 15, 5, 66.7, 66.7, 33.3, 33.3, 33.3]
    texts = [text.get_text() for text in by_position.get_legend().get_texts()]
    assert texts == [
        "this server: 100 drafts, accept length 2.50",
        "this request: 3 drafts, accept length 3.33",
    ]
    assert [bar.get_height() for bar in histogram.patches] == [1, 0, 1, 0, 0, 1, 1]  # 0 to 5 accepted, then plain


def test_without_a_draft_there_is_no_picture_of_acceptance():
    assert acceptance(Acceptance(0, 0, 0, (0, 0, 0)), rounds_of(MadeTrace([(0, 0)]).request())) is None
    assert acceptance(None, []) is None


# ---- the receiver ----


async def post(url: str, body: bytes, kind: str = "application/x-protobuf", **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(f"{url}/v1/traces", data=body, headers={"Content-Type": kind, **headers}) as response,
    ):
        return response.status, await response.read()


async def test_the_receiver_takes_protobuf_gzip_and_json():
    made = MadeTrace([(5, 5), (0, 0)])
    for body, kind, headers in [
        (made.protobuf(), "application/x-protobuf", {}),
        (gzip.compress(made.protobuf()), "application/x-protobuf", {"Content-Encoding": "gzip"}),
        (made.line(), "application/json", {}),
    ]:
        async with Receiver("127.0.0.1", 0, TRACE_ID) as receiver:
            status, answer = await post(receiver.url, body, kind, **headers)
            assert (status, answer) == (200, b"{}" if kind == "application/json" else b"")
            assert await receiver.wait(30.0) == read_lines([made.line()], "made")
            assert read_lines(receiver.lines, "saved") == read_lines([made.line()], "made")


async def test_the_receiver_keeps_one_trace_and_counts_the_others():
    other = MadeTrace(rounds(20), trace_id="5" * 32)
    async with Receiver("127.0.0.1", 0, TRACE_ID) as receiver:
        assert (await post(receiver.url, other.protobuf()))[0] == 200
        assert receiver.lines == [] and receiver.num_foreign_spans == sum(map(len, other.spans.values()))
        assert await receiver.wait(0.05) == []


async def test_the_receiver_refuses_what_is_no_export():
    async with Receiver("127.0.0.1", 0, TRACE_ID) as receiver:
        assert (await post(receiver.url, b"\xff\xff\xff"))[0] == 400
        assert (await post(receiver.url, b"[]", "application/json"))[0] == 400
        assert (await post(receiver.url, b'{"resourceSpans": 1}', "application/json"))[0] == 400
        assert (await post(receiver.url, b"x", "text/plain"))[0] == 415
        bomb = gzip.compress(bytes(MAX_BODY_BYTES + 1), 1)
        assert (await post(receiver.url, bomb, **{"Content-Encoding": "gzip"}))[0] == 413
        assert receiver.lines == []


async def test_waiting_ends_with_the_last_round_and_not_before():
    made = MadeTrace(rounds(10))
    late = made.spans["drafthouse-engine"].pop(-2)  # the last spec_verify; decode_forward counts it
    async with Receiver("127.0.0.1", 0, TRACE_ID) as receiver:
        await post(receiver.url, made.protobuf())
        waiting = asyncio.create_task(receiver.wait(60.0, quiet_s=60.0))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        made.spans = {"drafthouse-engine": [late]}
        await post(receiver.url, made.protobuf())
        assert len(rounds_of(find_requests(await waiting)[0])) == 10


async def test_waiting_for_rounds_that_were_not_sent_ends_when_it_is_quiet():
    made = MadeTrace(rounds(10))
    engine = made.spans["drafthouse-engine"]
    made.spans["drafthouse-engine"] = [span for span in engine if not span["name"].startswith("spec_")]  # level 1
    async with Receiver("127.0.0.1", 0, TRACE_ID) as receiver:
        await post(receiver.url, made.protobuf())
        assert len(await receiver.wait(60.0, quiet_s=0.05)) == 5


async def test_an_address_that_is_taken_is_named():
    async with Receiver("127.0.0.1", 0, TRACE_ID) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            async with Receiver("127.0.0.1", port, TRACE_ID):
                pass


def test_ids_of_protobuf_are_hex_and_other_traces_are_cut_out_of_an_export():
    content = from_protobuf(MadeTrace([(5, 5)]).protobuf())
    assert content["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == TRACE_ID
    assert only_trace(content, "5" * 32) == (None, 7)
    assert only_trace(content, TRACE_ID) == (content, 0)


# ---- a server ----


@asynccontextmanager
async def stand_in_server(made: MadeTrace | None, receiver: Receiver, status: int = 200) -> AsyncIterator[str]:
    """Answers like a frontend, and sends the spans of `made` to the receiver; None: traces nothing."""

    async def chat(request: web.Request) -> web.Response:
        assert request.headers["traceparent"].split("-")[1] == receiver.trace_id
        assert (await request.json())["max_tokens"] == 7
        if made is not None:
            made_now = made.line().replace(TRACE_ID.encode(), receiver.trace_id.encode())
            assert (await post(receiver.url, made_now, "application/json"))[0] == 200
        answer = {"error": {"message": "no such model"}} if status != 200 else {}
        return web.json_response(answer, status=status, headers={"X-Trace-Id": receiver.trace_id} if made else {})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text='vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0\n')

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", chat), web.get("/metrics", metrics)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def ask_stand_in(made: MadeTrace | None, tmp_path: Path, status: int = 200) -> report.Material:
    config = report.ReportConfig(serve=True, max_tokens=7, timeout_s=20.0, save=str(tmp_path / "spans.jsonl"))
    async with Receiver("127.0.0.1", 0, "a" * 32) as receiver, stand_in_server(made, receiver, status) as url:
        return await report._from_server(url, receiver, config)


async def test_the_spans_of_one_request_are_asked_for_drawn_from_and_saved(tmp_path: Path):
    material = await ask_stand_in(MadeTrace(rounds(12)), tmp_path)
    assert material.trouble is None and material.request is not None and len(rounds_of(material.request)) == 12
    saved = report.read_file(tmp_path / "spans.jsonl")
    assert report.choose(saved, "a" * 32, "saved") == material.request


async def test_a_server_that_does_not_trace_is_told_how_to(tmp_path: Path):
    material = await ask_stand_in(None, tmp_path)
    assert material.request is None and material.trouble is not None
    assert "start the server with OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:" in material.trouble
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in material.trouble
    assert not (tmp_path / "spans.jsonl").exists()


async def test_spans_that_do_not_come_are_told_from_a_request_that_is_not_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def nothing_came(receiver: Receiver, timeout_s: float) -> list[Span]:
        assert timeout_s == 20.0
        return []

    monkeypatch.setattr(Receiver, "wait", nothing_came)
    material = await ask_stand_in(MadeTrace([(5, 5)], trace_id="5" * 32), tmp_path)
    assert material.request is None and material.trouble is not None
    expected = (
        "the request was traced, but none of its spans came within 20 s (7 of other traces did): start the server"
    )
    assert material.trouble.startswith(expected)


async def test_the_reason_of_a_refusing_server_is_passed_on(tmp_path: Path):
    with pytest.raises(ServerTrouble, match=r"answered 404: no such model$"):
        await ask_stand_in(MadeTrace(), tmp_path, status=404)


async def test_who_is_refused_for_want_of_a_key_is_told_where_to_put_one(tmp_path: Path):
    with pytest.raises(ServerTrouble, match=r"answered 401: .*; the report takes a key from DRAFTHOUSE_API_KEY$"):
        await ask_stand_in(MadeTrace(), tmp_path, status=401)


def test_a_key_that_can_be_none_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("DRAFTHOUSE_API_KEY", "two words, and long enough")
    with pytest.raises(SystemExit) as caught:
        run_report(monkeypatch, "--url", "http://127.0.0.1:1")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "DRAFTHOUSE_API_KEY holds a blank" in error and "two words" not in error


def test_a_server_started_for_a_report_gets_no_options_of_others():
    environment = server_environment(
        {"DRAFTHOUSE_URL": "x", "OTEL_SDK_DISABLED": "true", "OTEL_TRACES_SAMPLER": "always_off", "PATH": "p"},
        "http://r",
    )
    assert environment.pop("PYTHONPATH").split(":")[0] == str(ROOT)
    assert environment == {
        "PATH": "p",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://r/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }


# ---- the command ----


def run_report(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["drafthouse report", *arguments])
    return report.main()


def is_a_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 8000


@pytest.fixture
def trace_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "traces.jsonl"
    quick = MadeTrace([(5, 5)], trace_id="1" * 32)
    path.write_bytes(quick.line() + b"\n" + MadeTrace(rounds(70)).line() + b"\n")
    yield path


def test_a_trace_file_becomes_two_pictures_and_a_table(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    directory = tmp_path / "deep" / "report"
    assert run_report(monkeypatch, "--trace-file", str(trace_file), "--output", str(directory)) == 0
    assert all(is_a_picture(directory / name) for name in ("waterfall.png", "acceptance.png"))
    printed = capsys.readouterr().out
    assert "has 2 requests; drawing the slowest" in printed and f"wrote {directory}/waterfall.png" in printed
    assert TRACE_ID in printed and "70, 63 with a draft" in printed


def test_a_trace_is_chosen_by_its_id(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ("--trace-file", str(trace_file), "--output", str(tmp_path))
    assert run_report(monkeypatch, *arguments, "--trace-id", "1" * 32) == 0
    assert "1, 1 with a draft" in capsys.readouterr().out
    assert run_report(monkeypatch, *arguments, "--trace-id", "7" * 32) == 1
    assert f"has no request of trace {'7' * 32} among its 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"hello", "is neither OTLP JSON lines nor protobuf exports"),
        (b'{"resourceSpans": []}\n', "has 0 spans and none of them is a stage of a drafthouse request"),
        (b'{"resourceSpans": [', "line 1, is not an OTLP trace export"),
        (None, "file: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_with_a_sentence(
    content: bytes | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):  # fmt: skip
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert run_report(monkeypatch, "--trace-file", str(path), "--output", str(tmp_path / "report")) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("drafthouse report: ") and error.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "say what to draw"),
        (("--serve", "--url", "http://x"), "--serve starts a server of its own"),
        (("--listen", "127.0.0.1:4318"), "say what to draw"),
        (("--trace-file", "f", "--url", "http://x", "--listen", "127.0.0.1:0"), "--listen works with --url"),
        (("--url", "http://x", "--listen", "4318"), "--listen must be HOST:PORT"),
        (("--url", "localhost:8000"), "--url must look like http://127.0.0.1:8000"),
        (("--url", "http://x", "--prompt", "hello"), "--prompt says nothing without --listen or --serve"),
        (("--url", "http://x", "--save", "f"), "--save says nothing without --listen or --serve"),
        (("--url", "http://x", "--serve-options", "-"), "--serve-options says nothing without --serve"),
        (("--serve", "--trace-id", "1" * 32), "--trace-id says nothing without --trace-file"),
        (("--trace-file", "f", "--trace-id", "abc"), "--trace-id"),
        (("--serve", "--max-tokens", "0"), "--max-tokens"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        run_report(monkeypatch, *arguments)
    assert caught.value.code == 2 and sentence in capsys.readouterr().err


def test_without_matplotlib_one_sentence_says_what_to_install(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        run_report(monkeypatch, "--trace-file", str(trace_file))
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"drafthouse report: pictures need matplotlib: {sys.executable} -m pip install 'drafthouse[report]'\n"
    )


def test_a_live_server_is_drawn_from_its_counters_alone(tmp_path: Path):
    with serve("--executor", "sim", "--num-draft-tokens", "4", "--sim-acceptance", "0.5") as server:
        before = launch("--url", server.base_url, "--output", str(tmp_path))
        assert "no picture of acceptance: no draft was verified yet" in before
        body = json.dumps({"prompt": "x", "max_tokens": 50}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.base_url + "/v1/completions", body, headers)
        urllib.request.urlopen(request, timeout=20).close()
        after = launch("--url", server.base_url + "/", "--output", str(tmp_path))
    assert "server: accept rate" in after and is_a_picture(tmp_path / "acceptance.png")
    assert not (tmp_path / "waterfall.png").exists()


def launch(*arguments: str, **environment: str) -> str:
    """`drafthouse report ARGUMENTS` as users run it; returns what it prints."""
    done = subprocess.run(
        command("report", *arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(**environment),
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_report_on_a_server_of_its_own_has_every_round_the_server_counted(tmp_path: Path):
    options = "--executor sim --num-draft-tokens 4 --sim-acceptance 0.6 --sim-step-ms 2"
    saved = tmp_path / "spans.jsonl"
    printed = launch(
        "--serve", f"--serve-options={options}", "--max-tokens", "90", "--output", str(tmp_path), "--save", str(saved)
    )
    assert is_a_picture(tmp_path / "waterfall.png") and is_a_picture(tmp_path / "acceptance.png")
    request = report.choose(report.read_file(saved), None, "saved")
    assert {span.service for span in request.spans} == {"drafthouse-frontend", "drafthouse-engine"}
    assert is_complete(request) and request.root.number("gen_ai.usage.output_tokens") == 90
    own = acceptance_of(rounds_of(request))
    assert own.num_drafts > 10 and own.num_accepted > 10
    assert f"server: drafts       {own.num_drafts}, {own.num_draft_tokens} draft tokens" in printed
    assert f"server: accept rate  {own.rate:.1%}, accept length {own.length:.2f}" in printed


def test_a_server_with_keys_is_asked_with_the_one_of_the_environment(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("reporter: a-key-for-the-report\n")
    keys.chmod(0o600)
    options = f"--executor sim --api-key-file {keys}"
    arguments = ("--serve", f"--serve-options={options}", "--max-tokens", "30", "--output", str(tmp_path))
    printed = launch(*arguments, DRAFTHOUSE_API_KEY="a-key-for-the-report")
    assert is_a_picture(tmp_path / "waterfall.png") and "a-key-for-the-report" not in printed
