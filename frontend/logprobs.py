"""Log-probabilities in the three JSON shapes clients know: completions, chat, and vLLM's prompt_logprobs.

Owns the shapes and the floor that keeps minus infinity out of JSON. Called by `frontend.answers`.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from frontend.packed_logprobs import TokenEntry
from frontend.tokenizer import Tokenizer
from protocol.messages import TokenLogprobs

LOWEST = -9999.0  # vLLM's floor: JSON has no minus infinity

Json = dict[str, Any]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def completion_logprobs(entries: Iterable[TokenEntry], tokenizer: Tokenizer, shift: int) -> Json:
    """OpenAI's columns. `shift`: characters before the entries' text. The top list of a token without one is null.

    Tokens that are part of a character share the text U+FFFD; of those the most likely is shown.
    """
    columns: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        given = entry.logprobs
        columns["text_offset"].append(entry.offset + shift)
        columns["tokens"].append(tokenizer.token_text(entry.token_id))
        columns["token_logprobs"].append(None if given is None else finite(given.logprob))
        top: dict[str, float] | None = None
        if given is not None:
            top = {}
            for token_id, logprob, _ in _ranked(entry.token_id, given):
                top.setdefault(tokenizer.token_text(token_id), finite(logprob))
        columns["top_logprobs"].append(top)
    return columns


def chat_logprobs(entries: Iterable[TokenEntry], tokenizer: Tokenizer) -> Json:
    """OpenAI's list of tokens, each with its bytes and its most likely alternatives."""
    content = []
    for entry in entries:
        given = entry.logprobs
        if given is None:
            continue
        tops = zip(given.top_ids, given.top_logprobs, strict=True)
        content.append(
            {
                **_chat_token(entry.token_id, given.logprob, tokenizer),
                "top_logprobs": [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in tops],
            }
        )
    return {"content": content}


def prompt_logprobs(
    token_ids: tuple[int, ...], given: Iterable[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[Json | None]:
    """vLLM's list: null for the first token, then {token id: {logprob, rank, decoded_token}}."""
    return [
        None
        if logprobs is None
        else {
            str(candidate): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(candidate),
            }
            for candidate, logprob, rank in _ranked(token_id, logprobs)
        }
        for token_id, logprobs in zip(token_ids, given, strict=True)
    ]


def _ranked(token_id: int, given: TokenLogprobs) -> Iterator[tuple[int, float, int]]:
    """(id, logprob, rank) of the most likely tokens, then of the chosen one when it is not among them."""
    for rank, (candidate, logprob) in enumerate(zip(given.top_ids, given.top_logprobs, strict=True), start=1):
        yield candidate, logprob, rank
    if token_id not in given.top_ids:
        yield token_id, given.logprob, given.rank


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
