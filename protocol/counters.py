"""The engine's cumulative counters: what every step publishes in full, and the laws they obey.

The engine's ledger is the only writer. Frontends subtract snapshots (`frontend.deltas`) and export them
(`frontend.metrics`); a test holds the field list equal to the table of metric families.
"""

import bisect
import itertools

import msgspec

# Upper bounds in seconds, +Inf implied. Step and phase times span 50 us (simulated) to seconds (a long prefill).
STEP_SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# vLLM's buckets of vllm:iteration_tokens_total.
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram(msgspec.Struct, array_like=True):
    """Bucket counts (NOT cumulative over buckets; the last one is +Inf) and the sum of the observed values."""

    counts: list[int]
    total: float

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(counts=[0] * (len(bounds) + 1), total=0.0)

    def observe(self, value: float, bounds: tuple[float, ...]) -> None:
        self.counts[bisect.bisect_left(bounds, value)] += 1
        self.total += value

    def minus(self, earlier: "Histogram") -> "Histogram":
        counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(counts=counts, total=self.total - earlier.total)

    @property
    def count(self) -> int:
        return sum(self.counts)


class Counters(msgspec.Struct, array_like=True, kw_only=True):
    """Totals since the engine's epoch began. Field order is wire format: append only. Units: tokens unless named.

    `accepted_per_pos` has W = max_draft_len entries; the `*_by_source` lists follow `Hello.sources`.
    """

    # steps
    steps_ok: int
    steps_empty: int
    steps_failed: int
    # prompts
    prompt_tokens: int  # once per request, when its prompt is done (children of n share one prompt)
    prompt_tokens_cached: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    recomputed_tokens: int
    num_preemptions: int
    # generation
    generation_tokens: int
    first_tokens: int  # tokens given by the last chunk of a prompt
    non_draft_tokens: int  # the target's own tokens in rounds
    cut_tokens: int  # accepted + non-draft - committed
    trimmed_tokens: int  # committed tokens behind a stop string
    # rounds
    draft_rounds: int  # vLLM's num_drafts: rounds with at least one real draft token
    plain_rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: list[int]
    draft_depth: int
    aborted_rounds: int
    refused_by_grammar: int
    overshoot_rows: int
    draft_tokens_by_source: list[int]
    accepted_tokens_by_source: list[int]
    # forwards
    target_forwards: int
    draft_forwards: int
    # the wire
    refused_messages: int
    frontends_cut_off: int
    # histograms
    iteration_tokens: Histogram
    step_seconds: Histogram
    observe_seconds: Histogram
    draft_seconds: Histogram
    verify_seconds: Histogram
    accept_seconds: Histogram

    @classmethod
    def zero(cls, max_draft_len: int, num_sources: int) -> "Counters":
        """All totals at 0, with all W positions present."""
        values: dict[str, object] = {}
        for field in msgspec.structs.fields(cls):
            if field.type is int:
                values[field.name] = 0
            elif field.type is Histogram:
                values[field.name] = Histogram.over(bounds_of(field.name))
        return cls(
            accepted_per_pos=[0] * max_draft_len,
            draft_tokens_by_source=[0] * num_sources,
            accepted_tokens_by_source=[0] * num_sources,
            **values,  # type: ignore[arg-type]  # exactly the int and Histogram fields, built from the field list
        )

    def minus(self, earlier: "Counters") -> "Counters":
        """The increments since `earlier`, field by field. Both must come from one epoch (equal list lengths)."""
        values: dict[str, object] = {}
        for name in self.__struct_fields__:
            now, then = getattr(self, name), getattr(earlier, name)
            if isinstance(now, Histogram):
                values[name] = now.minus(then)
            elif isinstance(now, list):
                values[name] = [a - b for a, b in zip(now, then, strict=True)]
            else:
                values[name] = now - then
        return Counters(**values)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise `ConservationError` naming the first law that does not hold. Cost about 10 us; not for every step."""
        for law, holds in _laws(self):
            if not holds:
                raise ConservationError(f"{law}: {self}")


class ConservationError(Exception):
    """The counters contradict each other: a bug in the engine, never a user's mistake."""


def bounds_of(histogram_field: str) -> tuple[float, ...]:
    """Upper bucket bounds of the named histogram field of `Counters`."""
    return ITERATION_TOKENS_BUCKETS if histogram_field == "iteration_tokens" else STEP_SECONDS_BUCKETS


def _laws(c: Counters) -> list[tuple[str, bool]]:
    per_pos = c.accepted_per_pos
    positions = len(per_pos)
    return [
        ("sum(accepted_per_pos) == accepted_tokens", sum(per_pos) == c.accepted_tokens),
        ("accepted_per_pos never rises with position", all(a >= b for a, b in itertools.pairwise(per_pos))),
        ("accepted_tokens <= draft_tokens", c.accepted_tokens <= c.draft_tokens),
        ("draft_tokens <= W * draft_rounds", c.draft_tokens <= positions * c.draft_rounds),
        ("draft_rounds <= draft_tokens", c.draft_rounds <= c.draft_tokens),
        ("aborted_rounds <= rounds", c.aborted_rounds <= c.draft_rounds + c.plain_rounds),
        ("trimmed_tokens <= generation_tokens", c.trimmed_tokens <= c.generation_tokens),
        (
            "generation == first + accepted + non_draft - cut",
            c.generation_tokens == c.first_tokens + c.accepted_tokens + c.non_draft_tokens - c.cut_tokens,
        ),
        ("sources add up to draft_tokens", sum(c.draft_tokens_by_source) == c.draft_tokens),
        ("sources add up to accepted_tokens", sum(c.accepted_tokens_by_source) == c.accepted_tokens),
        ("cached <= prompt tokens", c.prompt_tokens_cached <= c.prompt_tokens),
        ("prefix hits <= queries", c.prefix_cache_hits <= c.prefix_cache_queries),
        (
            "no total is negative",
            all(v >= 0 for v in map(c.__getattribute__, c.__struct_fields__) if isinstance(v, int)),
        ),
    ]
