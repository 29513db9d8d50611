"""The ledger's entries and its two faces: what the scheduler tells it, and what one step needs to be closed.

Data and a Protocol; no counting here. Used by engine.ledger, engine.scheduler and engine.core.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.sequence import ChildKey, Sequence
from protocol.messages import Close, Event, Finish, Load, PhaseTimes, Round, Submit, TokenLogprobs


class Accounts(Protocol):
    """What the scheduler tells the ledger. Each call answers the client or counts; none of them changes a sequence."""

    def open(self, sequence: Sequence) -> None:
        """A child is accepted. Raises when it is open already."""

    def is_open(self, frontend_id: str, request_id: int) -> bool:
        """Whether any child of the request is open."""

    def refuse_duplicate(self, frontend_id: str, submit: Submit) -> None:
        """A Submit under the id of an open request."""

    def reject(self, frontend_id: str, submit: Submit, finish: Finish) -> None:
        """A request that never runs."""

    def close(self, frontend_id: str, close: Close) -> list[ChildKey]:
        """The frontend ends children; returns those that were open."""

    def end(self, key: ChildKey, finish: Finish) -> None:
        """Policy ends an open child."""

    def drop(self, frontend_id: str) -> None:
        """The frontend is gone, with everything it submitted."""

    def scheduled(self, sequence: Sequence, num_queried: int, num_hit: int) -> None:
        """First row of a child; tokens asked of the prefix cache and found there."""

    def resumed(self, sequence: Sequence) -> None:
        """A row again, after a preemption."""

    def retracted(self, sequence: Sequence) -> None:
        """The child lost its row to a preemption."""


@dataclass(frozen=True)
class EngineIdentity:
    """Who signs the steps. `epoch` is the wall-clock ns at which this engine process started."""

    engine_id: str
    epoch: int


@dataclass(frozen=True)
class StepEnd:
    """What closing a step needs beside the books: times, gauges, listeners, and the wire's own totals."""

    started_ns: int
    executed_ns: int  # when `Executor.execute` was called: phases are relative to it
    load: Load
    frontends: list[str]
    refused_messages: int
    frontends_cut_off: int


class RequestAccount:
    """What the children of one request share."""

    __slots__ = ("is_prompt_counted", "num_cached", "open_children")

    def __init__(self) -> None:
        self.open_children: dict[int, Account] = {}
        self.num_cached = 0  # prompt tokens found in the prefix cache when the request was first scheduled
        self.is_prompt_counted = False


class Account:
    """One child: what was said about it so far. Written by the ledger only."""

    __slots__ = ("aborted_round", "events", "finish", "num_sent", "prompt_logprobs", "request", "sequence")

    def __init__(self, sequence: Sequence, request: RequestAccount) -> None:
        self.sequence = sequence
        self.request = request
        self.num_sent = 0  # tokens committed and sent
        self.finish: Finish | None = None  # the engine finished it; its frontend has not closed it yet
        self.aborted_round: Round | None = None  # ran while the Close was on its way
        self.events: list[Event] = []  # traced requests only
        self.prompt_logprobs: list[TokenLogprobs] = []


def shifted(phases: PhaseTimes, offset_ns: int) -> PhaseTimes:
    """Phase times relative to the step instead of to `execute`; a phase that did not run stays (0, 0)."""
    spans = tuple([(start + offset_ns, end + offset_ns) if end > start else (0, 0) for start, end in phases.spans])
    return PhaseTimes(spans=spans, on_device=phases.on_device)
