"""A request's way back that can lead to another engine, once.

Owns that it is given to another engine once at most, and never by who has left. Never decides that it may be: whether somebody
has seen a part of its answer is known to `frontend.generation`. Never chooses an engine and never waits for one. Made by
`frontend.engine_pool`, read by `frontend.generation` as any stream.
"""

from collections.abc import Callable, Sequence

from frontend.streams import Stream
from protocol.messages import SequenceOutput
from protocol.reasons import CloseReason

Again = Callable[[str], Stream | None]  # (engine that was lost) -> the request at another one; None where there is none


class RetriedStream:
    """One request at its engine, and then perhaps at another. Closes go to the one that runs it now."""

    def __init__(self, stream: Stream, again: Again) -> None:
        self._stream = stream
        self._again: Again | None = again  # None: no more

    @property
    def engine_id(self) -> str:
        """Of the engine that runs it, or did last."""
        return self._stream.engine_id

    @property
    def sources(self) -> Sequence[str]:
        """Of that engine's drafts, by their number in a round."""
        return self._stream.sources

    async def next(self) -> list[SequenceOutput]:
        """As `Stream.next`."""
        return await self._stream.next()

    def close(self, index: int, reason: CloseReason, kept: int = 0) -> None:
        self._stream.close(index, reason, kept)

    def abandon(self) -> None:
        self._again = None
        self._stream.abandon()

    def restart(self) -> bool:
        """Run it from its beginning at another engine; what the first had said is void, and what it still says is not heard.

        False, and nothing happens: no other engine takes it, it was asked for before, or the request was abandoned.
        """
        again, self._again = self._again, None
        stream = None if again is None else again(self.engine_id)
        if stream is None:
            return False
        self._stream.abandon()  # nothing, unless part of it still runs there
        self._stream = stream
        return True
