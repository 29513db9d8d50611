"""Medusa as a speculator: heads of the target look at its newest hidden state and name what comes behind the root.

Owns one hidden state per row, that of the position that produced the root; no keys, no recurrence, so a prefix-cache hit,
a preemption or a rollback leaves nothing to repair: whatever runs last before a draft is observed. Never hears of a
rejected token. Built by `medusa_recipe`. Source: Medusa (arXiv 2401.10774), without its typical acceptance, which changes
the text. n = rows that draft, B = rows asked for, h = target's width, W = max_draft_len, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.accept import place_draft
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.medusa_heads import MedusaHeads
from engine.speculation.medusa_tree import FixedTree
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator


class MedusaSpeculator(Speculator):
    def __init__(
        self, heads: MedusaHeads, tree: FixedTree | None, capabilities: Capabilities, watch: FirstTokenWatch
    ) -> None:
        """`tree`: what is drafted for every row, of max_draft_len nodes; None: a chain of every head's one choice."""
        self.capabilities = capabilities
        self._heads = heads
        self._tree = None if tree is None else _TreeFiller(heads, tree)
        self._watch = watch
        self._states: dict[int, tuple[int, torch.Tensor]] = {}  # row -> (position, its hidden state [h])

    def begin(self, start: SequenceStart) -> None:
        self.end(start.row)

    def end(self, row: int) -> None:
        self._states.pop(row, None)
        self._watch.forget(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self._watch.observe(spans)
        if not spans:
            return
        # A copy of a few rows: kept views would hold the hidden states of whole prompts in memory.
        newest = torch.stack([span.taps[-1, 0] for span in spans if span.taps is not None])
        for span, state in zip(spans, newest, strict=True):
            self._states[span.row] = (span.start + len(span.token_ids) - 1, state)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Raises ValueError for a row whose newest state is not that of the position before its root."""
        able = [index for index, row in enumerate(rows) if self._state(row) is not None]
        if not able:
            return self._nothing(len(rows))
        drafting = [rows[index] for index in able]
        read = self._heads.read(torch.stack([state for row in drafting if (state := self._state(row)) is not None]))
        width = self.capabilities.max_draft_len
        if self._tree is not None:
            draft = self._tree.draft(read, drafting)
        else:
            draft = draft_chains(self._heads, read, drafting, width, self.capabilities.gives_probs)
        self._watch.proposed(drafting, draft.tokens[:, :1])
        return place_draft(draft, able, len(rows))

    def _state(self, row: DraftRow) -> torch.Tensor | None:
        """Of the position before the root; None for a row that nothing was told about, which drafts nothing."""
        position, state = self._states.get(row.row, (-1, None))
        if state is not None and position != len(row.token_ids) - 2:
            raise ValueError(f"row {row.row} has position {len(row.token_ids) - 2} behind it; observed was {position}")
        return state

    def _nothing(self, num_rows: int) -> Draft:
        """An empty draft with the parts that every draft of this speculator has."""
        draft = empty_draft(num_rows, self.capabilities.max_draft_len, self._heads.device)
        if self._tree is not None:
            return replace(draft, parents=self._tree.parents(num_rows))
        if self.capabilities.gives_probs:
            return replace(
                draft, probs=torch.zeros(*draft.tokens.shape, self._heads.vocab_size, device=self._heads.device)
            )
        return draft


def draft_chains(
    heads: MedusaHeads, read: torch.Tensor, rows: Sequence[DraftRow], width: int, is_sampled: bool
) -> Draft:
    """One token of each head, as many as the row's budget; with `is_sampled` drawn, and with what they were drawn from.

    The heads do not see each other's tokens, so what each was drawn from is its own distribution, whatever came before.
    """
    vocab_size, device = heads.vocab_size, heads.device
    lengths = [min(row.budget, width) for row in rows]
    tokens = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
    probs = torch.zeros(len(rows), width, vocab_size, device=device) if is_sampled else None
    chooser = Chooser(rows, vocab_size, device) if is_sampled else None
    behind_root = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64).to(device, non_blocking=True)
    for head in range(max(lengths)):
        logits = heads.logits(head, read)
        if chooser is None or probs is None:
            tokens[:, head] = heads.target_tokens(logits.argmax(dim=1))
        else:
            tokens[:, head], probs[:, head] = chooser.choose(heads.target_logits(logits), behind_root + head)
    return _draft(tokens, lengths, None, probs)


class _TreeFiller:
    """Puts the heads' choices into the places of one fixed tree."""

    def __init__(self, heads: MedusaHeads, tree: FixedTree) -> None:
        self._heads = heads
        self._tree = tree
        num_heads = 1 + max(tree.heads)
        self._top_k = [
            1 + max(rank for head, rank in zip(tree.heads, tree.ranks, strict=True) if head == level)
            for level in range(num_heads)
        ]
        firsts = [sum(self._top_k[:head]) for head in tree.heads]
        columns = [first + rank for first, rank in zip(firsts, tree.ranks, strict=True)]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=heads.device)  # [W], see `draft`
        self._parents = torch.tensor(tree.parents, dtype=torch.int32)

    def parents(self, num_rows: int) -> torch.Tensor:
        """int32 [n, W], on the host, which lays the tree out: it is the same for all."""
        return self._parents.expand(num_rows, -1)

    def draft(self, read: torch.Tensor, rows: Sequence[DraftRow]) -> Draft:
        """The best `budget` nodes for each row. Deterministic."""
        ranked = [self._heads.logits(head, read).topk(top_k, dim=1).indices for head, top_k in enumerate(self._top_k)]
        tokens = self._heads.target_tokens(torch.cat(ranked, dim=1)[:, self._columns])
        lengths = [min(row.budget, len(self._tree)) for row in rows]
        return _draft(tokens.to(torch.int32), lengths, self.parents(len(rows)), None)


def _draft(
    tokens: torch.Tensor, lengths: Sequence[int], parents: torch.Tensor | None, probs: torch.Tensor | None
) -> Draft:
    """Lengths and sources stay on the host, which knows them already."""
    return Draft(
        tokens=tokens,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        parents=parents,
        probs=probs,
        roots=None,
        sources=torch.zeros(len(lengths), dtype=torch.int8),
        num_forwards=1,
    )
