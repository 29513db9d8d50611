"""What one attachment to an engine knows: which steps were applied, which streams are open, which questions are asked.

Owns the meaning of the engine's messages: gap detection, order (totals before tokens), continuity of an epoch. Never
touches a socket and never waits. Driven by frontend.engine_client, one object per attachment.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from frontend.hello_check import contradiction
from frontend.request_trace import RequestTrace
from frontend.stream_trace import StreamTrace
from frontend.streams import EngineLost, Stream
from protocol.messages import (
    SCHEMA_VERSION,
    Detached,
    FenceReply,
    FromEngine,
    Heartbeat,
    Hello,
    ProfileReply,
    SequenceOutput,
    StepOutput,
)
from protocol.reasons import DetachReason

Observe = Callable[[FromEngine], None]
Admit = Callable[[Hello], str | None]  # why an engine that fits may not be used now
_Reply = TypeVar("_Reply")


@dataclass(frozen=True)
class Expectation:
    """What the engine must be for this frontend to serve it. None: anything goes."""

    vocabulary_hash: str | None
    model_name: str | None

    def mismatch(self, hello: Hello) -> str | None:
        """Why this engine can never be served by this frontend."""
        if hello.schema != SCHEMA_VERSION:
            return f"the engine speaks wire schema {hello.schema} and this frontend {SCHEMA_VERSION}"
        if (nonsense := contradiction(hello)) is not None:
            return f"the engine contradicts itself: {nonsense}"
        if self.vocabulary_hash is not None and hello.vocabulary_hash != self.vocabulary_hash:
            return (
                f"the engine's vocabulary ({hello.model_name}, {hello.vocabulary_hash[:12]}) is not that of this "
                f"frontend's --model ({self.vocabulary_hash[:12]})"
            )
        if self.model_name is not None and hello.model_name != self.model_name:
            return (
                f"--served-model-name must agree: the engine serves {hello.model_name!r} and this frontend "
                f"{self.model_name!r}"
            )
        return None


@dataclass(frozen=True)
class FenceResult:
    """`snapshot` is the engine's newest state, None when it was not told. `missed`: an attached engine was too slow."""

    snapshot: FenceReply | None
    missed: bool


class Lost(Exception):
    """This attachment cannot go on. The text continues the sentence "the engine is not available: ..."."""


def admit_all(_: Hello) -> None:
    """Every engine that fits may be used."""


