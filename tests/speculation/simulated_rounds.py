"""Rounds without an engine: texts whose drafts are right as a script says, steps that cost what a table says.

Owns the world that draft length policies are compared in; everything follows from its numbers, nothing from a clock. Used
by tests/speculation/test_length_choice_worth.py.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.speculation.acceptance_memory import DraftMemory
from engine.speculation.length_choice import Asking, LengthChoice
from engine.speculation.step_cost import StartUpCosts

WIDTH = 8
TOKENS_PER_TEXT = 100


@dataclass(frozen=True)
class Place:
    """What a drafter would do behind one token of a text."""

    drafted: int  # tokens it has
    right: int  # of those, so many agree


@dataclass(frozen=True)
class Costs:
    """Of a step, ns: `verify` of (rows, tokens), `draft` of (rows that draft, longest draft)."""

    verify: Callable[[int, int], float]
    draft: Callable[[int, int], float]


@dataclass
class Text:
    places: Sequence[Place]
    done: int = 0
    memory: DraftMemory = field(default_factory=lambda: DraftMemory(WIDTH))


class World:
    """`streams` rows, each with one text after the other, over and over, until there are `num_tokens`."""

    def __init__(self, texts: Sequence[Sequence[Place]], streams: int, costs: Costs, num_tokens: int) -> None:
        self._texts = texts
        self._streams = streams
        self._costs = costs
        self._num_tokens = num_tokens

    def tokens_per_s(self, policy: "Policy") -> float:
        waiting = itertools.cycle(self._texts)
        rows = [Text(next(waiting)) for _ in range(self._streams)]
        took_ns, num_tokens = 0.0, 0
        while num_tokens < self._num_tokens:
            before = sum(row.done for row in rows)
            took_ns += self._step(rows, policy)
            num_tokens += sum(row.done for row in rows) - before
            rows = [row if row.done < len(row.places) else Text(next(waiting)) for row in rows]
        return num_tokens / took_ns * 1e9

    def _step(self, rows: Sequence[Text], policy: "Policy") -> float:
        allowed = policy.lengths(rows)
        drafted = []
        for row, most in zip(rows, allowed, strict=True):
            place = row.places[row.done]
            drafted.append(min(place.drafted, most))
            accepted = min(place.right, drafted[-1])
            row.done = min(row.done + accepted + 1, len(row.places))
            policy.hear(row, most, drafted[-1], accepted)
        num_tokens = len(rows) + sum(drafted)
        asked = sum(most > 0 for most in allowed)
        draft_ns = self._costs.draft(asked, max(allowed)) if asked else 0.0
        verify_ns = self._costs.verify(len(rows), num_tokens)
        policy.timed(len(rows), num_tokens, verify_ns, asked, max(allowed), draft_ns)
        return verify_ns + draft_ns


class Policy:
    """A fixed length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, rows: Sequence[Text]) -> list[int]:
        return [min(self._length, len(row.places) - row.done - 1) for row in rows]

    def hear(self, row: Text, allowed: int, drafted: int, accepted: int) -> None:
        pass

    def timed(
        self, num_rows: int, num_tokens: int, verify_ns: float, asked: int, deepest: int, draft_ns: float
    ) -> None:
        pass


class Adaptive(Policy):
    """The engine's own choice, told of rounds and times as engine.draft_lengths tells it."""

    def __init__(self, start_up: StartUpCosts | None) -> None:
        super().__init__(WIDTH)
        self.choice = LengthChoice(WIDTH, whole=False, start_up=start_up)

    def lengths(self, rows: Sequence[Text]) -> list[int]:
        asking = [Asking(row.memory, most) for row, most in zip(rows, super().lengths(rows), strict=True)]
        lengths = self.choice.choose(asking, len(rows), spare=512)
        for row, length in zip(rows, lengths, strict=True):
            row.memory.allowed = length
        return lengths

    def hear(self, row: Text, allowed: int, drafted: int, accepted: int) -> None:
        if allowed:
            self.choice.hear(row.memory, min(drafted, accepted + 1), accepted)

    def timed(
        self, num_rows: int, num_tokens: int, verify_ns: float, asked: int, deepest: int, draft_ns: float
    ) -> None:
        self.choice.cost.observe(num_rows, num_tokens, verify_ns)
        if asked:
            self.choice.cost.observe_draft(asked, deepest, draft_ns)


# ---- texts ----


def steady(generator: random.Random, rates: Sequence[float]) -> list[Place]:
    """A drafter with a model: always a whole draft, position i right with probability rates[i]."""
    return [Place(WIDTH, _right(generator, rates)) for _ in range(TOKENS_PER_TEXT)]


def lookup(generator: random.Random, share: float, rate: float) -> list[Place]:
    """A drafter that looks up: now and then it has something, in runs that are copied whole."""
    places: list[Place] = []
    while len(places) < TOKENS_PER_TEXT:
        if generator.random() < share:
            run = generator.randint(4, 24)
            places += [Place(WIDTH, min(left, WIDTH)) for left in range(run, 0, -1)]
        else:
            found = generator.randint(1, WIDTH) if generator.random() < 0.3 else 0
            places.append(Place(found, min(_right(generator, [rate] * WIDTH), found)))
    return places[:TOKENS_PER_TEXT]


def _right(generator: random.Random, rates: Sequence[float]) -> int:
    right = 0
    while right < len(rates) and generator.random() < rates[right]:
        right += 1
    return right
