"""One child of one request, from engine outputs to pieces of answer.

Owns what a client may see of a child: its text up to the stop, the tokens that belong to it, how it ended, and when the
engine must be told. Streaming and not, chat and completions all read it, so they agree by construction. Never does I/O.
Called by `frontend.generation`.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from frontend.packed_logprobs import PackedLogprobs, TokenEntries, TokenEntry
from frontend.prediction import PredictionUse
from frontend.spec_stats import WantedStatistics
from frontend.stop_strings import StopMatcher
from frontend.tokenizer import Tokenizer
from protocol.messages import Finish, SequenceOutput
from protocol.reasons import CloseReason, FinishReason

_UNNATURAL = (FinishReason.ERROR, FinishReason.ABORT)


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How the children of a request turn tokens into text, and whether they keep statistics of their rounds."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int
    wants_logprobs: bool
    statistics: WantedStatistics | None = None
    has_prediction: bool = False
    synthetic: str = ""  # as `Hello` has it; not "": the text is not the model's, and the answer says so

    @property
    def awaits_close(self) -> bool:
        """With stop strings only the frontend knows where a child ends."""
        return bool(self.stops)


@dataclass(frozen=True, slots=True)
class CloseOrder:
    """What the engine must be told about a child."""

    reason: CloseReason
    kept: int


@dataclass(slots=True)
class Piece:
    """What a client has not seen yet of one child."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: TokenEntries | None = None  # None: nobody asked for log-probabilities, or there is no token
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_first: bool = True  # of its child


class _State(Enum):
    OPEN = auto()
    CLOSING = auto()  # its text is final, the engine has yet to answer our Close
    CLOSED = auto()


class Choice:
    """State of one child. `index` is the client's numbering, over all prompts."""

    def __init__(self, index: int, tokenizer: Tokenizer, settings: TextSettings) -> None:
        self.index = index
        self.num_tokens = 0  # that belong to the answer: up to and including the one that completed a stop
        self.failure: Finish | None = None
        self.finish_reason = "abort"  # until it has ended by itself
        self.is_seen = False  # a piece of it was taken
        # Of its rounds; None where nobody wants them or they cannot be complete.
        self.statistics = None if settings.statistics is None else settings.statistics.begin()
        self.prediction = PredictionUse() if settings.has_prediction else None  # None as for the statistics
        self._settings = settings
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._matcher = StopMatcher(
            tokenizer,
            settings.stops,
            include_stop=settings.include_stop,
            skip_special_tokens=settings.skip_special_tokens,
            min_tokens=settings.min_tokens,
        )
        self._offsets = _Offsets(tokenizer, settings.skip_special_tokens) if settings.wants_logprobs else None
        self._state = _State.OPEN
        self._pending = Piece()

    @property
    def is_closed(self) -> bool:
        return self._state is _State.CLOSED

    @property
    def is_closing(self) -> bool:
        return self._state is _State.CLOSING

    @property
    def is_complete(self) -> bool:
        """It ended by itself: its answer stands, whatever becomes of its engine."""
        return self.is_closed and self.failure is None

    def push(self, output: SequenceOutput, sources: Sequence[str] = ()) -> CloseOrder | None:
        """Take one step of this child; return what to tell the engine, if anything. `sources` names the engine's drafts."""
        num_before = self.num_tokens
        order = self._push(output)
        if self.prediction is not None and output.round is not None:
            self.prediction.add(output.round, sources, self.num_tokens - num_before)
        return order

    def _push(self, output: SequenceOutput) -> CloseOrder | None:
        if self.statistics is not None and output.round is not None:
            # In every state: the engine has counted rounds behind a stop string too, the last rides on the closing output.
            self.statistics.add(output.round)
        if self._state is _State.CLOSING:
            # Tokens behind the end are dropped. A finish without tokens is the answer to our Close; one with tokens is
            # a natural end that crossed with it.
            if output.finish is not None and (not output.token_ids or output.finish.reason in _UNNATURAL):
                self._state = _State.CLOSED
            return None
        if self._state is _State.CLOSED:
            return None
        finish = output.finish
        if finish is not None and finish.reason in _UNNATURAL:
            self.failure = finish
            self._state = _State.CLOSED
            return None
        self._take_tokens(output)
        return self._end(finish)

    def take(self) -> Piece | None:
        """What can be sent now, or None. A child's last piece is held until the engine has answered its Close."""
        pending = self._pending
        if self._state is _State.CLOSING:
            return None
        if not pending.text and pending.finish_reason is None:
            return None  # tokens whose text is held back ride on the next piece
        self._pending = Piece(is_first=False)
        self.is_seen = True
        return pending

    def give_up_waiting(self) -> None:
        """Let the last piece go although the engine has not answered. Rounds may be missing: no statistics."""
        if self._state is _State.CLOSING:
            self.statistics = self.prediction = None
            self._state = _State.CLOSED

    def _take_tokens(self, output: SequenceOutput) -> None:
        finish, token_ids = output.finish, output.token_ids
        stopped = (
            finish is not None
            and finish.reason is FinishReason.STOP
            and bool(token_ids)
            and (finish.stop_token_id is not None or token_ids[-1] in self._eos_token_ids)
        )
        piece = self._matcher.feed(token_ids, ends_with_stop_token=stopped)
        kept = token_ids[: piece.num_tokens]
        self.num_tokens += len(kept)
        self._pending.text += piece.text
        self._pending.token_ids.extend(kept)
        if self._offsets is not None:
            entries = self._pending.entries = self._pending.entries or TokenEntries()
            for token_id, logprobs in zip(kept, output.logprobs or [None] * len(kept)):
                entries.append(token_id, logprobs, self._offsets.advance(token_id))

    def _end(self, finish: Finish | None) -> CloseOrder | None:
        matched = self._matcher.matched
        if matched is not None:
            self._finish("stop", matched)
            return self._closing(CloseReason.STOP_STRING)
        if finish is None:
            return None
        self._pending.text += self._matcher.finish()
        self._finish(finish.reason.label, finish.stop_token_id)
        return self._closing(CloseReason.DELIVERED)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = self._pending.finish_reason = reason
        self._pending.stop_reason = stop_reason

    def _closing(self, reason: CloseReason) -> CloseOrder | None:
        if not self._settings.awaits_close:
            self._state = _State.CLOSED
            return None
        self._state = _State.CLOSING
        return CloseOrder(reason, self.num_tokens)


class _Offsets:
    """Where each token's text begins. A token inside a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def advance(self, token_id: int) -> int:
        begins = self._offset
        if token_id not in self._hidden:
            self._offset += len(self._decoder.decode(self._token_bytes(token_id)))
        return begins


def prompt_entries(
    token_ids: tuple[int, ...], logprobs: PackedLogprobs | None, tokenizer: Tokenizer
) -> Iterator[TokenEntry]:
    """The prompt's tokens as entries, for `echo`. The first has no log-probability: nothing precedes it."""
    offsets = _Offsets(tokenizer, skip_special_tokens=False)
    for token_id, given in zip(token_ids, logprobs or [None] * len(token_ids)):
        yield TokenEntry(token_id, given, offsets.advance(token_id))
