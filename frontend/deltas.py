"""From the engine's totals to what changed: the newest snapshot, increments between two looks, the interval log.

Owns the rule that missing, repeated and reordered messages change no total, and that totals never fall within an epoch.
Decodes counters only when somebody looks (16-30 us), never per step. Never adds up engines. `LatestSnapshot.observe` is
the engine client's observer; metrics, interval logs and exports (`frontend.engine_sums`) read.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from protocol.codec import decode_counters
from protocol.counters import Counters
from protocol.messages import FenceReply, FromEngine, Heartbeat, Hello, Load, StepOutput

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
Snapshot = Hello | StepOutput | Heartbeat | FenceReply  # the messages that carry totals


class Heard(NamedTuple):
    """What is known of one engine, all of one moment. Times are unix ns of this frontend's clock."""

    hello: Hello  # the first of its epoch
    hello_at_ns: int
    step_id: int
    counters: msgspec.Raw
    load: Load
    at_ns: int  # when this was heard: the totals are true of then
    ended: "Heard | None"  # the last that was heard of the epoch before this one


class LatestSnapshot:
    """The newest that was heard of one engine. It outlives the engine: totals stay at their last value until a new epoch.

    Only a Hello begins an epoch; messages of an epoch that was replaced, and of steps older than the newest, say nothing.
    `observe` belongs to the event loop's thread; everything else may be read from any thread, because what was heard is
    replaced as one object.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.heard: Heard | None = None
        self._now_ns = now_ns
        self._decoded: tuple[msgspec.Raw, Counters] | None = None
        self._past_epochs: set[int] = set()

    def observe(self, message: FromEngine) -> None:
        """Take in one message; cheap, because it decodes nothing."""
        if not isinstance(message, Snapshot):
            return
        heard = self.heard
        if heard is None or message.epoch != heard.hello.epoch:
            if isinstance(message, Hello) and message.epoch not in self._past_epochs:
                self._begin(message)
            return
        if message.step_id < heard.step_id:
            return
        hello, since_ns, step_id, counters, _, _, ended = heard
        if message.step_id > step_id:
            step_id, counters = message.step_id, message.counters
        self.heard = Heard(hello, since_ns, step_id, counters, message.load, self._now_ns(), ended)

    def is_past(self, epoch: int) -> bool:
        """Whether this epoch was replaced by another: nothing of it is heard any more."""
        return epoch in self._past_epochs

    @property
    def hello(self) -> Hello | None:
        return self.heard.hello if self.heard is not None else None

    @property
    def step_id(self) -> int:
        return self.heard.step_id if self.heard is not None else 0

    @property
    def epoch(self) -> int | None:
        return self.heard.hello.epoch if self.heard is not None else None

    @property
    def counters(self) -> Counters:
        """Totals of the current epoch. Read-only. Raises LookupError before the first Hello."""
        encoded, decoded = self._known().counters, self._decoded
        if decoded is None or decoded[0] is not encoded:
            decoded = self._decoded = (encoded, decode_counters(encoded))
        return decoded[1]

    @property
    def load(self) -> Load:
        """Raises LookupError before the first Hello. Stale once the engine is lost."""
        return self._known().load

    def _known(self) -> Heard:
        if self.heard is None:
            raise LookupError("no engine has said Hello yet")
        return self.heard

    def _begin(self, hello: Hello) -> None:
        """A new epoch: what came before is over, and stragglers of it are known by its number."""
        ended = None
        if self.heard is not None:
            self._past_epochs.add(self.heard.hello.epoch)
            ended = self.heard._replace(ended=None)
            logger.warning(
                "engine_restarted engine=%s epoch=%d ended_epoch=%d ended_step=%d totals=from_zero",
                hello.engine_id, hello.epoch, ended.hello.epoch, ended.step_id,
            )  # fmt: skip
        now_ns = self._now_ns()
        self.heard = Heard(hello, now_ns, hello.step_id, hello.counters, hello.load, now_ns, ended)


class ObservedEngine(NamedTuple):
    """One engine, as those see it who report totals."""

    engine_id: str
    latest: LatestSnapshot
    is_reporter: Callable[[], bool]  # this frontend is attached to it, and its newest load names this frontend


class SnapshotDelta:
    """One reader's position in the totals: what was added since it last looked. The first look counts from zero."""

    def __init__(self, latest: LatestSnapshot) -> None:
        self._latest = latest
        self._epoch: int | None = None
        self._seen: Counters | None = None

    def advance(self) -> Counters | None:
        """The increments since the last call, all of a new epoch's totals when it began since; None before a Hello."""
        if self._latest.epoch is None:
            return None
        now = self._latest.counters
        earlier = self._seen if self._epoch == self._latest.epoch else None
        self._epoch, self._seen = self._latest.epoch, now
        return now if earlier is None else now.minus(earlier)

    def rewind(self) -> None:
        """Begin where the epoch was when it said Hello to this frontend."""
        hello = self._latest.hello
        if hello is not None:
            self._epoch, self._seen = hello.epoch, decode_counters(hello.counters)


class IntervalLog:
    """A line about speculation for every interval that drafted."""

    def __init__(
        self,
        latest: LatestSnapshot,
        log: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` in seconds. What happened before this object was made is not logged."""
        self._latest = latest
        self._delta = SnapshotDelta(latest)
        self._delta.advance()
        self._log = log
        self._clock = clock
        self._since = clock()
        self._engine = ""

    @classmethod
    def of(
        cls, engine: ObservedEngine, log: Callable[[str], None], clock: Callable[[], float], since: float
    ) -> "IntervalLog":
        """For an engine that was met after `since`: what it did before it said Hello is not logged."""
        made = cls(engine.latest, log, clock)
        made._delta.rewind()
        made._since = since
        made._engine = f"engine={engine.engine_id} "
        return made

    def tick(self) -> None:
        """End the interval: log it if it drafted, begin the next."""
        now = self._clock()
        elapsed_s, self._since = now - self._since, now
        added = self._delta.advance()
        if added is None or added.draft_rounds == 0:
            return
        hello = self._latest.hello
        synthetic = f"synthetic_acceptance={hello.synthetic} " if hello is not None and hello.synthetic else ""
        self._log(
            f"speculation {self._engine}{synthetic}accept_rate={added.accepted_tokens / added.draft_tokens:.3f} "
            f"accept_length={1 + added.accepted_tokens / added.draft_rounds:.2f} rounds={added.draft_rounds} "
            f"generated_per_s={added.generation_tokens / max(elapsed_s, 1e-9):.1f}"
        )


class IntervalLogs:
    """An interval log for each engine that is known."""

    def __init__(
        self,
        engines: Callable[[], Sequence[ObservedEngine]],
        log: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._log = log
        self._clock = clock
        self._since = clock()
        self._logs: dict[LatestSnapshot, IntervalLog] = {}

    def tick(self) -> None:
        """End everybody's interval."""
        self._logs = {
            engine.latest: self._logs.get(engine.latest) or IntervalLog.of(engine, self._log, self._clock, self._since)
            for engine in self._engines()
        }
        self._since = self._clock()
        for log in self._logs.values():
            log.tick()

    async def run(self, interval_s: float = LOG_INTERVAL_S) -> None:
        """Tick for ever; cancel to stop."""
        while True:
            await asyncio.sleep(interval_s)
            self.tick()
