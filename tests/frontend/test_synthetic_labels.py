"""Synthetic acceptance is written on everything that shows its text or its speed, and on nothing of another engine."""

import json
import logging
import time
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from deploy.serve import _summary, read_plan
from engine.assembly import assemble
from engine.config import EngineConfig
from frontend.app import build_app
from frontend.deltas import IntervalLog, LatestSnapshot
from frontend.engine_families import EngineView
from frontend.engine_sums import EngineReporter
from frontend.hello_check import contradiction
from frontend.joint_limits import together
from frontend.metrics import FrontendMetrics
from frontend.openai import CompletionRequest, decode_request
from frontend.prompts import draft_of, job_of
from frontend.span_attributes import describe_answer
from protocol.codec import decode_counters, encode_counters
from protocol.counters import Counters
from tests import wiring
from tests.frontend.fakes_client import FakeEngineClient, embedded_text, hello, load, server_over
from tests.tiny import write_tiny_model

RATES = "0.8,0.6,0.4,0.2,0"
SYNTHETIC = msgspec.structs.replace(hello(), speculator="synthetic", sources=("synthetic",), synthetic=RATES)
ENGINES = pytest.mark.parametrize(
    ("described", "label"), [(SYNTHETIC, RATES), (hello(), "")], ids=["synthetic", "judged"]
)
FINGERPRINT = f"synthetic_acceptance={RATES}"


def test_an_engine_says_so_itself(tmp_path, caplog):
    model = write_tiny_model(tmp_path / "target")
    for speculator, options, wanted in (
        ("synthetic", {"synthetic_acceptance": "1.5", "num_draft_tokens": 3}, "1,0.5,0"),
        ("ngram", {}, ""),
    ):
        config = EngineConfig(
            model=str(model), speculator=speculator, device="cpu", kv_cache_tokens=256, dtype="fp32",
            listen=f"ipc://{tmp_path}/{speculator}.sock", **options,
        )  # fmt: skip
        with caplog.at_level(logging.WARNING):
            engine = assemble(config, lambda done, total: None, time.time_ns())
        engine.wire.close()
        assert engine.hello.synthetic == wanted
        assert ("the text is NOT the model's" in caplog.text) == bool(wanted)
        caplog.clear()


def test_the_command_that_starts_everything_says_so_first():
    said = [line for line in _summary(read_plan(["--speculator", "synthetic"], {})) if line.startswith("speculation")]
    assert said == ["speculation  synthetic: the text is NOT the model's, for measuring speed only"]
    assert not any("NOT" in line for line in _summary(read_plan([], {})))


@pytest.mark.parametrize(
    "rates", ["0.8,0.6", f"{RATES},0", "0.8,0.6,0.4,0.2,2", "0.8,0.6,0.4,0.2,-1", 'a,b,c,d,"', "0.8,0.6,0.4,0.2,nan"]
)
def test_rates_that_are_none_refuse_the_engine(rates):
    assert contradiction(msgspec.structs.replace(SYNTHETIC, synthetic=rates)) is not None
    assert contradiction(SYNTHETIC) is None


def test_rates_of_any_size_can_be_said():
    tiny = msgspec.structs.replace(SYNTHETIC, synthetic="1,0.333333,1e-05,1.23457e-12,0")
    assert contradiction(tiny) is None


def test_one_such_engine_is_enough_to_doubt_all_text():
    other = msgspec.structs.replace(hello(), engine_id="1")
    assert together([other, SYNTHETIC]).synthetic == RATES
    assert together([other, hello()]).synthetic == ""


@ENGINES
def test_the_metrics_page_names_the_rates(described, label):
    metrics = FrontendMetrics(1000)
    view = EngineView(described, Counters.zero(5, 1), load(), 7, True)
    text = metrics.render([view], "*/*", "all")[0].decode()
    [info] = [line for line in text.splitlines() if line.startswith("drafthouse:engine_info{")]
    assert f'synthetic="{label}"' in info
    assert ('source="synthetic"' in text) == (label != "")


@ENGINES
def test_interval_logs_and_otlp_sums_carry_the_rates(described, label):
    latest, lines, now = LatestSnapshot(), [], [100.0]
    latest.observe(described)
    log = IntervalLog(latest, lines.append, lambda: now[0])
    counters = decode_counters(described.counters)
    counters.draft_rounds, counters.draft_tokens = 4, 20
    message = wiring.step(1, epoch=described.epoch)
    latest.observe(msgspec.structs.replace(message, counters=encode_counters(counters)))
    now[0] += 10
    log.tick()
    assert ("synthetic_acceptance=0.8,0.6,0.4,0.2,0 accept_rate=" in lines[0]) == bool(label)
    reports = EngineReporter(latest, lambda: True, False).collect()
    points = [point for report in reports for _, points in report.sums for point in points]
    assert points
    assert {point.attributes.get("synthetic_acceptance", "") for point in points} == {label}


@ENGINES
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_answer_and_every_chunk_carries_the_rates(described, label, path):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with TestClient(TestServer(build_app(server_over(FakeEngineClient(described))))) as http:
        whole = await (await http.post(path, json={**body, "spec_decode_metrics": "summary"})).json()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "spec_decode_metrics": "summary"}
        lines = (await (await http.post(path, json=streamed)).text()).splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(chunks) >= 2
    for one in (whole, *chunks):
        assert one.get("system_fingerprint") == (FINGERPRINT if label else None)
    for one in (whole, chunks[-1]):
        assert one["metrics"]["speculative_decoding"].get("synthetic_acceptance", "") == label


@ENGINES
def test_the_server_span_carries_the_rates(described, label):
    body = b'{"prompt": "x", "max_tokens": 3}'
    request, _ = decode_request(body, CompletionRequest)
    job = job_of(draft_of(request, 8), embedded_text(), described)
    generation = SimpleNamespace(job=job, completion_tokens=3, cached_tokens=0, choices=(), first_token_s=None)
    noted = {}
    answer = SimpleNamespace(generation=generation, options=SimpleNamespace(answer_id="cmpl-1"))
    describe_answer(SimpleNamespace(set=noted.__setitem__), answer, is_id_ours=True)
    assert (noted["drafthouse.synthetic_acceptance"] or "") == label
    assert noted["gen_ai.usage.output_tokens"] == 3
