"""How many draft tokens each row gets in a step, and the slots for them: one policy for every drafter.

Owns the order of the limits and, with --adaptive-draft, what was learnt of acceptance and cost; never sees a drafted
token. The limits of one row are in engine.speculation.budget, the choice between lengths in
engine.speculation.acceptance_memory. Called by engine.scheduler while it plans and settles.
"""

from collections.abc import Callable, Iterable

from engine.intake import PolicySettings
from engine.kv.cache import KVCache
from engine.sequence import Committed, Sequence
from engine.speculation.acceptance_memory import ENGINE_DECAY, OPTIMISM, Acceptance, DraftMemory
from engine.speculation.budget import DraftLimits, draft_budget
from engine.speculation.step_cost import StepCost


class DraftLengths:
    """Draft lengths of one engine. Bounded: W numbers for the engine, and a memory on each live sequence that drafted."""

    def __init__(self, settings: PolicySettings, cache: KVCache, now_ns: Callable[[], int]) -> None:
        width = settings.max_draft_len
        self._width = width
        self._table = settings.draft_len_by_batch
        self._cache = cache
        self._limits = DraftLimits(width, settings.max_len, settings.unsupported_sampling)
        self._learning = _Learning(width, settings.drafts_trees, now_ns) if settings.adaptive_draft and width else None

    def reserve(self, rounds: list[Sequence], spare: int) -> list[int]:
        """Draft tokens for each of `rounds`, their slots reserved. `spare`: tokens of the step that drafts may take."""
        limit = self._table.most(len(rounds), self._width)
        if self._learning is not None and limit:
            self._learning.begin_rounds(len(rounds))
        lengths = []
        for position, sequence in enumerate(rounds):
            length = self._reserve(sequence, spare // (len(rounds) - position), limit)
            lengths.append(length)
            spare -= length
        return lengths

    def _reserve(self, sequence: Sequence, share: int, limit: int) -> int:
        length = len(sequence.token_ids)
        if sequence.sim is not None:
            return min(self._width, sequence.num_remaining - 1)  # a script plays its run whatever it is allowed
        slots = len(sequence.block_ids) * self._cache.block_size - length  # held already
        if slots < self._width:
            slots = self._cache.room(sequence) - length
        room = min(share, slots, limit)
        num_draft = draft_budget(self._limits, sequence.sampling, length, sequence.num_prompt, room)
        if num_draft and self._learning is not None:
            num_draft = min(num_draft, self._learning.choose(sequence, limit))
        if num_draft and not self._cache.grow(sequence, length + num_draft):
            raise RuntimeError(f"{num_draft} draft slots were counted as free and are not")
        return num_draft

    def begin_step(self, only_rounds: bool) -> None:
        """The step is planned and runs now; `only_rounds`: it computes no prompt."""
        if self._learning is not None:
            self._learning.begin_step(only_rounds)

    def end_step(self, committed: Iterable[Committed]) -> None:
        """The step ran and this is what it came to."""
        if self._learning is not None:
            self._learning.end_step(committed)


class _Learning:
    """--adaptive-draft: what acceptance and steps have been like."""

    def __init__(self, width: int, whole: bool, now_ns: Callable[[], int]) -> None:
        self._width = width
        self._whole = whole
        self._now_ns = now_ns
        self._cost = StepCost()
        self._everybody = Acceptance(width, ENGINE_DECAY)
        self._guesses = [OPTIMISM] * width
        self._beliefs = list(self._guesses)
        self._fixed = self._cost.fixed_tokens
        self._begun_ns: int | None = None

    def begin_rounds(self, num_rows: int) -> None:
        """`num_rows` rows are about to be given draft lengths; they share what the step costs anyway."""
        self._beliefs = self._everybody.rates(self._guesses)
        self._fixed = self._cost.fixed_tokens / max(num_rows, 1)

    def choose(self, sequence: Sequence, limit: int) -> int:
        if sequence.draft_memory is None:
            sequence.draft_memory = DraftMemory(self._width)
        return sequence.draft_memory.choose(self._beliefs, self._fixed, limit, self._whole)

    def begin_step(self, only_rounds: bool) -> None:
        self._begun_ns = self._now_ns() if only_rounds else None

    def end_step(self, committed: Iterable[Committed]) -> None:
        begun_ns, self._begun_ns = self._begun_ns, None
        num_tokens = 0
        for item in committed:
            memory = item.sequence.draft_memory
            if item.judged and memory is not None:
                memory.hear(item.judged, item.accepted)
                self._everybody.hear(item.judged, item.accepted)
            if not item.samples:
                begun_ns = None  # it failed or was closed meanwhile: how many tokens it drafted is not known here
            num_tokens += 1 + item.drafted
        if begun_ns is not None and num_tokens:
            self._cost.observe(num_tokens, self._now_ns() - begun_ns)
