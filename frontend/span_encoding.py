"""Span records spelled as OTLP protobuf, by hand: the bytes of an ExportTraceServiceRequest, no SDK or protobuf object.

Owns the field numbers of opentelemetry/proto/{trace,common,resource}/v1 and the expansion of a round into its spans.
Never sends, never queues, never reads a clock. Called by `frontend.span_export` on its own thread. The tests hold it to
opentelemetry-proto's decoder and to the SDK's encoder.
"""

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontend.spans import (
    Attributes,
    AttributeValue,
    Record,
    Resource,
    RoundParent,
    RoundRecord,
    SpanEvent,
    SpanKind,
    SpanRecord,
    Trace,
    TraceLevel,
    end_of_step,
)
from protocol.messages import Phase

SCOPE_NAME = "drafthouse"

# span id, tag of the start, start, tag of the end, end: all that differs between two rounds' spans but the attributes
_ID_AND_TIMES = struct.Struct("<QBQBQ")
_SPAN_ID_TAG = b"\x12\x08"
_START_TAG, _END_TAG = 0x39, 0x41  # fields 7 and 8, fixed64
_TIMES = struct.Struct("<BQBQ")
_EVENT_TIME = struct.Struct("<BQ")
_DOUBLE = struct.Struct("<Bd")
_FLAGS = struct.Struct("<HI")  # field 16, fixed32
_FLAGS_TAG = 0x0185
_SAMPLED, _HAS_IS_REMOTE, _IS_REMOTE = 0x001, 0x100, 0x200  # W3C's flag, and OTLP's two bits above it
_ERROR_CODE = b"\x18\x02"
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 63) - 1
_MAX_HEADS = 4096  # parents of rounds remembered; at most 1 KB each
_MAX_TAILS = 4096  # spellings of a round's attributes remembered; counts and source names are few
_DRAFT, _VERIFY, _ACCEPT = int(Phase.DRAFT), int(Phase.VERIFY), int(Phase.ACCEPT)


@dataclass(frozen=True)
class SpanLimits:
    """The limits of OpenTelemetry's environment variables. What is over a count is left out, and the span says so."""

    attributes: int = 128  # per span
    event_attributes: int = 128  # per event
    events: int = 128  # per span
    value_length: int | None = None  # characters kept of a string, and of each string of a list


