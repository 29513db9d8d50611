"""The embedded model's text side, built once per test process."""

from functools import lru_cache

from frontend.text import Text, load_text
from frontend.tokenizer import Tokenizer
from protocol.model_files import resolve


@lru_cache(maxsize=1)
def embedded_text() -> Text:
    return load_text(resolve("embedded"))


def embedded_tokenizer() -> Tokenizer:
    return embedded_text().tokenizer
