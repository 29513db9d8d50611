"""Token ids to text, a step at a time.

Owns the bytes of a character that is not complete yet. Never looks at words: stop strings are `frontend.stop_strings`.
Called by it, once per child of a request; not shared between threads.
"""

import codecs
from collections.abc import Iterable

from frontend.tokenizer import Tokenizer


class Detokenizer:
    """Joined output equals all token bytes decoded at once with errors="replace", however they are split.

    An unfinished character at the end becomes one U+FFFD, streaming or not.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters these tokens complete. Raises ValueError for an id outside the vocabulary."""
        added = b"".join([self._token_bytes(token_id) for token_id in token_ids if token_id not in self._hidden])
        return self._decoder.decode(added)

    def finish(self) -> str:
        """What is left of a character that never became complete: "" or one U+FFFD."""
        return self._decoder.decode(b"", final=True)