class SpanEncoder:
    """Records to bytes, for one thread. Between calls it remembers spellings and nothing else."""

    def __init__(self, version: str, limits: SpanLimits) -> None:
        self._scope = _message(1, _text(1, SCOPE_NAME) + _text(2, version))
        self._limits = limits
        self._heads: dict[int, _Head] = {}  # by identity: to hash a frozen struct is to hash all it holds
        self._draft_tails: dict[tuple[int, str], bytes] = {}
        self._verify_tails: dict[int, bytes] = {}

    def encode(self, records: Sequence[Record]) -> bytes:
        """One ExportTraceServiceRequest: a ResourceSpans per resource, with one scope each.

        Such requests joined end to end are one request with the spans of all. Raises TypeError, ValueError or
        IndexError for a record that breaks its types' promises.
        """
        groups: dict[Resource, list[bytes]] = {}
        span_ids = iter(struct.unpack(f"<{3 * len(records)}Q", os.urandom(24 * len(records))))
        for record in records:
            if type(record) is RoundRecord:
                parent = record.parent
                head = self._heads.get(id(parent)) or self._head(parent)
                chunks = groups.get(parent.resource)
                if chunks is None:
                    chunks = groups[parent.resource] = []
                self._add_round(chunks, record, head, span_ids)
            elif type(record) is SpanRecord:
                groups.setdefault(record.resource, []).append(_message(2, _span(record, self._limits)))
            else:
                raise TypeError(f"{type(record).__name__} is no record of a span")
        return b"".join(self._resource_spans(resource, chunks) for resource, chunks in groups.items())

    def _resource_spans(self, resource: Resource, chunks: list[bytes]) -> bytes:
        spans = b"".join(chunks)
        described = _message(1, b"".join(_key_value(1, name, value, None) for name, value in resource.attributes))
        scope_spans = _prefix(2, len(self._scope) + len(spans)) + self._scope
        return b"".join((_prefix(1, len(described) + len(scope_spans) + len(spans)), described, scope_spans, spans))

    def _add_round(self, chunks: list[bytes], record: RoundRecord, head: "_Head", span_ids: Iterator[int]) -> None:
        """The hot path: what a parent's rounds share is spelled once, so that a span costs one pack and two look-ups.
        An all-zero id is invalid, hence `or 1`."""
        parent, verdict, phases = head.parent, record.round, record.phases.spans
        base_ns = parent.offset_ns + record.started_ns
        if parent.speculates:
            verify_start, verify_end = phases[_VERIFY]
            drafted = verdict.drafted
            if drafted:
                source = parent.sources[verdict.source]
                tail = self._draft_tails.get((drafted, source)) or self._draft_tail(drafted, source)
                start, end = phases[_DRAFT]
                if not end:  # drafted without a phase of its own: in no time, just before it was verified
                    start = end = verify_start
                times = _ID_AND_TIMES.pack(next(span_ids) or 1, _START_TAG, base_ns + start, _END_TAG, base_ns + end)
                chunks += (head.drafts.get(len(tail)) or head.draft(len(tail)), times, tail)
            tail = self._verify_tails.get(verdict.accepted) or self._verify_tail(verdict.accepted)
            start, end = base_ns + verify_start, base_ns + (phases[_ACCEPT][1] or verify_end)
            times = _ID_AND_TIMES.pack(next(span_ids) or 1, _START_TAG, start, _END_TAG, end)
            chunks += (head.verifies.get(len(tail)) or head.verify(len(tail)), times, tail)
        if parent.level >= TraceLevel.STEPS:
            tail = _attributes((("decode_ct", record.ordinal),), self._limits.attributes, self._limits.value_length)
            end = base_ns + end_of_step(record.phases)
            times = _ID_AND_TIMES.pack(next(span_ids) or 1, _START_TAG, base_ns, _END_TAG, end)
            chunks += (head.opening("decode_loop", len(tail)), times, tail)

    def _head(self, parent: RoundParent) -> "_Head":
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        head = self._heads[id(parent)] = _Head(parent)
        return head

    def _draft_tail(self, drafted: int, source: str) -> bytes:
        if len(self._draft_tails) >= _MAX_TAILS:
            self._draft_tails.clear()
        attributes: Attributes = (("num_draft_tokens", drafted), ("source", source))
        tail = _attributes(attributes, self._limits.attributes, self._limits.value_length)
        self._draft_tails[drafted, source] = tail
        return tail

    def _verify_tail(self, accepted: int) -> bytes:
        if len(self._verify_tails) >= _MAX_TAILS:
            self._verify_tails.clear()
        tail = _attributes((("num_correct_drafts", accepted),), self._limits.attributes, self._limits.value_length)
        self._verify_tails[accepted] = tail
        return tail


class _Head:
    """What all spans of one parent's rounds begin with. Holds the parent, so that its identity stays its own."""

    __slots__ = ("_shared", "drafts", "parent", "verifies")

    def __init__(self, parent: RoundParent) -> None:
        self.parent = parent
        self.drafts: dict[int, bytes] = {}  # beginnings of spec_draft by the length of the attributes behind it
        self.verifies: dict[int, bytes] = {}
        self._shared = _context(parent.trace, parent.span_id) + _kind_and_flags(SpanKind.INTERNAL, is_remote=False)

    def draft(self, tail_bytes: int) -> bytes:
        opening = self.drafts[tail_bytes] = self.opening("spec_draft", tail_bytes)
        return opening

    def verify(self, tail_bytes: int) -> bytes:
        opening = self.verifies[tail_bytes] = self.opening("spec_verify", tail_bytes)
        return opening

    def opening(self, name: str, tail_bytes: int) -> bytes:
        """All of a span up to its id, for a span that ends with attributes of `tail_bytes`."""
        shared = self._shared + _text(5, name) + _SPAN_ID_TAG
        return _prefix(2, len(shared) + _ID_AND_TIMES.size + tail_bytes) + shared


