"""One child of one request, as the engine's policy sees it: its tokens, its place, and the rules that end it.

Owns stop rules and token history; never touches blocks, counters or the wire. Used by engine.scheduler (places, lengths)
and engine.ledger (appends what was committed).
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import msgspec

from engine.speculation.acceptance_memory import DraftMemory
from protocol.messages import Close, Detach, Finish, SimScript, Submit
from protocol.reasons import FinishReason

SEED_RANGE = 2**63


class ChildKey(NamedTuple):
    """The identity of one child. request_id is unique within its frontend's attachment."""

    frontend_id: str
    request_id: int
    child: int


@dataclass(frozen=True)
class Gone:
    """A frontend that was cut off, fell silent or was replaced; `reason` is for the log."""

    frontend_id: str
    reason: str


Arrival = tuple[str, Submit | Close | Detach | Gone]  # (frontend_id, message): what the wire hands to the core


@dataclass(frozen=True)
class StopRules:
    """When one child ends. Token counts are of generated tokens."""

    eos_token_ids: frozenset[int]  # empty under ignore_eos
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int  # already lowered to what the model's length leaves

    @cached_property
    def all_token_ids(self) -> frozenset[int]:
        """Every token that can end the child."""
        return self.eos_token_ids | self.stop_token_ids

    def finish_of(self, token_id: int, num_before: int) -> Finish | None:
        """How generating `token_id` after `num_before` tokens ends the child, or None. A stop wins over the length."""
        if num_before >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return STOPPED
            if token_id in self.stop_token_ids:
                return Finish(FinishReason.STOP, stop_token_id=token_id)
        return OUT_OF_LENGTH if num_before + 1 >= self.max_tokens else None


STOPPED = Finish(FinishReason.STOP)
OUT_OF_LENGTH = Finish(FinishReason.LENGTH)


class Sequence:
    """The mutable state of one child. The scheduler moves it; the ledger appends to it; nobody else writes."""

    __slots__ = (
        "arrival",
        "block_ids",
        "deadline_ns",
        "draft_memory",
        "is_decoding",
        "is_prompt_done",
        "key",
        "num_computed",
        "num_prompt",
        "num_seen",
        "prefix_node",
        "prefix_num_blocks",
        "priority",
        "queued_ns",
        "queued_tokens",
        "row",
        "rules",
        "sampling",
        "scheduled_ns",
        "seed",
        "sim",
        "submit",
        "token_ids",
    )

    def __init__(self, key: ChildKey, submit: Submit, rules: StopRules, seed: int, arrival: int) -> None:
        self.key = key
        self.submit = submit
        self.rules = rules
        self.seed = (seed + key.child) % SEED_RANGE
        self.arrival = arrival  # order of submission; kept over preemptions
        self.priority = submit.priority
        self.sampling = submit.sampling
        self.sim: SimScript | None = submit.sim
        self.token_ids: list[int] = list(submit.prompt_token_ids)
        self.num_prompt = len(submit.prompt_token_ids)
        self.num_computed = 0  # positions whose KV is valid and final
        self.num_seen = 0  # most positions ever computed: what a recompute repeats lies below
        self.is_prompt_done = False
        self.is_decoding = False  # everything but the root is computed: the next span is a round
        self.row: int | None = None
        self.block_ids: tuple[int, ...] = ()
        self.prefix_node = 0  # deepest node of the prefix index on this sequence's path
        self.prefix_num_blocks = 0  # depth of that node
        self.queued_tokens = 0  # what it adds to Load.waiting_tokens while it waits
        self.queued_ns = 0
        self.scheduled_ns: int | None = None  # first time a row was given
        self.deadline_ns: int | None = None
        self.draft_memory: DraftMemory | None = None  # with --adaptive-draft, from the first draft on

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: who goes first."""
        return (self.priority, self.arrival, self.key.child)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens this child may still generate; at least 1 while it lives."""
        return self.rules.max_tokens + self.num_prompt - len(self.token_ids)

    def append(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Finish | None]:
        """Take tokens as if they came one at a time; returns those kept and the finish, if one of them ends the child.

        The token that ends it is kept; everything behind it is not part of the sequence.
        """
        if len(token_ids) < self.num_remaining and self.rules.all_token_ids.isdisjoint(token_ids):
            self.token_ids.extend(token_ids)  # nothing can end it: the usual case, in a sixth of the time
            return token_ids, None
        num_before = self.num_generated
        for count, token_id in enumerate(token_ids, start=1):
            finish = self.rules.finish_of(token_id, num_before + count - 1)
            if finish is not None:
                kept = token_ids[:count]
                self.token_ids.extend(kept)
                return kept, finish
        self.token_ids.extend(token_ids)
        return token_ids, None


class Outcome(IntEnum):
    """What a step came to for one sequence, as the scheduler must know it."""

    ADVANCED = 0
    FINISHED = 1
    RETRACTED = 2  # the result was lost to a preemption in flight
    CLOSED = 3  # closed while the step ran; its Close is in the inbox


class Committed(msgspec.Struct, frozen=True, gc=False):
    """One row's result after the ledger counted it. `token_ids` are the tokens kept, already in the sequence."""

    sequence: Sequence
    outcome: Outcome
    samples: bool  # False: a chunk that gave no token
    end: int  # position behind the last token that the span fed
    token_ids: tuple[int, ...]
    path: tuple[int, ...] | None  # accepted tree nodes; None for chains
    drafted: int = 0  # tokens put to the target
    depth: int = 0  # of the draft: its length, for chains
    accepted: int = 0
    roots: int = 0  # tokens of the target's own that drafting settled, before the draft

    @property
    def judged(self) -> int:
        """Depths of the draft at which the target said yes or no: the accepted ones, and the first that was not."""
        return min(self.depth, self.accepted + 1)
