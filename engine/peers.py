"""The attached frontends as the engine sees them: who is alive, who is behind, who must be cut off.

Owns flow control as arithmetic on times and step ids. Never sends, never reads a clock: times are passed in. Used by the
I/O thread of engine.wire only.
"""

from collections import deque
from dataclasses import dataclass, field

from protocol.endpoints import FRONTEND_SILENT_S, MAX_UNACKNOWLEDGED_STEPS
from protocol.messages import FromFrontend, Ping
from protocol.reasons import DetachReason

SILENT_NS = int(FRONTEND_SILENT_S * 1e9)


@dataclass
class Peer:
    """One attached frontend. Times in ns of the engine's monotonic clock."""

    frontend_id: str
    identity: bytes
    heard_ns: int
    unacknowledged: deque[tuple[int, int]] = field(default_factory=deque)  # (step_id, sent_ns), oldest first
    num_received: int = 0  # messages since Attach that are no Ping

    def heard(self, message: FromFrontend, now_ns: int) -> DetachReason | None:
        """Note a sign of life; why it must be cut off now, if what it sent did not arrive exactly once."""
        self.heard_ns = now_ns
        if not isinstance(message, Ping):
            self.num_received += 1
            return None
        self.acknowledged(message.applied_step)
        return None if message.num_sent in (None, self.num_received) else DetachReason.LOST

    def sent(self, step_id: int, now_ns: int) -> None:
        self.unacknowledged.append((step_id, now_ns))

    def acknowledged(self, step_id: int) -> None:
        """The frontend applied every step up to `step_id`."""
        while self.unacknowledged and self.unacknowledged[0][0] <= step_id:
            self.unacknowledged.popleft()

    @property
    def is_behind(self) -> bool:
        """Its rows pause until it acknowledges."""
        return len(self.unacknowledged) > MAX_UNACKNOWLEDGED_STEPS

    def verdict(self, now_ns: int) -> DetachReason | None:
        """Why it must be cut off now, if it must."""
        if self.unacknowledged and now_ns - self.unacknowledged[0][1] > SILENT_NS:
            return DetachReason.BEHIND
        if now_ns - self.heard_ns > SILENT_NS:
            return DetachReason.SILENT
        return None