def _span(record: SpanRecord, limits: SpanLimits) -> bytes:
    parts = [
        _context(record.trace, record.parent_id),
        _kind_and_flags(record.kind, is_remote=record.has_remote_parent),
        _text(5, record.name),
        _SPAN_ID_TAG,
        _exactly(record.span_id, 8),
        _TIMES.pack(_START_TAG, record.start_ns, _END_TAG, record.end_ns),
        _attributes(record.attributes, limits.attributes, limits.value_length),
    ]
    if record.events:
        parts += [_message(11, _event(event, limits)) for event in record.events[: limits.events]]
        parts.append(_count(12, len(record.events) - limits.events))
    if record.error is not None:
        parts.append(_message(15, (_text(2, record.error) if record.error else b"") + _ERROR_CODE))
    return b"".join(parts)


def _context(trace: Trace, parent_id: bytes | None) -> bytes:
    spelled = b"\x0a\x10" + _exactly(trace.trace_id, 16)
    if trace.state:
        spelled += _text(3, trace.state)
    if parent_id is not None:
        spelled += b"\x22\x08" + _exactly(parent_id, 8)
    return spelled


def _kind_and_flags(kind: SpanKind, *, is_remote: bool) -> bytes:
    flags = _SAMPLED | _HAS_IS_REMOTE | (_IS_REMOTE if is_remote else 0)
    return bytes((0x30, kind)) + _FLAGS.pack(_FLAGS_TAG, flags)


def _event(event: SpanEvent, limits: SpanLimits) -> bytes:
    spelled = _EVENT_TIME.pack(0x09, event.at_ns) + _text(2, event.name)
    kept, length = event.attributes[: limits.event_attributes], limits.value_length
    spelled += b"".join(_key_value(3, name, value, length) for name, value in kept)
    return spelled + _count(4, len(event.attributes) - limits.event_attributes)


def _attributes(attributes: Attributes, limit: int, length: int | None) -> bytes:
    """Of a span: fields 9, and 10 for how many were left out."""
    spelled = b"".join([_key_value(9, name, value, length) for name, value in attributes[:limit]])
    return spelled + _count(10, len(attributes) - limit)


def _key_value(field: int, name: str, value: AttributeValue, length: int | None) -> bytes:
    key, spelled = _key(name), _any_value(value, length)
    size = len(spelled)
    value_size = bytes((0x12, size)) if size < 0x80 else _prefix(2, size)
    return _prefix(field, len(key) + len(value_size) + size) + key + value_size + spelled


@functools.lru_cache(maxsize=1024)
def _key(name: str) -> bytes:
    return _text(1, name)


def _any_value(value: AttributeValue, length: int | None) -> bytes:
    if isinstance(value, str):
        return _text(1, value if length is None else value[:length])
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        if _SMALLEST_INT <= value <= _LARGEST_INT:
            return b"\x18" + _varint(value)
        return _text(1, str(value))  # as OpenTelemetry's attribute mapping says of integers beyond 64 bits
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    if isinstance(value, tuple):
        return _message(5, b"".join(_message(1, _any_value(item, length)) for item in value))
    raise TypeError(f"an attribute cannot be of type {type(value).__name__}")


def _count(field: int, count: int) -> bytes:
    return bytes((field << 3,)) + _varint(count) if count > 0 else b""


def _exactly(identity: bytes, size: int) -> bytes:
    if len(identity) != size:
        raise ValueError(f"an id of {size} bytes expected, got {len(identity)}")
    return identity


def _text(field: int, text: str) -> bytes:
    # protobuf strings are UTF-8 or the whole request is refused; lone surrogates come from undecodable URLs
    return _message(field, text.encode("utf-8", "replace"))


def _message(field: int, body: bytes) -> bytes:
    return _prefix(field, len(body)) + body


def _prefix(field: int, size: int) -> bytes:
    """Tag and length of a length-delimited field below 16."""
    tag = field << 3 | 2
    return bytes((tag, size)) if size < 0x80 else bytes((tag,)) + _varint(size)


def _varint(value: int) -> bytes:
    """Negative numbers take ten bytes, as int64 does in protobuf."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    if value < 0x80:
        return bytes((value,))
    spelled = bytearray()
    while value > 0x7F:
        spelled.append(value & 0x7F | 0x80)
        value >>= 7
    spelled.append(value)
    return bytes(spelled)
