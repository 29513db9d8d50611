"""The text of one child of a request, cut at its stop strings.

Owns where a completion's text ends and how many tokens belong to it. Never talks to the engine: its caller sends Close.
Called by the completions handlers, which feed it every token of every step; not shared between threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.detokenizer import Detokenizer
from frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one call to `StopMatcher.feed` gave."""

    text: str  # to send now; may be empty
    num_tokens: int  # of those fed, how many belong to the completion
    matched: str | None  # the stop string that these tokens completed


class StopMatcher:
    """Detokenises token by token and ends the text at the first stop string, wherever tokens or steps are split.

    Held back is only the longest end of the text that begins a stop string. The token that completes a stop string is
    the last one that counts; among stop strings completed by the same token the earliest start wins, then the longest.
    Without stop strings nothing is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop`: text ends after the stop string. Stops completed in the first `min_tokens` tokens do not
        count (vLLM's rule). Raises ValueError for an empty stop string.
        """
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0
        self._matched: str | None = None
        self._is_finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the completion so far: the `kept` of a Close."""
        return self._num_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._matched

    def feed(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Piece:
        """Take the tokens of a step. After a match, tokens are dropped: they lie behind the stop string.

        `ends_with_stop_token`: the engine stopped at the last of these ids (EOS or stop_token_ids); it counts as a
        token, but its text is shown only with `include_stop`.
        """
        if self._is_finished:
            raise RuntimeError("feed() after finish()")
        if self._matched is not None:
            return Piece("", 0, None)
        hidden_from = len(token_ids) - (ends_with_stop_token and not self._include_stop)
        if not self._patterns:  # most requests: 1 us a token instead of 3
            self._num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(token_ids[:hidden_from]), len(token_ids), None)
        emitted = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            added = self._detokenizer.push((token_id,)) if index < hidden_from else ""
            sendable, matched = self._extend(added)
            emitted.append(sendable)
            if matched is not None:
                return Piece("".join(emitted), index + 1, matched)
        return Piece("".join(emitted), len(token_ids), None)

    def finish(self) -> str:
        """End the text: what was held back, and one U+FFFD for an unfinished character. "" after a match or a finish."""
        if self._is_finished or self._matched is not None:
            self._is_finished = True
            return ""
        self._is_finished = True
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()

    def _extend(self, added: str) -> tuple[str, str | None]:
        """Append a token's text; what may be sent, and the stop string that the token completed."""
        text = self._held + added
        matches = [(start, -len(pattern.stop)) for pattern in self._patterns for start in pattern.find(text, added)]
        if matches and self._num_tokens > self._min_tokens:
            start, negative_length = min(matches)
            end = start - negative_length
            self._matched = text[start:end]
            self._held = ""
            return text[: end if self._include_stop else start], self._matched
        num_held = max((pattern.num_matched for pattern in self._patterns), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: constant time per character, whatever the text repeats."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.num_matched = 0  # characters of `stop` that the text so far ends with
        self._first = stop[0]
        self._fallback = _fallback_table(stop)

    def find(self, text: str, added: str) -> list[int]:
        """Advance over `added`, the end of `text`; the starts in `text` of complete matches, at most the first one."""
        if not self.num_matched and self._first not in added:
            return []
        starts: list[int] = []
        position = len(text) - len(added)
        for char in added:
            position += 1
            while self.num_matched == len(self.stop) or (self.num_matched and self.stop[self.num_matched] != char):
                self.num_matched = self._fallback[self.num_matched - 1]
            self.num_matched += self.stop[self.num_matched] == char
            if self.num_matched == len(self.stop) and not starts:
                starts.append(position - len(self.stop))
        return starts


def _fallback_table(stop: str) -> list[int]:
    """For each prefix of `stop` (by its last index), the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return table
