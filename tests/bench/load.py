"""A streaming load generator that costs little CPU, so that on a small machine it measures the server and not itself.

Speaks HTTP/1.1 over asyncio streams by hand; an HTTP client library would take a third of two cores at these rates.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field


@dataclass
class Sample:
    """One finished request. Times in seconds of time.perf_counter."""

    started: float
    first: float
    last: float
    tokens: int
    prompt_tokens: int
    gaps_s: list[float] = field(default_factory=list)  # between chunks


@dataclass
class Run:
    """All requests of one measurement."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Prefill included: what one pays for."""
        return sum(s.tokens for s in self.samples) / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Per stream, first token and prefill excluded."""
        return sum(s.tokens - 1 for s in self.samples) / sum(s.last - s.first for s in self.samples)

    @property
    def ttft_p50_ms(self) -> float:
        return statistics.median(s.first - s.started for s in self.samples) * 1e3


async def chat(port: int, prompt: str, max_tokens: int, extra: dict[str, object]) -> Sample:
    """Stream one greedy chat completion of exactly `max_tokens` tokens (EOS ignored) from 127.0.0.1:port."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    raw = json.dumps(body).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
    )
    try:
        return await _read_stream(reader, started)
    finally:
        writer.close()


async def _read_stream(reader: asyncio.StreamReader, started: float) -> Sample:
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
    first = last = 0.0
    gaps_s: list[float] = []
    usage: dict[str, int] = {}
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        if b'"choices":[]' in line or b'"usage":{' in line:
            usage = json.loads(line[6:])["usage"]
        else:
            now = time.perf_counter()
            if last:
                gaps_s.append(now - last)
            last = now
            first = first or last
    if not usage:
        raise RuntimeError("the stream ended without usage")
    return Sample(started, first, last, usage["completion_tokens"], usage["prompt_tokens"], gaps_s)


async def run(port: int, prompts: list[str], concurrency: int, max_tokens: int, **extra: object) -> Run:
    """Send every prompt once, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    result = Run()

    async def one(prompt: str) -> None:
        async with gate:
            result.samples.append(await chat(port, prompt, max_tokens, extra))

    started = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    result.wall_s = time.perf_counter() - started
    return result
