"""The engine's heart: one step is take, plan, execute, commit, settle, publish.

Owns the order of things and nothing else. Called by engine.__main__; the wire (engine.wire) implements `Inbox` and
`Publisher` without importing this module. Never counts, never looks at a token.
"""

from typing import Protocol

from engine.sequence import Gone
from protocol.messages import Close, Detach, StepOutput, Submit

Arrival = tuple[str, Submit | Close | Detach | Gone]  # (frontend_id, message)


class Inbox(Protocol):
    """What reached the engine, in order per frontend. Called by the step thread only; the I/O thread fills it."""

    def drain(self) -> list[Arrival]:
        """Take every message that arrived. Attach, Ping and Fence are the I/O thread's own and never come here.

        `Detach` and `Gone` (cut off, silent, replaced) come after everything that frontend sent before.
        """

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is something to drain or the paused set changed (True), `wake` was called, or time is up.

        None waits for ever. Must not miss what arrived between the last `drain` and this call.
        """

    def wake(self) -> None:
        """Make a `wait` in progress, or the next one, return. Callable from signal handlers and other threads."""

    def peek_closes(self) -> set[tuple[str, int, int]]:
        """(frontend_id, request_id, index) of every Close not yet drained, index -1 meaning all. Consumes nothing."""

    def paused(self) -> frozenset[str]:
        """Frontends that are behind (too many unacknowledged steps): their rows are not planned."""


class Publisher(Protocol):
    """Where every step goes. Called by the step thread only; never blocks."""

    def frontends(self) -> list[str]:
        """The attached frontends. One that attaches between steps was told everything by its Hello."""

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        """Publish one step: one StepOutput per frontend that `frontends` named, sent even when it carries no output.

        `snapshot` is the same step without outputs: what Hello, heartbeats and fence replies show from now on, also
        when nobody is attached. Before the first step the wire is constructed with `Ledger.snapshot` (step_id 0).
        """

    @property
    def refused_messages(self) -> int:
        """Messages refused since the epoch began: oversized, malformed, foreign."""

    @property
    def frontends_cut_off(self) -> int:
        """Frontends cut off since the epoch began."""
