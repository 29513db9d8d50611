"""The EAGLE family as a speculator: hears committed positions with the target's hidden states, drafts chains or trees.

Owns one feature per row, the newest; its keys live in pages under the target's block ids. Never hears of a rejected
token: the keys of drafted ones are overwritten by the next draft or by those of what was committed there. Built by
`eagle_recipe`. Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.accept import place_draft
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.eagle_chain import draft_chains
from engine.speculation.eagle_passes import EaglePasses, EagleRow
from engine.speculation.eagle_tree import TreeShape, draft_trees
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator


@dataclass(frozen=True)
class EaglePlan:
    """How it drafts."""

    tree: TreeShape | None  # None: a chain
    is_sampled: bool  # chains only
    context_length: int  # positions the head was made for: rows beyond run at k = 0
    tap_order: tuple[int, ...]  # which of the capabilities' taps fc reads first, second, ...


class EagleSpeculator(Speculator):
    def __init__(
        self, passes: EaglePasses, plan: EaglePlan, capabilities: Capabilities, watch: FirstTokenWatch
    ) -> None:
        self.capabilities = capabilities
        self._passes = passes
        self._plan = plan
        self._watch = watch
        self._features: dict[int, tuple[int, torch.Tensor]] = {}  # row -> (position, its feature [h])

    def begin(self, start: SequenceStart) -> None:
        self.end(start.row)

    def end(self, row: int) -> None:
        self._features.pop(row, None)
        self._watch.forget(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self._watch.observe(spans)
        heard = [span for span in map(self._within_context, spans) if span.token_ids]
        if not heard:
            return
        taps = torch.cat([span.taps for span in heard if span.taps is not None])
        if self._plan.tap_order != tuple(range(taps.shape[1])):
            taps = taps[:, list(self._plan.tap_order)]
        features = self._passes.ingest(heard, taps)
        for span, feature in zip(heard, features, strict=True):
            self._features[span.row] = (span.start + len(span.token_ids) - 1, feature)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Raises ValueError for a row whose last committed position was not observed."""
        able = [index for index, row in enumerate(rows) if self._budget(row) > 0]
        width = self.capabilities.max_draft_len
        if not able:
            none = empty_draft(len(rows), width, self._passes.pool.device)
            return self._complete(none)
        drafting = [EagleRow(rows[index], self._budget(rows[index]), self._newest(rows[index])) for index in able]
        if self._plan.tree is None:
            draft = draft_chains(self._passes, drafting, width, self._plan.is_sampled)
            first_tokens = draft.tokens[:, :1]
        else:
            draft = draft_trees(self._passes, drafting, width, self._plan.tree)
            first_tokens = _first_level(draft)
        self._watch.proposed([row.asked for row in drafting], first_tokens)
        return place_draft(draft, able, len(rows))

    def _budget(self, row: DraftRow) -> int:
        return min(row.budget, self.capabilities.max_draft_len, self._plan.context_length - (len(row.token_ids) - 1))

    def _newest(self, row: DraftRow) -> torch.Tensor:
        """The feature of the position before the root."""
        position, feature = self._features.get(row.row, (-1, None))
        if feature is None or position != len(row.token_ids) - 2:
            raise ValueError(f"row {row.row} has position {len(row.token_ids) - 2} behind it; observed was {position}")
        return feature

    def _within_context(self, span: CommittedSpan) -> CommittedSpan:
        """The part of the span the head was made for. Positions beyond are never drafted behind, so nobody reads them."""
        count = max(0, self._plan.context_length - span.start)
        if count >= len(span.token_ids):
            return span
        tokens = [*span.token_ids, span.next_token_id]
        taps = None if span.taps is None else span.taps[:count]
        following = tokens[count] if count else span.next_token_id
        return replace(span, token_ids=tokens[:count], next_token_id=following, taps=taps)

    def _complete(self, draft: Draft) -> Draft:
        """An empty draft with the parts that every draft of this speculator has."""
        count, width, device = *draft.tokens.shape, draft.tokens.device
        parents = torch.full((count, width), -1, dtype=torch.int32, device=device) if self._plan.tree else None
        vocab_size = self._passes.head.arch.vocab_size
        probs = torch.zeros(count, width, vocab_size, device=device) if self._plan.is_sampled else None
        return replace(draft, parents=parents, probs=probs)


def _first_level(draft: Draft) -> torch.Tensor:
    """Int32 [B, W]: tokens of the root's children, -1 elsewhere."""
    assert draft.parents is not None
    nodes = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
    return torch.where((draft.parents == -1) & (nodes < draft.lengths[:, None]), draft.tokens, -1)
