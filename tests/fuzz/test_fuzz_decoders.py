"""No bytes make a decoder of the wire do anything but decode or raise MalformedMessage, in bounded time and memory."""

import random
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.attachment import Attachment, Expectation, Lost
from protocol.codec import (
    MAX_REQUEST_BYTES,
    MalformedMessage,
    decode_counters,
    decode_from_engine,
    decode_from_frontend,
    encode,
)
from protocol.messages import Hello
from tests.fuzz.messages import FROM_ENGINE, FROM_FRONTEND, PAYLOADS, PROMISES, any_value, spoiled

DECODERS: dict[str, Callable[[bytes], object]] = {
    "from frontend": decode_from_frontend,
    "from engine": decode_from_engine,
    "counters": decode_counters,
}
by_decoder = pytest.mark.parametrize("name", DECODERS)
by_direction = pytest.mark.parametrize("name", PAYLOADS)


def decode(name: str, payload: bytes) -> bool:
    """Whether it was a message; anything but MalformedMessage fails the test."""
    try:
        DECODERS[name](payload)
    except MalformedMessage:
        return False
    return True


@by_decoder
@settings(max_examples=500, deadline=1000)
@given(payload=st.binary(max_size=400))
def test_random_bytes(name: str, payload: bytes):
    decode(name, payload)


@by_decoder
@settings(max_examples=500, deadline=1000)
@given(tag=st.integers(-1, 12), num_values=st.integers(0, 24), seed=st.integers(0, 2**32))
def test_any_values_behind_any_tag(name: str, tag: int, num_values: int, seed: int):
    rng = random.Random(seed)
    decode(name, msgspec.msgpack.encode([tag, *(any_value(rng) for _ in range(num_values))]))


@by_direction
@settings(max_examples=1000, deadline=1000)
@given(which=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_spoiled_messages(name: str, which: int, seed: int):
    payloads = PAYLOADS[name]
    decode(name, spoiled(payloads[which % len(payloads)], random.Random(seed)))


@by_direction
def test_every_message_cut_short_is_refused_and_whole_ones_are_not(name: str):
    for payload in PAYLOADS[name]:
        assert decode(name, payload)
        for end in range(len(payload)):
            assert not decode(name, payload[:end]), payload[:end]
        assert not decode(name, payload + b"\x00"), "nothing may follow a message"


def test_what_was_decoded_is_what_was_sent():
    assert [decode_from_frontend(encode(message)) for message in FROM_FRONTEND] == FROM_FRONTEND
    assert [encode(decode_from_engine(encode(message))) for message in FROM_ENGINE] == PAYLOADS["from engine"]


@by_direction
@pytest.mark.parametrize("opening", [b"\x91", b"\x81", b"\x81\x01", b"\xdc\x00\x01"], ids=repr)
def test_deep_nesting_is_refused_whatever_stands_before_it(name: str, opening: bytes):
    for payload in PAYLOADS[name]:
        for at in range(0, len(payload), 7):
            decode(name, payload[:at] + opening * 50_000)


@by_direction
def test_lengths_that_promise_gigabytes_cost_nothing(name: str):
    started = time.process_time()
    tracemalloc.start()
    try:
        for payload in PAYLOADS[name]:
            for at in range(1, len(payload)):
                for promise in PROMISES:
                    decode(name, payload[:at] + promise + b"\xff\xff\xff\xff" + b"\x01" * 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - started < 20


def test_the_largest_message_takes_less_time_than_an_engine_may_be_silent():
    size = MAX_REQUEST_BYTES - 100
    payload = b"\x9a\x02\x01\xdd" + size.to_bytes(4, "big") + b"\x01" * size
    started = time.process_time()
    assert not decode("from frontend", payload), "what follows the prompt is missing"
    assert time.process_time() - started < 3.0
    started = time.process_time()
    assert not decode("from frontend", payload + bytes(200)), "it is too large"
    assert time.process_time() - started < 0.1


@settings(max_examples=500, deadline=1000)
@given(seeds=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2**32)), max_size=12))
def test_a_frontend_that_hears_nonsense_loses_its_engine_and_nothing_else(seeds: list[tuple[int, int]]):
    """Messages that decode and make no sense: the attachment ends in `Lost` or goes on."""
    told = []
    attachment = Attachment(told.append, Expectation(None, None))
    payloads = PAYLOADS["from engine"]
    with suppress(Lost, MalformedMessage):
        attachment.apply(decode_from_engine(payloads[0]))
        for which, seed in seeds:
            payload = payloads[which % len(payloads)]
            attachment.apply(decode_from_engine(spoiled(payload, random.Random(seed)) if seed % 3 else payload))
    assert isinstance(told[0], Hello)
