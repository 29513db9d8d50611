"""From the engine's totals to what changed: the newest snapshot, increments between two looks, the interval log.

Owns the rule that missing, repeated and reordered messages change no total, and that totals never fall within an epoch.
Decodes counters only when somebody looks (16-30 us), never per step. Never adds up engines. `LatestSnapshot.observe` is
the engine client's observer; metrics, interval logs and exports read.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from protocol.codec import decode_counters
from protocol.counters import Counters
from protocol.messages import Detached, FromEngine, Hello, Load

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


class LatestSnapshot:
    """The newest that was heard of one engine. It outlives the engine: totals stay at their last value until a new epoch.

    Only a Hello begins an epoch; messages of an epoch that was replaced, and of steps older than the newest, say nothing.
    """

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.step_id = 0
        self._load: Load | None = None
        self._encoded: msgspec.Raw | None = None
        self._decoded: Counters | None = None
        self._past_epochs: set[int] = set()

    def observe(self, message: FromEngine) -> None:
        """Take in one message; cheap, because it decodes nothing."""
        if isinstance(message, Detached):
            return
        if isinstance(message, Hello) and not self._begin(message):
            return
        if self.hello is None or message.epoch != self.hello.epoch or message.step_id < self.step_id:
            return
        if message.step_id > self.step_id or self._encoded is None:
            self.step_id, self._encoded, self._decoded = message.step_id, message.counters, None
        self._load = message.load

    @property
    def epoch(self) -> int | None:
        return self.hello.epoch if self.hello is not None else None

    @property
    def counters(self) -> Counters:
        """Totals of the current epoch. Read-only. Raises LookupError before the first Hello."""
        if self._decoded is None:
            if self._encoded is None:
                raise LookupError("no engine has said Hello yet")
            self._decoded = decode_counters(self._encoded)
        return self._decoded

    @property
    def load(self) -> Load:
        """Raises LookupError before the first Hello. Stale once the engine is lost."""
        if self._load is None:
            raise LookupError("no engine has said Hello yet")
        return self._load

    def _begin(self, hello: Hello) -> bool:
        """Whether this Hello may be used: of the current epoch, or of one never seen."""
        if self.hello is not None and hello.epoch == self.hello.epoch:
            return True
        if hello.epoch in self._past_epochs:
            return False
        if self.hello is not None:
            self._past_epochs.add(self.hello.epoch)
        self.hello, self.step_id, self._encoded, self._decoded = hello, 0, None, None
        return True


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


class IntervalLog:
    """A line about speculation for every interval that drafted."""

    def __init__(
        self,
        latest: LatestSnapshot,
        log: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` in seconds. What happened before this object was made is not logged."""
        self._delta = SnapshotDelta(latest)
        self._delta.advance()
        self._log = log
        self._clock = clock
        self._since = clock()

    def tick(self) -> None:
        """End the interval: log it if it drafted, begin the next."""
        now = self._clock()
        elapsed_s, self._since = now - self._since, now
        added = self._delta.advance()
        if added is None or added.draft_rounds == 0:
            return
        self._log(
            f"speculation accept_rate={added.accepted_tokens / added.draft_tokens:.3f} "
            f"accept_length={1 + added.accepted_tokens / added.draft_rounds:.2f} rounds={added.draft_rounds} "
            f"generated_per_s={added.generation_tokens / max(elapsed_s, 1e-9):.1f}"
        )

    async def run(self, interval_s: float = LOG_INTERVAL_S) -> None:
        """Tick for ever; cancel to stop."""
        while True:
            await asyncio.sleep(interval_s)
            self.tick()
