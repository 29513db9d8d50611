"""Off is free: without a traced request nothing of tracing is allocated, loaded, asked of the engine or read from a device."""

import ast
import subprocess
import sys
import tracemalloc
from pathlib import Path

import aiohttp

from engine.plan import RowBegin, RowCommit, Span, SpanResult, StepPlan, StepResult
from frontend.app import Listener, build_app
from frontend.request_trace import RequestTrace
from frontend.spans import Resource, Sampled, Surroundings, Trace, TraceLevel
from frontend.trace_context import RateLimit, Sampler
from frontend.tracer import Tracer
from tests.frontend.fakes_client import FakeEngineClient, server_over
from tests.traced import ListSink

ROOT = Path(__file__).resolve().parents[2]
TRACING = (
    "frontend/request_trace.py", "frontend/stream_trace.py", "frontend/spans.py", "frontend/tracer.py",
    "frontend/trace_context.py", "frontend/span_attributes.py", "frontend/span_export.py", "frontend/span_encoding.py",
)  # fmt: skip
BODY = {"prompt": "x", "stream": True, "sim": {"runs": [[582, 827]] * 20}, "max_tokens": 40}


async def allocations_of(server, headers: dict[str, str]) -> int:
    """Blocks allocated by lines of the tracing modules while twenty requests are served."""
    listener = Listener(build_app(server), server.config)
    await listener.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.port}", headers=headers) as session:
            await ask(session)
            tracemalloc.start()
            for _ in range(20):
                await ask(session)
            taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
        await listener.stop()
    inside = taken.filter_traces([tracemalloc.Filter(True, f"*{name}") for name in TRACING])
    return sum(one.count for one in inside.statistics("filename"))


async def ask(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/completions", json=BODY) as response:
        assert response.status == 200 and (await response.text()).endswith("data: [DONE]\n\n")


class Remembering(ListSink):
    """Keeps every record, so that what was allocated for it is still there when the snapshot is taken."""


def tracer(server, sampler: Sampler) -> Tracer:
    server.metrics.trace_on()
    around = Surroundings(Remembering(), Resource(()), lambda engine_id, epoch: Resource(()))
    return Tracer(around, sampler, RateLimit(1000.0, lambda: 0.0), TraceLevel.ROUNDS, server.metrics)


async def test_with_tracing_off_no_line_of_tracing_allocates():
    server = server_over(FakeEngineClient())
    assert server.tracer is None
    assert await allocations_of(server, {}) == 0


async def test_an_unsampled_request_leaves_nothing_allocated():
    server = server_over(FakeEngineClient())
    server.tracer = tracer(server, Sampler(0.0, follows_caller=True))
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    assert await allocations_of(server, headers) < 20, "less than one block per request: nothing that is kept"
    assert server.tracer.around.sink.records == []


async def test_the_measure_finds_what_tracing_allocates():
    server = server_over(FakeEngineClient())
    sink = Remembering()
    around = Surroundings(sink, Resource(()), lambda engine_id, epoch: Resource(()))
    tracemalloc.start()
    try:
        for _ in range(20):
            trace = RequestTrace(around, Sampled(Trace(b"\1" * 16, ""), None, TraceLevel.ROUNDS), "x")
            with trace.stage("tokenize", TraceLevel.STAGES):
                pass
            trace.end()
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    inside = taken.filter_traces([tracemalloc.Filter(True, f"*{name}") for name in TRACING])
    assert sum(one.count for one in inside.statistics("filename")) >= 40
    assert len(sink.records) == 40 and server.tracer is None


def test_a_frontend_without_telemetry_loads_nothing_of_it():
    code = (
        "import sys, frontend.__main__ as main\n"
        "from frontend.config import FrontendConfig\n"
        "from frontend.metrics import FrontendMetrics\n"
        "from frontend.telemetry import start_telemetry\n"
        "started = start_telemetry(FrontendConfig(), {}, FrontendMetrics(100), tuple)\n"
        "assert started.tracer is started.tracing is started.otlp is None\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'opentelemetry', 'grpc', 'requests', 'google'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_the_executor_cannot_know_whether_a_request_is_traced():
    fields = {field for kind in (StepPlan, Span, RowBegin, RowCommit, StepResult, SpanResult) for field in names(kind)}
    assert fields and not [field for field in fields if "trace" in field]


def names(kind: type) -> list[str]:
    return list(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)


def test_the_engine_asks_for_the_trace_level_in_two_places_only():
    """The wire stamps the arrival, the ledger notes events: nothing else in the engine may depend on tracing."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "engine").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("trace_level", "received_ns")
    }
    assert asking == {"engine/wire.py", "engine/ledger.py"}