class Attachment:
    """From Attach to loss. `hello` is None until the engine answered; `mismatch` is set when it can never fit, and
    `conflict` when it may not be used now."""

    def __init__(self, observe: Observe, expectation: Expectation, admit: Admit = admit_all) -> None:
        self.hello: Hello | None = None
        self.mismatch: str | None = None
        self.conflict: str | None = None
        self.is_known_to_engine = False
        self.streams: dict[int, Stream] = {}
        self.applied_step = 0
        self.wall_offset_ns = 0  # unix time minus the engine's monotonic clock, by its newest anchor
        self._previous: StepOutput | None = None
        self._observe = observe
        self._expectation = expectation
        self._admit = admit
        self._fences: dict[int, asyncio.Future[FenceReply]] = {}
        self._profiles: dict[int, asyncio.Future[ProfileReply]] = {}

    def apply(self, message: FromEngine) -> None:
        """Take in one message. Raises `Lost`."""
        if isinstance(message, Detached):
            self.is_known_to_engine = False
            self._observe(message)
            if message.reason is DetachReason.SCHEMA:
                self.mismatch = message.reason.sentence
            raise Lost(message.reason.sentence)
        if isinstance(message, Hello):
            self._apply_hello(message)
        elif self.hello is None or message.epoch != self.hello.epoch:
            raise Lost("it restarted")
        elif isinstance(message, StepOutput):
            self._apply_step(message)
        elif isinstance(message, ProfileReply):
            _answer(self._profiles, message.nonce, message)
        else:
            self._apply_snapshot(message)

    @property
    def known_hello(self) -> Hello:
        """What the engine said it is. Raises RuntimeError before it answered."""
        if self.hello is None:
            raise RuntimeError("no engine has answered yet")
        return self.hello

    def trace_of(self, trace: RequestTrace) -> StreamTrace:
        """The part of a trace that this engine's outputs will tell."""
        return trace.stream(self.known_hello, self.wall_offset_ns)

    def expect_fence(self, nonce: int) -> "asyncio.Future[FenceReply]":
        """The future answer to a fence; cancelling it forgets it."""
        return _expect(self._fences, nonce)

    def expect_profile(self, nonce: int) -> "asyncio.Future[ProfileReply]":
        """As for a fence."""
        return _expect(self._profiles, nonce)

    def end(self, reason: str) -> None:
        """Fail everything that still waits for this engine."""
        for stream in self.streams.values():
            stream.fail(reason)
        self.streams.clear()
        _fail(self._fences, reason)
        _fail(self._profiles, reason)

    def _apply_hello(self, hello: Hello) -> None:
        if self.hello is not None:
            return  # a repetition says nothing new
        self.is_known_to_engine = True
        self.mismatch = self._expectation.mismatch(hello)
        if self.mismatch is not None:
            raise Lost(self.mismatch)
        self.conflict = self._admit(hello)
        if self.conflict is not None:
            raise Lost(self.conflict)
        self.hello, self.applied_step = hello, hello.step_id
        self.wall_offset_ns = hello.wall_ns - hello.monotonic_ns
        self._observe(hello)

    def _apply_step(self, step: StepOutput) -> None:
        if step.step_id <= self.applied_step:
            return  # a repetition: its totals and tokens were applied
        if step.step_id != self.applied_step + 1:
            raise Lost(f"messages were lost: step {self.applied_step + 1} expected, step {step.step_id} arrived")
        self.applied_step = step.step_id
        self._observe(step)  # before any token is handed out: no client may know more than /metrics
        for output in step.outputs:
            stream = self.streams.get(output.request_id)
            if stream is None:
                continue  # finished or abandoned, and forgotten
            stream.accept(output)
            if stream.trace is not None:
                self._trace(stream.trace, step, output, stream.is_child_done(output.index))
            if stream.is_done:
                del self.streams[output.request_id]
        self._previous = step

    def _trace(self, trace: StreamTrace, step: StepOutput, output: SequenceOutput, is_last: bool) -> None:
        """Times come from the step that ran the round. That of an aborted one rides in the next step's closing output."""
        ran = step
        if output.round is not None and output.round.aborted and self._previous is not None:
            ran = self._previous
        trace.record(ran, output, is_last)

    def _apply_snapshot(self, message: Heartbeat | FenceReply) -> None:
        if message.step_id > self.applied_step:
            raise Lost(f"messages were lost: it published step {message.step_id}, step {self.applied_step} arrived")
        self._observe(message)
        if isinstance(message, Heartbeat):
            self.wall_offset_ns = message.wall_ns - message.monotonic_ns
        if isinstance(message, FenceReply):
            _answer(self._fences, message.nonce, message)


def _expect(waiting: dict[int, asyncio.Future[_Reply]], nonce: int) -> asyncio.Future[_Reply]:
    reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
    waiting[nonce] = reply
    reply.add_done_callback(lambda _: waiting.pop(nonce, None))
    return reply


def _answer(waiting: dict[int, asyncio.Future[_Reply]], nonce: int, reply: _Reply) -> None:
    """An answer that came too late has nobody to wait for it."""
    expected = waiting.get(nonce)
    if expected is not None and not expected.done():
        expected.set_result(reply)


def _fail(waiting: dict[int, asyncio.Future[_Reply]], reason: str) -> None:
    for reply in list(waiting.values()):
        if not reply.done():
            reply.set_exception(EngineLost(reason))
