"""Log-probabilities that wait until an answer is written, packed: an eighth of what they take as objects.

Owns how many bytes a token costs meanwhile, which is what admission counts with. Holds every number exactly as the engine sent
it. Never spells them (`frontend.logprobs`). Filled by `frontend.choices` and `frontend.prompt_run`, read once by
`frontend.answers`.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.messages import TokenLogprobs

# Of one token, and of each of its alternatives: the items of the arrays below. An array that grows has a sixteenth of room.
TOKEN_BYTES = 24
ALTERNATIVE_BYTES = 12
_NO_RANK = 0  # ranks begin at 1


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Log-probabilities of one token, and where its text begins in the child's text (characters)."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


def most_bytes(num_tokens: int, num_alternatives: int | None) -> int:
    """What so many tokens take at most; None: nobody asked for log-probabilities."""
    return 0 if num_alternatives is None else num_tokens * (TOKEN_BYTES + num_alternatives * ALTERNATIVE_BYTES)


class PackedLogprobs:
    """Of consecutive tokens; None for one that has none. Iterating makes the objects again, one at a time."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_top_ids", "_top_logprobs")

    def __init__(self, given: Iterable[TokenLogprobs | None] = ()) -> None:
        self._ranks = array("i")
        self._logprobs = array("d")
        self._ends = array("I")  # of each token's alternatives
        self._top_ids = array("i")
        self._top_logprobs = array("d")  # double as on the wire: every bit of what the engine said
        for one in given:
            self.append(one)

    def append(self, given: TokenLogprobs | None) -> None:
        self._ranks.append(_NO_RANK if given is None else given.rank)
        self._logprobs.append(0.0 if given is None else given.logprob)
        if given is not None:
            self._top_ids.extend(given.top_ids)
            self._top_logprobs.extend(given.top_logprobs)
        self._ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        begin = 0
        for rank, logprob, end in zip(self._ranks, self._logprobs, self._ends, strict=True):
            if rank == _NO_RANK:
                yield None
            else:
                yield TokenLogprobs(
                    logprob, rank, tuple(self._top_ids[begin:end]), tuple(self._top_logprobs[begin:end])
                )
            begin = end


class TokenEntries:
    """Entries of consecutive tokens."""

    __slots__ = ("_logprobs", "_offsets", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._offsets = array("I")
        self._logprobs = PackedLogprobs()

    def append(self, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        self._token_ids.append(token_id)
        self._offsets.append(offset)
        self._logprobs.append(logprobs)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[TokenEntry]:
        for token_id, logprobs, offset in zip(self._token_ids, self._logprobs, self._offsets, strict=True):
            yield TokenEntry(token_id, logprobs, offset)
