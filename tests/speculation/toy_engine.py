"""The smallest engine around a speculator: the contract of engine.executor and engine.plan in a few lines of test code."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.accept import accept, place_draft
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.budget import DraftLimits, draft_budget
from engine.speculation.draft import Draft
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.sampling import SamplingParams
from tests.speculation.reference import HOST, ToyTarget


@dataclass
class Run:
    """One sequence; `row` is None while it is preempted or finished."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    scope: str = ""
    prediction: tuple[int, ...] = ()
    row: int | None = None
    output: list[int] = field(default_factory=list)
    is_finished: bool = False
    computed: int = 0  # positions whose tokens the drafter heard of or will
    drafts: bool = False  # its last forward left a root to draft behind
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    cut: int = 0

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *self.output]


class ToyEngine:
    """Runs sequences in lockstep; every draft is checked against the contract before it is used."""

    def __init__(
        self, speculator: Speculator, target: ToyTarget, model: SamplingModel, max_model_len: int = 10_000
    ) -> None:
        self.speculator, self.target, self.model = speculator, target, model
        self.proposals: list[tuple[list[int], int, list[int]]] = []  # (history, budget, proposed)
        self._limits = DraftLimits(
            speculator.capabilities.max_draft_len, max_model_len, speculator.capabilities.unsupported_sampling
        )
        self._runs: dict[int, Run] = {}
        self._states: dict[int, SamplingState] = {}
        self._pending: list[CommittedSpan] = []

    def begin(self, run: Run, row: int) -> None:
        run.row, run.drafts, run.computed = row, False, 0
        self._runs[row] = run
        self._states[row] = SamplingState(run.params, run.seed, run.history, len(run.prompt), self.model)
        start = SequenceStart(row, tuple(run.history), len(run.prompt), run.scope, prediction=run.prediction)
        self.speculator.begin(start)

    def end(self, run: Run) -> None:
        """Finished, aborted or preempted: what it committed is told first."""
        assert run.row is not None
        self.speculator.observe([span for span in self._pending if span.row == run.row])
        self._pending = [span for span in self._pending if span.row != run.row]
        self.speculator.end(run.row)
        del self._runs[run.row], self._states[run.row]
        run.row = None

    def step(self, room: int = 1000) -> None:
        """One step for every row; `room` is the token budget that drafts share."""
        self.speculator.observe(self._pending)
        self._pending = []
        rows = sorted(self._runs)
        draft, counts = self._draft(rows, room)
        states = [self._states[row] for row in rows]
        logits = torch.cat([self._verify(row, draft, index) for index, row in enumerate(rows)])
        verdict = accept(logits, draft, SamplingRows.build(states, counts, HOST))
        assert bool(verdict.finite.all())
        for index, row in enumerate(rows):
            accepted = int(verdict.accepted[index])
            self._commit(self._runs[row], int(draft.lengths[index]), accepted, verdict.tokens[index].tolist())

    def _draft(self, rows: Sequence[int], room: int) -> tuple[Draft, list[int]]:
        asked, indices = [], []
        for index, row in enumerate(rows):
            run = self._runs[row]
            budget = draft_budget(self._limits, run.params, len(run.history), len(run.prompt), room // len(rows))
            if run.drafts and budget:
                indices.append(index)
                asked.append(DraftRow(row, tuple(run.history), budget, len(run.prompt), run.params))
        draft = self.speculator.propose(asked)
        check_contract(draft, asked, self.speculator, self.model.vocab_size)
        for row, tokens, length in zip(asked, draft.tokens.tolist(), draft.lengths.tolist(), strict=True):
            self.proposals.append((list(row.token_ids), row.budget, tokens[:length]))
        placed = place_draft(draft, indices, len(rows))
        return placed, [1 + length for length in placed.lengths.tolist()]

    def _verify(self, row: int, draft: Draft, index: int) -> torch.Tensor:
        drafted = draft.tokens[index].tolist()[: int(draft.lengths[index])]
        history = self._runs[row].history
        paths: list[list[int]] = [[]]
        for node, token in enumerate(drafted):
            parent = node - 1 if draft.parents is None else int(draft.parents[index, node])
            paths.append([*paths[parent + 1], token])
        return torch.stack([self.target.logits([*history, *path]) for path in paths])

    def _commit(self, run: Run, drafted: int, accepted: int, tokens: list[int]) -> None:
        new: list[int] = []
        for token in tokens[: accepted + 1]:
            new.append(token)
            is_eos = token in self.model.eos_token_ids and not run.params.ignore_eos
            if is_eos or len(run.output) + len(new) == run.params.max_tokens:
                run.is_finished = True
                break
        assert run.row is not None
        run.drafted, run.accepted, run.rounds = run.drafted + drafted, run.accepted + accepted, run.rounds + 1
        run.cut += accepted + 1 - len(new)
        run.output += new
        run.drafts = True
        history, start, run.computed = run.history, run.computed, len(run.history) - 1
        self._pending.append(CommittedSpan(run.row, start, tuple(history[start:-1]), history[-1], (), None))
        if run.is_finished:
            self.end(run)
        else:
            self._states[run.row].commit(new)


def check_contract(draft: Draft, asked: Sequence[DraftRow], speculator: Speculator, vocab_size: int) -> None:
    """Raise AssertionError for a draft that breaks engine.speculation.draft's promises."""
    width = speculator.capabilities.max_draft_len
    assert draft.tokens.shape == (len(asked), width)
    assert draft.tokens.dtype == draft.lengths.dtype == torch.int32
    assert draft.sources.shape == draft.lengths.shape == (len(asked),)
    assert (draft.probs is not None) == speculator.capabilities.gives_probs
    for index, row in enumerate(asked):
        length = int(draft.lengths[index])
        assert 0 <= length <= min(row.budget, width)
        assert all(0 <= token < vocab_size for token in draft.tokens[index, :length].tolist())
        if length:
            assert 0 <= int(draft.sources[index]) < len(speculator.capabilities.sources)
        if draft.parents is not None:
            assert all(-1 <= int(draft.parents[index, node]) < node for node in range(length))
        if draft.probs is not None:
            sums = draft.probs[index, :length].sum(dim=1)
            assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
