"""Whether what an engine says of itself can be true: the part of its Hello that every page and every limit is built from.

Owns the rules. One engine that contradicts itself would take the metrics page of all engines with it, and the smallest of all
contexts is everybody's limit: it is refused before anything looks at it. Keeps nothing. Called by `frontend.attachment`.
"""

import re

import msgspec

from protocol.codec import MalformedMessage, decode_counters
from protocol.counters import Counters, Histogram, bounds_of
from protocol.messages import Capacity, Hello
from protocol.served_name import check_served_model_name

MAX_DRAFT_LEN = 4096  # every position is a series on the page of every frontend
MAX_SOURCES = 64
_ENGINE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_RATE = re.compile(r"\d\.?\d{0,16}(e-\d{1,3})?", re.ASCII)
_MAY_BE_ZERO = ("max_num_queued_requests", "max_num_queued_tokens")


def contradiction(hello: Hello) -> str | None:
    """What cannot be true of any engine, in words that follow "the engine contradicts itself"; None for a sound Hello."""
    if _ENGINE_ID.fullmatch(hello.engine_id) is None:
        return f"its id is {hello.engine_id[:64]!r}"
    try:
        check_served_model_name(hello.model_name)
    except ValueError:
        return f"its model is called {hello.model_name[:64]!r}"
    if hello.epoch <= 0 or hello.step_id < 0 or hello.vocab_size <= 0:
        return f"its epoch is {hello.epoch}, its step {hello.step_id} and its vocabulary {hello.vocab_size}"
    if not 0 <= hello.max_draft_len <= MAX_DRAFT_LEN or len(hello.sources) > MAX_SOURCES:
        return f"it drafts {hello.max_draft_len} tokens from {len(hello.sources)} sources"
    if hello.synthetic and not _are_rates(hello.synthetic, hello.max_draft_len):
        return f"its synthetic acceptance is {hello.synthetic[:64]!r}"
    return _of_capacity(hello.capacity) or _of_counters(hello)


def _are_rates(text: str, count: int) -> bool:
    """One number from 0 to 1 for every draft position: each is a series, and the text goes into every answer."""
    rates = text.split(",")
    return len(rates) == count and all(_RATE.fullmatch(rate) and float(rate) <= 1 for rate in rates)


def _of_capacity(capacity: Capacity) -> str | None:
    for name in capacity.__struct_fields__:
        value = int(getattr(capacity, name))
        if value < (0 if name in (*_MAY_BE_ZERO, "prefix_caching") else 1):
            return f"its {name} is {value}"
    return None


def _of_counters(hello: Hello) -> str | None:
    try:
        counters = decode_counters(hello.counters)
    except MalformedMessage as error:
        return f"its totals are none ({error})"
    lengths = {
        "accepted_per_pos": hello.max_draft_len,
        "draft_tokens_by_source": len(hello.sources),
        "accepted_tokens_by_source": len(hello.sources),
    }
    for field in msgspec.structs.fields(Counters):
        value = getattr(counters, field.name)
        if isinstance(value, Histogram):
            value, length = value.counts, len(bounds_of(field.name)) + 1
        else:
            length = lengths.get(field.name, 0)
        if isinstance(value, list) and len(value) != length:
            return f"its {field.name} has {len(value)} entries where {length} belong"
    return None
