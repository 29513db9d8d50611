"""The counting laws of the telemetry contract, section 1, read over HTTP between two scrapes.

Knows family names only. `increments` is the ledger a test compares its own sums with.
"""

import math
import re
from dataclasses import dataclass

from tests.cases.client import Speculation, speculation_delta, total

ENGINE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

FRONTEND_SCOPE = re.compile(
    "vllm:(request_|time_to_first_token|inter_token_latency|e2e_request|admission_)|http_|process_|python_"
    "|drafthouse:(inter_token|requests_abandoned|connections_refused|fence_timeouts|close_|unknown_fields)"
)


def engine_scope(samples: dict[str, float]) -> dict[str, float]:
    """Without what each frontend counts for itself: two scrapes of different frontends can be compared."""
    return {series: value for series, value in samples.items() if not FRONTEND_SCOPE.match(series)}


def labelled(samples: dict[str, float], family: str, **labels: str) -> float:
    """Sum of the family's series that carry these labels."""
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return sum(
        value
        for series, value in samples.items()
        if series.split("{")[0] == family and all(label in series for label in wanted)
    )


@dataclass(frozen=True)
class Increments:
    """What the engine counted between two scrapes. Tokens unless named otherwise."""

    speculation: Speculation
    draft_rounds: float
    plain_rounds: float
    cut: float
    trimmed: float
    aborted_rounds: float
    generation: float
    prompt: float
    steps: float
    preemptions: float

    @property
    def rounds(self) -> float:
        return self.draft_rounds + self.plain_rounds


def increments(before: dict[str, float], after: dict[str, float], width: int) -> Increments:
    """Increments between two scrapes of one epoch, with SUMS checked."""

    def delta(family: str, **labels: str) -> float:
        return labelled(after, family, **labels) - labelled(before, family, **labels)

    result = Increments(
        speculation=speculation_delta(before, after, width),
        draft_rounds=delta("drafthouse:verify_rounds_total", kind="draft"),
        plain_rounds=delta("drafthouse:verify_rounds_total", kind="plain"),
        cut=delta("drafthouse:spec_cut_tokens_total"),
        trimmed=delta("drafthouse:stop_trimmed_tokens_total"),
        aborted_rounds=delta("drafthouse:spec_aborted_rounds_total"),
        generation=delta("vllm:generation_tokens_total"),
        prompt=delta("vllm:prompt_tokens_total"),
        steps=delta("drafthouse:steps_total"),
        preemptions=delta("vllm:num_preemptions_total"),
    )
    assert result.draft_rounds == result.speculation.drafts
    assert 0 <= result.aborted_rounds <= result.rounds
    assert 0 <= result.trimmed <= result.generation
    return result


def assert_laws(before: dict[str, float], after: dict[str, float], width: int, first_tokens: int) -> Increments:
    """Every law of section 1 that two scrapes can show. `first_tokens`: children whose prompt gave a token."""
    counted = increments(before, after, width)
    spent = first_tokens + counted.speculation.accepted + counted.rounds - counted.cut
    assert counted.generation == spent, counted
    return counted


def assert_well_formed(page: str) -> None:
    """Line by line what both bench clients and Prometheus can read; nothing twice, nothing negative, nothing NaN."""
    seen = set()
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{[^ ]*\})? \S+", line), line
        series, value = line.split(" ")
        assert series not in seen, f"twice: {series}"
        seen.add(series)
        assert not math.isnan(float(value)), line
        assert float(value) >= 0, line


def families(samples: dict[str, float], prefix: str) -> set[str]:
    return {series.split("{")[0] for series in samples if series.startswith(prefix)}


def gauges(samples: dict[str, float]) -> dict[str, float]:
    return {family: total(samples, family) for family in ENGINE_GAUGES}
