"""One request's way back: outputs wait here until its handler takes them.

Owns continuity (`first_index` has no gap), which children still owe an answer, and how a lost engine ends a stream. Never
touches a socket; the engine client feeds it, the handlers of completions read it. Memory: a slow reader accumulates at
most its own request's outputs, those with log-probabilities in the form they had on the wire.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from frontend.stream_trace import StreamTrace
from protocol.messages import SequenceOutput
from protocol.reasons import CloseReason, FinishReason

ALL_CHILDREN = -1
DEFAULT_ENGINE_ID = "0"
MOST_AT_ONCE = 256  # outputs handed out in one call: those that waited for a slow reader grow to objects again


class EngineLost(Exception):
    """The engine died, restarted, cut this frontend off, or lost a message. The text says which, for the client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SequenceOutput)

SendClose = Callable[[int, int, CloseReason, int], None]  # (request_id, index, reason, kept)


class Stream:
    """What the engine says about one request. Used from the event loop's thread only.

    A child is done when its closing output was received: the output with `finish`; for a request with `awaits_close`
    that ended by STOP or LENGTH, the answer to its `close`.
    """

    def __init__(
        self,
        request_id: int,
        n: int,
        *,
        awaits_close: bool,
        send_close: SendClose,
        trace: StreamTrace | None = None,
        engine_id: str = DEFAULT_ENGINE_ID,
        sources: Sequence[str] = (),
    ) -> None:
        self.request_id = request_id
        self.n = n
        self.engine_id = engine_id  # of the engine that runs it
        self.sources = sources  # names of that engine's drafts, by their number in a round
        self.trace = trace  # None for an untraced request
        self._awaits_close = awaits_close
        self._send_close = send_close
        self._next_index = [0] * n
        self._open = set(range(n))
        self._closing: set[int] = set()
        self._pending: list[SequenceOutput | bytes] = []
        self._failure: EngineLost | None = None
        self._abandoned = False
        self._arrived = asyncio.Event()

    async def next(self) -> list[SequenceOutput]:
        """What arrived since the last call, in order, MOST_AT_ONCE at most; waits for at least one output.

        Empty exactly when all children are done and everything was handed out. Raises `EngineLost` after what arrived
        before the loss was handed out.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        pending = self._pending[:MOST_AT_ONCE]
        del self._pending[:MOST_AT_ONCE]
        return [_decoder.decode(one) if isinstance(one, bytes) else one for one in pending]

    def close(self, index: int, reason: CloseReason, kept: int = 0) -> None:
        """Ask the engine to end child `index`; its closing output follows. No effect on a child that is done."""
        if index not in self._open or self._failure is not None:
            return
        self._closing.add(index)
        if self.trace is not None:
            self.trace.closing(index, kept)
        self._send_close(self.request_id, index, reason, kept)

    def abandon(self) -> None:
        """The client is gone: close what is open and drop what still comes. Idempotent; call it in `finally`."""
        if self._abandoned:
            return
        self._abandoned = True
        self._pending.clear()
        self._close_all()

    def restart(self) -> bool:
        """False: one stream is at one engine (`frontend.retry` has another)."""
        return False

    @property
    def is_done(self) -> bool:
        """All children are done, or the engine is lost: nothing more will arrive."""
        return not self._open or self._failure is not None

    def is_child_done(self, index: int) -> bool:
        return index not in self._open

    # ---- called by the engine client ----

    def accept(self, output: SequenceOutput) -> None:
        """Queue one output. A gap in the child's tokens fails the whole stream: never silently short."""
        if output.index not in self._open or self._failure is not None:
            return
        expected = self._next_index[output.index]
        if output.first_index != expected and (output.token_ids or output.first_index > expected):
            self._close_all()
            self.fail(f"output was lost: token {expected} expected, token {output.first_index} arrived")
            return
        self._next_index[output.index] = expected + len(output.token_ids)
        if output.finish is not None and self._is_last(output):
            self._open.discard(output.index)
        if not self._abandoned:
            # What waits behind another waits for long. With 20 alternatives a token takes 1.7 kB as objects, 0.3 kB so.
            self._pending.append(_encoder.encode(output) if self._pending and output.logprobs else output)
            self._arrived.set()

    def fail(self, reason: str) -> None:
        """No more outputs will come. The first reason stays."""
        if self._failure is None and self._open:
            self._failure = EngineLost(reason)
            self._arrived.set()
            if self.trace is not None:
                self.trace.lost(reason)

    def _is_last(self, output: SequenceOutput) -> bool:
        """Whether nothing follows this finish. With `awaits_close` a natural end is followed by the answer to Close.

        A natural end that crosses with our Close carries tokens; the answer to a Close never does.
        """
        assert output.finish is not None
        if not self._awaits_close or output.finish.reason in (FinishReason.ABORT, FinishReason.ERROR):
            return True
        return output.index in self._closing and not output.token_ids

    def _close_all(self) -> None:
        if self._open and self._failure is None:
            self._closing |= self._open
            self._send_close(self.request_id, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)
