"""The speculator seam: propose tokens, and hear only of what was committed.

A speculator owns no counter, clock, block or socket, and never sees a rejected token. Whoever forgets an optional method
loses speed, not correctness; nobody can forget to count, because counting is not here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.speculation.draft import Draft, empty_draft
from protocol.sampling import SamplingParams


@dataclass(frozen=True)
class Capabilities:
    """What a speculator is, as data: the engine asks here and never by name or type."""

    max_draft_len: int  # W
    sources: tuple[str, ...]  # names behind Draft.sources
    tree: bool = False
    drafts_on_host: bool = False  # needs the committed tokens on the host; hears of one row per call
    gives_probs: bool = False
    taps: tuple[int, ...] = ()  # hidden-state indices of the target it reads
    lookahead: int = 0  # tokens behind a position that the drafter's own keys there depend on (EAGLE: 1)
    unsupported_sampling: frozenset[str] = frozenset()  # SamplingParams fields with which a row runs at k = 0
    synthetic: str = ""  # at which rates its drafts' tokens stay, whatever the target says; "": the target decides


@dataclass(frozen=True)
class SequenceStart:
    """A sequence that takes a row, first or after preemption. `token_ids` is its whole committed history; read-only."""

    row: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    scope: str = ""  # whose text it is: what a drafter learns in one scope may not draft for another
    prediction: Sequence[int] = ()  # tokens the client expects as the answer


@dataclass(frozen=True)
class DraftRow:
    """One row that wants a draft. `token_ids` is the row's whole committed history, the root last; read-only."""

    row: int
    token_ids: Sequence[int]
    budget: int  # most tokens to propose, >= 1
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int = 0  # of the sequence, in [0, 2**63)
    block_ids: tuple[int, ...] = ()  # cover the positions of the root and of `budget` tokens behind it


@dataclass(frozen=True)
class CommittedSpan:
    """Tokens that just became permanent for a row, at positions start, start + 1, ..."""

    row: int
    start: int
    token_ids: Sequence[int]
    next_token_id: int  # the token behind them, which the target has not run yet: the root, or the prompt goes on
    block_ids: tuple[int, ...]  # cover these positions; the drafter's own keys and values live under the same ids
    taps: torch.Tensor | None  # [len(token_ids), len(capabilities.taps), hidden], when taps are asked for


class Speculator(ABC):
    """Proposes tokens the target has not seen."""

    capabilities: Capabilities

    def begin(self, start: SequenceStart) -> None:
        """A sequence took the row."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Draft at most `budget` tokens per row (0 is always legal); Draft's B follows `rows`. May be called with no rows."""

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """Hear of committed tokens: prompt chunks and rounds, in order, each once; before a row's `end`, the last too.

        A drafter on the device hears of all rows in one call. When that raises it hears of them again one by one, so that
        only the guilty row fails: what it keeps per position and row it must be able to write twice.
        """

    def end(self, row: int) -> None:
        """The row's sequence finished, was aborted or preempted: drop its state."""


class NoSpeculator(Speculator):
    """Plain decoding through the same path: every draft has length zero."""

    capabilities = Capabilities(max_draft_len=0, sources=())

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return empty_draft(len(rows), 0, self._device)
