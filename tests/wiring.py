"""Messages and a hand-driven engine for tests of the wire: real sockets, no scheduler."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.wire import Wire
from protocol.codec import encode_counters
from protocol.counters import Counters
from protocol.messages import (
    SCHEMA_VERSION,
    Capacity,
    Finish,
    Hello,
    Load,
    PhaseTimes,
    SequenceOutput,
    StepOutcome,
    StepOutput,
)
from protocol.reasons import FinishReason

EPOCH = 1_700_000_000_000_000_000
IDLE = Load(0, 0, 0, 0, 64, 0, 0, False)
CAPACITY = Capacity(1024, 64, 512, 16, 64, 1024, 1 << 20, True)


def totals(**values: int) -> Counters:
    """Counters with three draft positions and one source; the named fields are set."""
    counters = Counters.zero(3, 1)
    for name, value in values.items():
        setattr(counters, name, value)
    return counters


def hello(**changes: object) -> Hello:
    base = Hello(
        engine_id="0", epoch=EPOCH, schema=SCHEMA_VERSION, model_name="tiny", vocab_size=100, vocabulary_hash="abc",
        capacity=CAPACITY, speculator="ngram", max_draft_len=3, sources=("ngram",), executor="sim", dtype="none",
        device="none", step_id=0, counters=encode_counters(totals()), load=IDLE, monotonic_ns=0, wall_ns=0,
    )  # fmt: skip
    changed = msgspec.structs.replace(base, **changes)
    if "counters" in changes:
        return changed
    zero = encode_counters(Counters.zero(changed.max_draft_len, len(changed.sources)))
    return msgspec.structs.replace(changed, counters=zero)


def step(step_id: int, *outputs: SequenceOutput, epoch: int = EPOCH, counters: Counters | None = None) -> StepOutput:
    return StepOutput(
        engine_id="0", epoch=epoch, step_id=step_id, started_ns=0, outcome=StepOutcome.OK,
        phases=PhaseTimes(((0, 0),) * 4, False), counters=encode_counters(counters or totals(steps_ok=step_id)),
        load=IDLE, outputs=outputs,
    )  # fmt: skip


def tokens(
    request_id: int, first: int, *ids: int, index: int = 0, finish: FinishReason | None = None
) -> SequenceOutput:
    ending = None if finish is None else Finish(finish)
    return SequenceOutput(request_id, index, first, ids, None, None, None, (), ending)


class HandEngine:
    """A wire whose step thread is the test."""

    def __init__(self, wire: Wire, epoch: int) -> None:
        self.wire = wire
        self.epoch = epoch
        self.step_id = 0

    def publish(self, outputs: dict[str, tuple[SequenceOutput, ...]] | None = None, **counts: int) -> None:
        self.step_id += 1
        counters = totals(steps_ok=self.step_id, **counts)
        snapshot = step(self.step_id, epoch=self.epoch, counters=counters)
        addressed = {
            frontend_id: msgspec.structs.replace(snapshot, outputs=(outputs or {}).get(frontend_id, ()))
            for frontend_id in self.wire.frontends()
        }
        self.wire.send(addressed, snapshot)

    def receive(self, count: int = 1, timeout_s: float = 3.0) -> list[tuple[str, object]]:
        """The next `count` arrivals or more."""
        deadline = time.monotonic() + timeout_s
        arrivals: list[tuple[str, object]] = []
        while len(arrivals) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"only {arrivals} arrived"
            self.wire.wait(left)
            arrivals += self.wire.drain()
        return arrivals


@contextmanager
def hand_engine(address: str, **changes: object) -> Iterator[HandEngine]:
    """A started wire on `address`; closed at the end."""
    greeting = hello(**changes)
    wire = Wire(address, greeting)
    wire.start()
    try:
        yield HandEngine(wire, greeting.epoch)
    finally:
        wire.close()
