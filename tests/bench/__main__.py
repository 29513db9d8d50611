"""`make bench`: tokens per second with speculation off and on, time to first token, and what a step costs besides the model.

Starts real servers one after the other, drives them over HTTP, prints tables. Never a test: the numbers are for reading.
"""

import argparse
import asyncio
import json
import platform
import statistics
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tests.bench import load, tracing
from tests.bench.step_overhead import measure_step_overhead
from tests.e2e.servers import serve

PROMPTS = [json.loads(line) for line in (Path(__file__).parent / "prompts.jsonl").read_text().splitlines()]
SETTINGS = {"off": ("--speculator", "none"), "ngram": ("--speculator", "ngram")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per request (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; medians are printed (default 3)")
    parser.add_argument("--dtype", default="auto", help="weights of the embedded model (default auto)")
    parser.add_argument("--only", choices=["model", "front", "step", "tracing"], help="one table only")
    options = parser.parse_args()
    console = Console()
    console.print(describe_machine())
    if options.only in (None, "step"):
        console.print(step_table())
    if options.only in (None, "front"):
        console.print(front_table(options.repeats))
    if options.only in (None, "tracing"):
        console.print(tracing.cost_table(options.repeats))
        console.print(tracing.flood_table())
    if options.only in (None, "model"):
        console.print(model_table(options))


def describe_machine() -> str:
    cpu = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    memory = psutil.virtual_memory().total / 2**30
    return f"{cpu}, {psutil.cpu_count()} logical CPUs, {memory:.0f} GiB, Python {platform.python_version()}"


def step_table() -> Table:
    """What the engine adds to every step: scheduler, ledger, encoding. Simulated executor, no sockets."""
    table = Table(
        "rows", "us per step", "us per row", title="engine overhead per step (simulated executor, in process)"
    )
    for rows in (1, 16, 64):
        per_step_us = measure_step_overhead(rows)
        table.add_row(str(rows), f"{per_step_us:.0f}", f"{per_step_us / rows:.1f}")
    return table


def front_table(repeats: int) -> Table:
    """How fast tokens travel from a simulated engine through one frontend to streaming clients."""
    table = Table(
        "streams", "output tok/s", "TTFT p50 ms", title="front of the server (simulated engine, zero step time)"
    )
    with serve("--executor", "sim") as server:
        asyncio.run(load.run(server.port, ["warm up"] * 8, 8, 64))
        for streams in (1, 16, 64):
            runs = [
                asyncio.run(load.run(server.port, ["hello there"] * streams * 2, streams, 128)) for _ in range(repeats)
            ]
            rate = statistics.median(run.output_tokens_per_s for run in runs)
            ttft = statistics.median(run.ttft_p50_ms for run in runs)
            table.add_row(str(streams), f"{rate:.0f}", f"{ttft:.1f}")
    return table


def model_table(options: argparse.Namespace) -> Table:
    """The embedded model, speculation off and on, interleaved run by run because machines drift."""
    table = Table(
        "speculation", "1 stream, decode tok/s", "4 streams", "16 streams", "TTFT 400 tokens, ms",
        title=f"embedded model, greedy, {options.tokens} tokens, medians of {options.repeats}",
    )  # fmt: skip
    prompts = [p["prompt"] for p in PROMPTS if p["kind"] != "ttft"]
    long_prompts = [p["prompt"] for p in PROMPTS if p["kind"] == "ttft"]
    cells: dict[str, dict[str, list[float]]] = {name: {} for name in SETTINGS}
    for _ in range(options.repeats):
        for name, arguments in SETTINGS.items():
            with serve("--dtype", options.dtype, "--prefix-caching", "false", *arguments) as server:
                asyncio.run(load.run(server.port, ["warm up"], 1, 8))
                one = asyncio.run(load.run(server.port, prompts[::3], 1, options.tokens))
                four = asyncio.run(load.run(server.port, prompts, 4, options.tokens))
                sixteen = asyncio.run(load.run(server.port, (prompts * 2)[:16], 16, options.tokens))
                ttft = asyncio.run(load.run(server.port, long_prompts, 1, 1))
            values = (one.decode_tokens_per_s, four.output_tokens_per_s, sixteen.output_tokens_per_s, ttft.ttft_p50_ms)
            for column, value in zip(("1", "4", "16", "ttft"), values, strict=True):
                cells[name].setdefault(column, []).append(value)
    for name, columns in cells.items():
        table.add_row(name, *(f"{statistics.median(columns[c]):.0f}" for c in ("1", "4", "16", "ttft")))
    return table


if __name__ == "__main__":
    main()
