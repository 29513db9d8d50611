"""Valid messages of both directions to begin from, and ways to spoil their bytes. Shared by the fuzz tests."""

import random

from protocol.codec import encode, encode_counters
from protocol.counters import Counters
from protocol.messages import (
    Attach,
    Close,
    Detach,
    Detached,
    Event,
    EventKind,
    Fence,
    FenceReply,
    Finish,
    Heartbeat,
    Load,
    PhaseTimes,
    Ping,
    Profile,
    ProfileAction,
    ProfileOutcome,
    ProfileReply,
    PromptReport,
    Round,
    SequenceOutput,
    SimScript,
    StepOutcome,
    StepOutput,
    Submit,
    TokenLogprobs,
)
from protocol.reasons import CloseReason, DetachReason, FinishReason, RejectReason
from protocol.sampling import SamplingParams
from tests.wiring import hello

COUNTERS = encode_counters(Counters.zero(5, 2))
LOAD = Load(1, 2, 3, 4, 5, 1, 0, False, "a")
SAMPLING = SamplingParams(8, 0.5, 0.9, 3, 0.1, 1.0, -1.0, 1.1, {5: 2.5}, 7, 1, True, (3,), ((4, 5),), (1, 2, 3), 2, 1)
SCRIPT = SimScript(((582, 827), (1296,)), (2, 1), 5, 0, 0.5)
LOGPROBS = TokenLogprobs(-0.5, 1, (1, 2), (-0.5, -1.5))
OUTPUT = SequenceOutput(
    1, 0, 0, (5, 6), (LOGPROBS, LOGPROBS), PromptReport(3, 1, 1, 2, (None, LOGPROBS)), Round(2, 2, 1, 1, 0, 0, False),
    (Event(EventKind.QUEUED, 1),), Finish(FinishReason.ERROR, 3, "why", RejectReason.INVALID),
)  # fmt: skip

FROM_FRONTEND = [
    Attach("a", 2),
    Submit(1, (1, 2, 3), SAMPLING, 2, 10**9, 0, 2, True, SCRIPT),
    Submit(2, (1,), SamplingParams(max_tokens=4), 1, None, 0, 0, False, None),
    Close(1, -1, CloseReason.STOP_STRING, 3),
    Ping(7, 3),
    Fence(4),
    Detach(),
    Profile(1, ProfileAction.START),
]
FROM_ENGINE = [
    hello(),
    StepOutput(
        "0", 1, 9, 5, StepOutcome.OK, PhaseTimes(((0, 0),) * 4, False), COUNTERS, LOAD, (OUTPUT, OUTPUT)
    ),
    Heartbeat("0", 1, 9, COUNTERS, LOAD, 1, 2),
    FenceReply("0", 1, 4, 9, COUNTERS, LOAD),
    Detached("0", 1, DetachReason.BEHIND),
    ProfileReply("0", 1, 1, ProfileOutcome.FAILED, "why", "/tmp/x", 3),
]  # fmt: skip
PAYLOADS = {"from frontend": [encode(m) for m in FROM_FRONTEND], "from engine": [encode(m) for m in FROM_ENGINE]}
# Heads that promise more than follows: arrays, maps, strings, bytes, extensions of up to 4 G entries.
PROMISES = (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")


def spoiled(payload: bytes, rng: random.Random) -> bytes:
    """The payload with a few bytes changed, inserted, removed or repeated."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif how == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        elif how == 2:
            del data[at : at + rng.randint(1, 8)]
        elif how == 3:
            data[at:at] = data[at : at + rng.randint(1, 16)]
        else:
            data[at:at] = rng.choice(PROMISES) + rng.choice((b"\xff\xff\xff\xff", b"\x00\x10\x00\x00"))
    return bytes(data)


def any_value(rng: random.Random, depth: int = 3) -> object:
    """Something msgpack can say; by seed and not by a strategy, which takes 40 ms for one."""
    kind = rng.randrange(9 if depth else 6)
    if kind >= 6:
        items = [any_value(rng, depth - 1) for _ in range(rng.randrange(8))]
        return items if kind < 8 else {str(number): item for number, item in enumerate(items)}
    return (
        None,
        rng.random() < 0.5,
        rng.choice((0, 1, -1, 2**31, -(2**63), 2**64 - 1, rng.randrange(256))),
        rng.choice((0.0, -0.5, float("nan"), float("inf"), 1e308)),
        rng.choice(("", "a", "\u00e9" * 40, "\x00")),
        rng.randbytes(rng.randrange(20)),
    )[kind]
