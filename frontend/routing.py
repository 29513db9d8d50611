"""Which of several engines runs a prompt: by load, and by who has its beginning in cache.

Owns the rule, its constants and the bounded table of prefixes. Pure: no socket, no clock, no randomness. Never sees text, keeps
hashes only. Called by `frontend.engine_pool`, once per prompt.

The rule: the engine with the least cost, where cost = load - PREFIX_WORTH * share. Load is sequences (running, waiting, and
submitted but not in its report yet) per place in the batch; share is the part of the prompt whose blocks the engine is known
to have. So the longest known prefix wins, unless its engine is more loaded than another by more than that is worth.
"""

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

# Granularity of the table, whatever the engines' own block size is. Shorter common beginnings, such as the head of a chat
# template, save less than an uneven load costs; and a prompt of 8 000 tokens is 125 hashes.
BLOCK_TOKENS = 64
MAX_BLOCKS = 32_768  # about 2 million tokens of prompts; an entry takes some 200 bytes
# A prompt that is all in cache is worth a quarter of a batch: with so many more sequences the longer steps and the wait for
# a place cost about what the prefill would.
PREFIX_WORTH = 0.25
# A prompt that nobody knows has a home, the same on every frontend, so that frontends that do not talk to each other still
# send the same prefix to the same engine. Worth little: four sequences of a batch of 64.
HOME_WORTH = 1 / 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests. `sequences` that it runs, that wait there, and that are on their way."""

    engine_id: str
    sequences: int
    max_num_seqs: int

    @property
    def load(self) -> float:
        return self.sequences / self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt may go, best first, and its blocks."""

    engine_ids: tuple[str, ...]
    hashes: list[int]


def block_hashes(token_ids: Sequence[int]) -> list[int]:
    """One hash per full block, each of everything up to its end. Unseeded: all frontends must find the same."""
    count = len(token_ids) - len(token_ids) % BLOCK_TOKENS
    encoded = memoryview(struct.pack(f"<{count}I", *token_ids[:count]))
    block_bytes = 4 * BLOCK_TOKENS
    hashes: list[int] = []
    previous = 0
    for start in range(0, len(encoded), block_bytes):
        previous = xxhash.xxh3_64_intdigest(encoded[start : start + block_bytes], seed=previous)
        hashes.append(previous)
    return hashes


class PrefixTable:
    """Which engines were given a block, by the block's hash. Forgets the least recently used, ends of prompts first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()  # hash -> bits of engines
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many leading blocks each engine has; engines with none are left out."""
        lengths: dict[int, int] = {}
        alive = -1
        for number, block in enumerate(hashes):
            still = alive & self._blocks.get(block, 0)
            if alive != -1 and still != alive:
                lengths[alive & ~still] = number
            alive = still
            if not alive:
                break
        if alive > 0:
            lengths[alive] = len(hashes)
        return {
            engine_id: length for engine_id, bit in self._bits.items() for bits, length in lengths.items() if bits & bit
        }

    def remember(self, hashes: Sequence[int], engine_id: str) -> None:
        """`engine_id` is given a prompt of these blocks."""
        bit = self._bits.get(engine_id) or self._new_bit(engine_id)
        blocks = self._blocks
        for block in reversed(hashes):  # so that the first block is the last to be forgotten
            blocks[block] = blocks.pop(block, 0) | bit
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def forget(self, engine_id: str) -> None:
        """Its cache is gone. Costs a look at every entry, some milliseconds."""
        bit = self._bits.pop(engine_id, 0)
        if bit:
            for block, bits in list(self._blocks.items()):
                if bits & bit:
                    self._blocks[block] = bits & ~bit

    def _new_bit(self, engine_id: str) -> int:
        taken = sum(self._bits.values())
        bit = ~taken & (taken + 1)  # the lowest that is free
        self._bits[engine_id] = bit
        return bit


class Router:
    """Remembers what went where. One per frontend."""

    def __init__(self, table: PrefixTable | None = None) -> None:
        self._table = PrefixTable() if table is None else table
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def route(self, token_ids: Sequence[int], candidates: Sequence[Candidate]) -> Route:
        """The order of preference for a prompt. Equal candidates take turns."""
        hashes = block_hashes(token_ids)
        known = self._table.known(hashes)
        worth = {engine: PREFIX_WORTH * count * BLOCK_TOKENS / len(token_ids) for engine, count in known.items()}
        if hashes and not any(candidate.engine_id in worth for candidate in candidates):
            worth[_home(hashes[0], candidates)] = HOME_WORTH
        ranked = sorted(candidates, key=lambda candidate: self._cost(candidate, worth))
        return Route(tuple(candidate.engine_id for candidate in ranked), hashes)

    def sent(self, route: Route, engine_id: str) -> None:
        """The prompt went to this engine."""
        self._turn += 1
        self._last_turn[engine_id] = self._turn
        self._table.remember(route.hashes, engine_id)

    def forget(self, engine_id: str) -> None:
        """It restarted: its cache is empty."""
        self._table.forget(engine_id)
        self._last_turn.pop(engine_id, None)

    def _cost(self, candidate: Candidate, worth: Mapping[str, float]) -> tuple[float, int]:
        cost = candidate.load - worth.get(candidate.engine_id, 0.0)
        return cost, self._last_turn.get(candidate.engine_id, 0)


def _home(first_block: int, candidates: Sequence[Candidate]) -> str:
    """Rendezvous hashing: an engine that comes or goes moves only the prompts that are or become its own."""
    return max(
        (candidate.engine_id for candidate in candidates),
        key=lambda engine_id: (xxhash.xxh3_64_intdigest(engine_id.encode(), seed=first_block), engine_id),
    )
