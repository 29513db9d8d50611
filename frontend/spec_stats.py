"""Speculation statistics of one request, as its answer reports them: `metrics.speculative_decoding`.

Owns the sums over a sequence's rounds and vLLM's names for them. Never counts for the server: that is the engine's ledger,
whose totals these add up to. Fed by `frontend.choices`, ordered by `frontend.prompts`, read by `frontend.answers`.
"""

from dataclasses import dataclass
from typing import Any

from protocol.messages import Round


class SpecStats:
    """The rounds of one sequence. `num_spec_tokens` is the engine's max_draft_len, which no round exceeds.

    Memory: max_draft_len + 1 integers; with `detailed` two more per round that verified a draft.
    """

    def __init__(self, num_spec_tokens: int, *, detailed: bool, synthetic: str = "") -> None:
        """`synthetic`: the rates at which drafts stay unjudged, "" where the target decides."""
        self._synthetic = synthetic
        self._histogram = [0] * (num_spec_tokens + 1)  # [accepted draft tokens] -> rounds
        self._num_draft_tokens = 0
        self._per_step: list[tuple[int, int]] | None = [] if detailed else None  # (accepted, drafted)

    def add(self, one: Round) -> None:
        """Count one round, each exactly once. A round without a draft is plain decoding and no step of speculation."""
        if one.drafted == 0:
            return
        if one.accepted >= len(self._histogram):  # the engine came back with longer drafts since the request was read
            self._histogram += [0] * (one.accepted + 1 - len(self._histogram))
        self._histogram[one.accepted] += 1
        self._num_draft_tokens += one.drafted
        if self._per_step is not None:
            self._per_step.append((one.accepted, one.drafted))

    def report(self) -> dict[str, Any]:
        """vLLM's object. Without a single step the length is 1 and the rate 0, as vLLM has it: numbers, never null.

        Source: vLLM's docs/features/speculative_decoding/acceptance_metrics.md. Its clients require every field.
        """
        num_steps = sum(self._histogram)
        num_accepted = sum(accepted * count for accepted, count in enumerate(self._histogram))
        report: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + (num_accepted / num_steps if num_steps else 0.0),
            "draft_acceptance_rate": num_accepted / self._num_draft_tokens if num_steps else 0.0,
            "acceptance_histogram": list(self._histogram),
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self._num_draft_tokens,
            "num_spec_tokens": len(self._histogram) - 1,
        }
        if self._synthetic:
            report["synthetic_acceptance"] = self._synthetic
        if self._per_step is not None:
            report["per_step_accepted"] = [accepted for accepted, _ in self._per_step]
            report["per_step_drafted"] = [drafted for _, drafted in self._per_step]
        return report


@dataclass(frozen=True, slots=True)
class WantedStatistics:
    """What the answer of a request is to report.

    `collects` is False where that is null: the request has several sequences, or the engine does not speculate.
    """

    num_spec_tokens: int
    detailed: bool
    collects: bool
    synthetic: str = ""  # as `Hello` has it

    def begin(self) -> SpecStats | None:
        """For one sequence."""
        if not self.collects:
            return None
        return SpecStats(self.num_spec_tokens, detailed=self.detailed, synthetic=self.synthetic)


def wanted_statistics(
    level: str, num_sequences: int, max_draft_len: int, synthetic: str = ""
) -> WantedStatistics | None:
    """None for level "none", where answers do not mention statistics. `max_draft_len` 0: the engine does not speculate."""
    if level == "none":
        return None
    collects = num_sequences == 1 and max_draft_len > 0
    return WantedStatistics(max_draft_len, level == "detailed", collects, synthetic)
