"""How many draft tokens each row gets in a step, and the slots for them: one policy for every drafter.

Owns the order of the limits and the reservation; never sees a drafted token. The limits of one row are in
engine.speculation.budget, with --adaptive-draft the choice of lengths in engine.speculation.length_choice. Called by
engine.scheduler while it plans and settles.
"""

from collections.abc import Callable, Iterable

from engine.intake import PolicySettings
from engine.kv.cache import KVCache
from engine.sequence import Committed, Sequence
from engine.speculation.acceptance_memory import DraftMemory
from engine.speculation.budget import DraftLimits, draft_budget
from engine.speculation.length_choice import Asking, LengthChoice


class DraftLengths:
    """Draft lengths of one engine. Bounded: a few numbers per position for the engine, and for each live row that drafted."""

    def __init__(self, settings: PolicySettings, cache: KVCache, now_ns: Callable[[], int]) -> None:
        width = settings.max_draft_len
        self._width = width
        self._table = settings.draft_len_by_batch
        self._cache = cache
        self._limits = DraftLimits(width, settings.max_len, settings.unsupported_sampling)
        self._adaptive = _Adaptive(settings, now_ns) if settings.adaptive_draft and width else None

    def reserve(self, rounds: list[Sequence], spare: int) -> list[int]:
        """Draft tokens for each of `rounds`, their slots reserved. `spare`: tokens of the step that drafts may take."""
        limit = self._table.most(len(rounds), self._width)
        wanted = None
        if self._adaptive is not None:
            wanted = self._adaptive.choose(rounds, [self._most(sequence, limit) for sequence in rounds], spare)
        lengths = []
        for position, sequence in enumerate(rounds):
            most = spare // (len(rounds) - position) if wanted is None else min(wanted[position], spare)
            length = self._reserve(sequence, min(most, limit))
            lengths.append(length)
            spare -= length
        if self._adaptive is not None:
            self._adaptive.reserved(rounds, lengths)
        return lengths

    def _most(self, sequence: Sequence, room: int) -> int:
        """What the row's own limits allow; none for a script, which plays its run whatever it is allowed."""
        if sequence.sim is not None:
            return 0
        return draft_budget(self._limits, sequence.sampling, len(sequence.token_ids), sequence.num_prompt, room)

    def _reserve(self, sequence: Sequence, most: int) -> int:
        length = len(sequence.token_ids)
        if sequence.sim is not None:
            return min(self._width, sequence.num_remaining - 1)
        slots = len(sequence.block_ids) * self._cache.block_size - length  # held already
        if slots < self._width:
            slots = self._cache.room(sequence) - length
        num_draft = self._most(sequence, min(most, slots))
        if num_draft and not self._cache.grow(sequence, length + num_draft):
            raise RuntimeError(f"{num_draft} draft slots were counted as free and are not")
        return num_draft

    def begin_step(self, only_rounds: bool) -> None:
        """The step is planned and runs now; `only_rounds`: it computes no prompt."""
        if self._adaptive is not None:
            self._adaptive.begin_step(only_rounds)

    def end_step(self, committed: Iterable[Committed], draft_ns: int = 0) -> None:
        """The step ran and this is what it came to; `draft_ns` of its time it drafted."""
        if self._adaptive is not None:
            self._adaptive.end_step(committed, draft_ns)


class _Adaptive:
    """--adaptive-draft: asks for lengths, and tells what became of them and how long it took."""

    def __init__(self, settings: PolicySettings, now_ns: Callable[[], int]) -> None:
        self._width = settings.max_draft_len
        self._now_ns = now_ns
        self._choice = LengthChoice(self._width, settings.drafts_trees, settings.start_up_costs)
        self._memories: list[DraftMemory] = []  # of the rows that draft in this step
        self._begun_ns: int | None = None

    def choose(self, rounds: list[Sequence], limits: list[int], spare: int) -> list[int]:
        """A length for each of `rounds`, at most its limit."""
        places = [place for place, limit in enumerate(limits) if limit]
        asking = [Asking(self._memory(rounds[place]), limits[place]) for place in places]
        lengths = [0] * len(rounds)
        for place, length in zip(places, self._choice.choose(asking, len(rounds), spare), strict=True):
            lengths[place] = length
        return lengths

    def reserved(self, rounds: list[Sequence], lengths: list[int]) -> None:
        """These lengths it came to."""
        self._memories = []
        for sequence, length in zip(rounds, lengths, strict=True):
            if length and sequence.sim is None:
                memory = self._memory(sequence)
                memory.allowed = length
                self._memories.append(memory)

    def begin_step(self, only_rounds: bool) -> None:
        self._begun_ns = self._now_ns() if only_rounds else None

    def end_step(self, committed: Iterable[Committed], draft_ns: int) -> None:
        begun_ns, self._begun_ns = self._begun_ns, None
        num_rows = num_tokens = 0
        for item in committed:
            memory = item.sequence.draft_memory
            if not item.samples:
                begun_ns = None  # it failed or was closed meanwhile: how many tokens it drafted is not known here
            elif memory is not None and memory.allowed:
                # A root takes a slot of the budget and is always right: the first position, as far as lengths go.
                self._choice.hear(memory, item.roots + item.judged, item.roots + item.accepted)
            num_rows += 1
            num_tokens += 1 + item.roots + item.drafted
        if begun_ns is not None and num_rows:
            self._tell_times(num_rows, num_tokens, self._now_ns() - begun_ns, draft_ns)
        for memory in self._memories:
            memory.allowed = 0
        self._memories = []

    def _tell_times(self, num_rows: int, num_tokens: int, step_ns: int, draft_ns: int) -> None:
        self._choice.cost.observe(num_rows, num_tokens, max(step_ns - draft_ns, 0))
        if self._memories:
            deepest = max(memory.allowed for memory in self._memories)
            self._choice.cost.observe_draft(len(self._memories), deepest, draft_ns)

    def _memory(self, sequence: Sequence) -> DraftMemory:
        if sequence.draft_memory is None:
            sequence.draft_memory = DraftMemory(self._width)
        return sequence.draft_memory
