"""What tracing costs: tokens per second with it cut out of the code, off, and sampled; and a flood of spans at a steady rate.

Real servers with the simulated engine, one after the other and interleaved, because machines drift. Part of `make bench`.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from tests.bench import load
from tests.bench.without_tracing import copy_without_tracing
from tests.e2e.servers import ROOT, Server, serve

SAMPLED = {"1 % sampled": "0.01", "10 % sampled": "0.1", "100 % sampled": "1"}
STREAMS, TOKENS = 16, 256
FLOOD_STREAMS, FLOOD_STEP_MS, FLOOD_ROUNDS = 128, 14, 400


@contextmanager
def collector() -> Iterator[dict[str, str]]:
    """A running blackhole, as the environment that sends spans to it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.blackhole"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "DRAFTHOUSE_TRACE_MAX_PER_SECOND": "100000",
        }
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def cost_table(repeats: int) -> Table:
    """Tokens per second through one frontend, zero step time: the frontend is the bottleneck."""
    table = Table(
        "tracing", "output tok/s", "of off", "TTFT p50 ms",
        title=f"what tracing costs ({STREAMS} streams, level 2, medians of {repeats})",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as copy, collector() as environment:
        copy_without_tracing(ROOT, Path(copy))
        variants: dict[str, tuple[Path, dict[str, str]]] = {"cut out": (Path(copy), {}), "off": (ROOT, {})}
        for name, ratio in SAMPLED.items():
            sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": ratio}
            variants[name] = (ROOT, {**environment, **sampler})
        runs: dict[str, list[load.Run]] = {name: [] for name in variants}
        for _ in range(repeats):
            for name, (root, extra) in variants.items():
                with serve("--executor", "sim", root=root, **extra) as server:
                    asyncio.run(load.run(server.port, ["warm up"] * STREAMS, STREAMS, 64))
                    runs[name].append(asyncio.run(load.run(server.port, ["hello"] * STREAMS * 20, STREAMS, TOKENS)))
    rates = {name: statistics.median(run.output_tokens_per_s for run in listed) for name, listed in runs.items()}
    for name, listed in runs.items():
        first = statistics.median(run.ttft_p50_ms for run in listed)
        table.add_row(name, f"{rates[name]:.0f}", f"{rates[name] / rates['off']:.1%}", f"{first:.1f}")
    return table


@dataclass
class Flood:
    """One run of many streams at a steady step rate."""

    cpu_s: float  # of the frontend
    wall_s: float
    chunks: int
    gaps_ms: list[float]
    spans: int
    dropped: int

    def gap(self, share: float) -> float:
        return sorted(self.gaps_ms)[int(share * (len(self.gaps_ms) - 1))]


def flood_table() -> Table:
    """128 streams at 50 steps a second, every request traced at level 2: about 12 800 spans a second."""
    table = Table(
        "tracing", "steps/s per stream", "spans/s", "dropped", "frontend CPU %", "us CPU per span", "gap p50 ms",
        "gap p99 ms", title=f"{FLOOD_STREAMS} streams, about 50 steps/s, level 2, all sampled",
    )  # fmt: skip
    with collector() as environment:
        off, on = flood({}), flood(environment)
    per_span_us = (on.cpu_s / on.chunks - off.cpu_s / off.chunks) * on.chunks / max(on.spans, 1) * 1e6
    for name, run in (("off", off), ("100 %", on)):
        table.add_row(
            name,
            f"{run.chunks / FLOOD_STREAMS / run.wall_s:.1f}",
            f"{run.spans / run.wall_s:.0f}",
            str(run.dropped),
            f"{run.cpu_s / run.wall_s:.0%}",
            f"{per_span_us:.1f}" if run is on else "-",
            f"{run.gap(0.5):.1f}",
            f"{run.gap(0.99):.1f}",
        )
    return table


def flood(environment: dict[str, str]) -> Flood:
    options = ("--executor", "sim", "--sim-step-ms", str(FLOOD_STEP_MS), "--max-num-seqs", str(FLOOD_STREAMS))
    with serve(*options, "--max-num-batched-tokens", "2048", **environment) as server:
        asyncio.run(load.run(server.port, ["warm up"] * 8, 8, 16))
        frontend = psutil.Process(server.pids("frontend")[0])
        before, spans_before = cpu_s(frontend), spans(server)
        started = time.perf_counter()
        script = {"runs": [[582, 827, 1296]] * FLOOD_ROUNDS}
        run = asyncio.run(load.run(server.port, ["x"] * FLOOD_STREAMS, FLOOD_STREAMS, 3 * FLOOD_ROUNDS, sim=script))
        wall_s = time.perf_counter() - started
        time.sleep(2.5 if environment else 0.0)  # the last batch
        exported, dropped = (now - then for now, then in zip(spans(server), spans_before, strict=True))
        gaps_ms = [gap * 1e3 for sample in run.samples for gap in sample.gaps_s]
        chunks = sum(sample.tokens for sample in run.samples) // 3
        return Flood(cpu_s(frontend) - before, wall_s, chunks, gaps_ms, exported, dropped)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def spans(server: Server) -> tuple[int, int]:
    """(exported, dropped) so far; zeros while tracing is off."""
    with urllib.request.urlopen(f"{server.base_url}/metrics/frontend", timeout=10) as page:
        lines = page.read().decode().splitlines()
    totals = [0, 0]
    for line in lines:
        for index, family in enumerate(("drafthouse:spans_exported_total", "drafthouse:spans_dropped_total")):
            if line.startswith(family):
                totals[index] += int(float(line.rsplit(" ", 1)[1]))
    return totals[0], totals[1]
