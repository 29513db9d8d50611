"""A request's way back that survives the loss of its engine, as long as nobody has seen a token of it.

Owns when a request is given to another engine: once, and only before its first token, because tokens that were seen cannot be
taken back and another engine would not say the same. Never chooses an engine and never waits for one. Made by
`frontend.engine_pool`, read by `frontend.generation` as any stream.
"""

from collections.abc import Callable, Sequence

from frontend.streams import EngineLost, Stream
from protocol.messages import SequenceOutput
from protocol.reasons import CloseReason, RejectReason

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
        """As `Stream.next`. Raises `EngineLost` when the request cannot be given to another engine."""
        while True:
            try:
                outputs = await self._stream.next()
            except EngineLost:
                if not self._retry():
                    raise
                continue
            if _is_turned_away(outputs) and self._retry():
                continue
            if any(output.token_ids for output in outputs):
                self._again = None
            return outputs

    def close(self, index: int, reason: CloseReason, kept: int = 0) -> None:
        self._stream.close(index, reason, kept)

    def abandon(self) -> None:
        self._again = None
        self._stream.abandon()

    def _retry(self) -> bool:
        """Whether the request runs at another engine now."""
        again, self._again = self._again, None
        stream = None if again is None else again(self.engine_id)
        if stream is None:
            return False
        self._stream.abandon()  # nothing, unless part of it still runs there
        self._stream = stream
        return True


def _is_turned_away(outputs: list[SequenceOutput]) -> bool:
    """The engine began to drain while the request was on its way: it never ran."""
    return bool(outputs) and all(
        output.finish is not None and output.finish.rejected is RejectReason.DRAINING for output in outputs
    )
