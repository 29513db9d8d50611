"""What tests of export share: a span, and the account of a queue once it has come to rest."""

import time
from collections.abc import Callable

from frontend.span_export import ExportStats, SpanQueue
from frontend.spans import Resource, SpanKind, SpanRecord, Trace

RESOURCE = Resource((("service.name", "drafthouse-engine"),))
TRACE = Trace(b"t" * 16, "")
WAIT_S = 30.0


def stage(number: int = 0, **changes: object) -> SpanRecord:
    fields: dict[str, object] = {
        "resource": RESOURCE,
        "trace": TRACE,
        "span_id": b"spanspan",
        "parent_id": None,
        "name": f"stage {number}",
        "kind": SpanKind.INTERNAL,
        "start_ns": 1,
        "end_ns": 2,
    }
    return SpanRecord(**(fields | changes))  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "condition not met"
        time.sleep(0.002)


def settled(queue: SpanQueue) -> ExportStats:
    """The account once nothing is queued or on its way; it balances."""
    until(lambda: queue.stats.size == 0 and queue.stats.in_flight == 0)
    return balanced(queue.stats)


def balanced(stats: ExportStats) -> ExportStats:
    assert stats.put == stats.exported + sum(stats.dropped.values()) + stats.size + stats.in_flight
    return stats


def drops(stats: ExportStats) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in stats.dropped.items() if count}


def failures(stats: ExportStats) -> set[str]:
    return {reason.name.lower() for reason, count in stats.failures.items() if count}
