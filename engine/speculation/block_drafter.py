"""A block drafter (DFlash, DSpark) as a speculator: hears committed positions with the target's hidden states, drafts blocks.

Owns nothing per row but how far it has heard: all it knows of a text are keys in pages under the target's block ids.
Never hears of a rejected token: a block's keys are overwritten by the next block or by those of what was committed there.
Built by `block_recipe`. Sources: DFlash (arXiv 2602.06036), DSpark (DeepSeek and Peking University, 2026).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.accept import place_draft
from engine.speculation.block_chain import BlockDrafting
from engine.speculation.block_passes import BlockPasses, BlockRow
from engine.speculation.block_tree import BlockTree, BlockTreeDrafting
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator


@dataclass(frozen=True)
class BlockPlan:
    """How it drafts."""

    is_sampled: bool
    tree: BlockTree | None  # None: chains
    threshold: float  # least confidence of a token that is kept; 0: all are
    context_length: int  # positions the layers were made for: rows beyond run at k = 0
    tap_order: tuple[int, ...]  # which of the capabilities' taps fc reads first, second, ...


class BlockSpeculator(Speculator):
    def __init__(
        self, passes: BlockPasses, plan: BlockPlan, capabilities: Capabilities, watch: FirstTokenWatch
    ) -> None:
        self.capabilities = capabilities
        self._passes = passes
        self._plan = plan
        self._drafting = _drafting(passes, plan, capabilities.max_draft_len)
        self._watch = watch
        self._heard: dict[int, int] = {}  # row -> the position behind the last one heard of

    def begin(self, start: SequenceStart) -> None:
        self.end(start.row)

    def end(self, row: int) -> None:
        self._heard.pop(row, None)
        self._watch.forget(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self._watch.observe(spans)
        heard = [span for span in map(self._within_context, spans) if span.token_ids]
        if heard:
            taps = torch.cat([span.taps for span in heard if span.taps is not None])
            if self._plan.tap_order != tuple(range(taps.shape[1])):
                taps = taps[:, list(self._plan.tap_order)]
            self._passes.ingest(heard, taps)
        for span in spans:
            self._heard[span.row] = span.start + len(span.token_ids)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Raises ValueError for a row whose last committed position was not observed."""
        able = [index for index, row in enumerate(rows) if self._reach(row) > 0]
        if not able:
            return self._nothing(len(rows))
        drafting = [self._block_row(rows[index]) for index in able]
        for row in drafting:
            heard = self._heard.get(row.asked.row, 0)
            if heard != row.root:
                raise ValueError(f"row {row.asked.row} has position {row.root - 1} behind it; observed was {heard - 1}")
        draft = self._drafting.draft(drafting)
        self._watch.proposed([row.asked for row in drafting], _first_tokens(draft))
        return place_draft(draft, able, len(rows))

    def _reach(self, row: DraftRow) -> int:
        """How many places behind the root can be drafted."""
        room = self._plan.context_length - (len(row.token_ids) - 1) - self._passes.anchor_rows
        farthest = self.capabilities.max_draft_len if self._plan.tree is None else self._plan.tree.depth
        return min(row.budget, farthest, room)

    def _block_row(self, row: DraftRow) -> BlockRow:
        reach = self._reach(row)
        nodes = reach if self._plan.tree is None else min(row.budget, self.capabilities.max_draft_len)
        return BlockRow(row, nodes, reach)

    def _within_context(self, span: CommittedSpan) -> CommittedSpan:
        """The part of the span the layers were made for. Positions beyond are never drafted behind, so nobody reads them."""
        count = max(0, self._plan.context_length - span.start)
        if count >= len(span.token_ids):
            return span
        taps = None if span.taps is None else span.taps[:count]
        return replace(span, token_ids=span.token_ids[:count], taps=taps)

    def _nothing(self, num_rows: int) -> Draft:
        """An empty draft with the parts that every draft of this speculator has."""
        draft = empty_draft(num_rows, self.capabilities.max_draft_len, self._passes.pool.device)
        if self._plan.tree is not None:
            return replace(draft, parents=torch.full(draft.tokens.shape, -1, dtype=torch.int32))
        if not self._plan.is_sampled:
            return draft
        vocab_size = self._passes.model.arch.vocab_size
        return replace(draft, probs=torch.zeros(*draft.tokens.shape, vocab_size, device=draft.tokens.device))


def _drafting(passes: BlockPasses, plan: BlockPlan, width: int) -> BlockDrafting | BlockTreeDrafting:
    if plan.tree is None:
        return BlockDrafting(passes, width, plan.is_sampled, plan.threshold)
    return BlockTreeDrafting(passes, width, plan.tree.top_k, plan.threshold)


def _first_tokens(draft: Draft) -> torch.Tensor:
    """Int32 [n, c]: what is proposed for the place behind each root, -1 where there is less than c."""
    if draft.parents is None:
        return draft.tokens[:, :1]
    is_node = torch.arange(draft.tokens.shape[1]) < draft.lengths[:, None]
    is_first = (draft.parents == -1) & is_node
    return torch.where(is_first.to(draft.tokens.device, non_blocking=True), draft.tokens, -1)
