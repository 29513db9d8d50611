"""Whether a request is traced, and as part of which trace: W3C trace context in, sampling, the rate limit.

Owns the decision and nothing behind it. Reads headers and environment it is given, never the process's own. Called by
`frontend.tracer`. Sources: W3C Trace Context (level 2) sections 3.2 and 3.3; OpenTelemetry SDK specification, "Sampling".
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_TRACESTATE_MEMBERS = 32
MAX_TRACESTATE_BYTES = 512  # what every participant must at least pass on; more is dropped, as the W3C allows

# A later version may append fields behind a dash; version ff is forbidden.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_MEMBER = re.compile(rf"({_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]", re.ASCII)
_SAMPLED = 0x01
_RATIO_BITS = (1 << 64) - 1  # the SDKs compare the low eight bytes of the trace id


class Caller(NamedTuple):
    """The caller's place in its trace."""

    trace_id: bytes  # 16
    parent_id: bytes  # 8
    is_sampled: bool
    state: str  # tracestate, "" when absent or malformed


class Headers(Protocol):
    """The part of aiohttp's header mapping that is used here."""

    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]: ...


def read_caller(headers: Headers) -> tuple[Caller | None, bool]:
    """(the caller, whether a traceparent was there and malformed). Never raises: a broken header starts a new trace."""
    given = headers.getall(TRACEPARENT, ())
    if not given:
        return None, False
    found = _TRACEPARENT.fullmatch(given[0].strip(" \t")) if len(given) == 1 else None
    if found is None or not _is_valid(found):
        return None, True
    caller = Caller(
        bytes.fromhex(found[2]),
        bytes.fromhex(found[3]),
        bool(int(found[4], 16) & _SAMPLED),
        tracestate(headers.getall(TRACESTATE, ())),
    )
    return caller, False


def _is_valid(found: re.Match[str]) -> bool:
    version, trace_id, parent_id, _, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return False
    return trace_id.strip("0") != "" and parent_id.strip("0") != ""


def tracestate(given: Sequence[str]) -> str:
    """The list of members to pass on; "" when it is malformed or longer than must be carried."""
    members = [member.strip(" \t") for member in ",".join(given).split(",")]
    members = [member for member in members if member]  # empty members are allowed and mean nothing
    keys = [member.partition("=")[0] for member in members]
    if len(members) > MAX_TRACESTATE_MEMBERS or len(set(keys)) != len(keys):
        return ""
    if not all(_MEMBER.fullmatch(member) for member in members):
        return ""
    joined = ",".join(members)
    return joined if len(joined) <= MAX_TRACESTATE_BYTES else ""


def new_trace_id() -> bytes:
    """128 random bits, never zero."""
    while True:
        made = os.urandom(16)
        if any(made):
            return made


class Sampler:
    """OTEL_TRACES_SAMPLER and its argument. `ratio` of new traces is taken; `follows_caller`: a caller's flag decides."""

    def __init__(self, ratio: float, follows_caller: bool) -> None:
        self._bound = round(ratio * _RATIO_BITS) + (ratio >= 1)
        self._follows_caller = follows_caller

    def takes(self, trace_id: bytes, caller: Caller | None) -> bool:
        if caller is not None and self._follows_caller:
            return caller.is_sampled
        return int.from_bytes(trace_id[8:]) < self._bound


def sampler_from(environment: Mapping[str, str]) -> Sampler:
    """Raises ValueError naming the variable for a sampler that is not offered and for a bad argument."""
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    follows_caller = name.startswith("parentbased_")
    root = name.removeprefix("parentbased_")
    if root in ("always_on", "always_off"):
        return Sampler(1.0 if root == "always_on" else 0.0, follows_caller)
    if root == "traceidratio":
        return Sampler(_ratio(environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()), follows_caller)
    raise ValueError(
        f"OTEL_TRACES_SAMPLER {name!r} is not offered: use always_on, always_off, traceidratio or one of them after "
        "parentbased_"
    )


def follows_callers(environment: Mapping[str, str]) -> bool:
    """OTEL_PROPAGATORS: whether a traceparent is read. Raises ValueError naming a format that is not offered.

    `baggage` is taken and carries nothing: no span is made of what a caller says about itself.
    """
    names = {name.strip().lower() for name in environment.get("OTEL_PROPAGATORS", "").split(",")} - {""}
    unknown = sorted(names - {"tracecontext", "baggage", "none"})
    if unknown:
        raise ValueError(f"OTEL_PROPAGATORS {unknown[0]!r} is not offered: use tracecontext, baggage or none")
    return not names or "tracecontext" in names


def _ratio(text: str) -> float:
    try:
        ratio = float(text) if text else 1.0
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1, got {text!r}")
    return ratio


class RateLimit:
    """At most so many per second, and so many at once: a bucket that fills with time."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        """`clock` in seconds, monotonic."""
        self._per_second = per_second
        self._burst = max(per_second, 1.0)
        self._left = self._burst
        self._clock = clock
        self._since = clock()

    def takes(self) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._since) * self._per_second)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
