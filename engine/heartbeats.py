"""When the engine must say something although no step was published.

Owns the rule as arithmetic on times: silence, the clock anchor, and a drain that frontends have not heard of. Never sends and never
reads a clock: times are passed in. Used by the I/O thread of engine.wire only.
"""

from dataclasses import dataclass

from protocol.endpoints import HEARTBEAT_INTERVAL_S

HEARTBEAT_NS = int(HEARTBEAT_INTERVAL_S * 1e9)
# Steps carry no clock anchor, and under constant load nothing else would be sent: at the drift of ordinary clocks
# (100 ppm) an anchor of 10 s is 1 ms off, less than the spans that are placed by it.
ANCHOR_NS = 10_000_000_000


@dataclass
class Heartbeats:
    """What was said last, to all frontends alike. Times in ns of the engine's monotonic clock."""

    last_sent_ns: int
    last_beat_ns: int
    is_drain_told: bool = False

    def stepped(self, now_ns: int, *, said_draining: bool) -> None:
        """A step was published. One that began before the drain takes back what a heartbeat said: it must be said again."""
        self.last_sent_ns = now_ns
        self.is_drain_told = said_draining

    def beat(self, now_ns: int, *, said_draining: bool) -> None:
        """A heartbeat was sent."""
        self.last_sent_ns = self.last_beat_ns = now_ns
        self.is_drain_told = said_draining

    def is_due(self, now_ns: int, *, is_draining: bool) -> bool:
        """Whether a heartbeat must be sent now."""
        if is_draining and not self.is_drain_told:
            return True
        return now_ns - self.last_sent_ns >= HEARTBEAT_NS or now_ns - self.last_beat_ns >= ANCHOR_NS
