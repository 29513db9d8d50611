"""Bytes to messages and back, one decoder per direction.

A decoder raises `MalformedMessage` for anything that is not exactly a message of its direction; callers count it and go
on. Counters stay encoded (`msgspec.Raw`) until somebody looks: decoding them costs 16-30 us.
"""

from typing import TypeVar

import msgspec

from protocol.counters import Counters
from protocol.messages import FromEngine, FromFrontend

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Decoding takes up to 0.1 us per byte (a Submit of one-byte ids), and the engine's I/O thread says nothing meanwhile: 16 MiB
# are 1.6 s, and frontends give an engine up after 3. A request body has at most that size, and its Submit is no larger.
MAX_REQUEST_BYTES = 16 * 1024 * 1024

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_from_frontend = msgspec.msgpack.Decoder(FromFrontend)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_counters = msgspec.msgpack.Decoder(Counters)


class MalformedMessage(ValueError):
    """Bytes that are no message of the expected direction."""


def encode(message: FromFrontend | FromEngine) -> bytes:
    return _encoder.encode(message)


def encode_counters(counters: Counters) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(counters))


def decode_from_frontend(payload: bytes) -> FromFrontend:
    return _decode(_from_frontend, payload, MAX_REQUEST_BYTES)


def decode_from_engine(payload: bytes) -> FromEngine:
    return _decode(_from_engine, payload, MAX_MESSAGE_BYTES)


def decode_counters(raw: msgspec.Raw | bytes) -> Counters:
    try:
        return _counters.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MalformedMessage(str(error)) from error


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes, limit: int) -> _T:
    if len(payload) > limit:
        raise MalformedMessage(f"message of {len(payload)} bytes; the limit is {limit}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from error
