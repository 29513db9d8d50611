"""Frozen-KV drafting: an assistant that reads the target's keys and owns none, so it has no prompt to read either.

Owns one hidden state per row, the newest; reads the target's pages and never writes them. Never hears of a rejected
token. Built by `frozen_kv_recipe`. Source: Gemma 4's assistant models. h = the target's width, W = max_draft_len,
V = vocabulary.

The keys it reads are those before the root: the root's own is not written yet. In that slot of a row's last block may be
the key of a draft that was rejected, which transformers 5.24 reads after such a round; here nobody does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.accept import place_draft
from engine.kv.pool import KVPool
from engine.model.attention import SpanLayout
from engine.model.grouped import GroupedAttention
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.frozen_kv_head import FrozenKvHead
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator


@dataclass(frozen=True)
class _Asked:
    """A row that drafts."""

    row: DraftRow
    budget: int
    feature: torch.Tensor  # [h], of the position before the root

    @property
    def root(self) -> int:
        return len(self.row.token_ids) - 1


class FrozenKvSpeculator(Speculator):
    """`pool` is the target's. `context_length`: positions the assistant was made for; rows beyond run at k = 0."""

    def __init__(
        self,
        head: FrozenKvHead,
        pool: KVPool,
        capabilities: Capabilities,
        context_length: int,
        watch: FirstTokenWatch,
    ) -> None:
        self.capabilities = capabilities
        self._head = head
        self._pool = pool
        self._attention = GroupedAttention(pool, head.num_heads)
        self._context_length = context_length
        self._watch = watch
        self._newest: dict[int, tuple[int, torch.Tensor]] = {}  # row -> (position, its feature [h])

    def begin(self, start: SequenceStart) -> None:
        self.end(start.row)

    def end(self, row: int) -> None:
        self._newest.pop(row, None)
        self._watch.forget(row)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """Only each span's last state is kept: the rest of the text is in the target's keys."""
        self._watch.observe(spans)
        heard = [(span, span.taps[-1, 0]) for span in spans if span.token_ids and span.taps is not None]
        if not heard:
            return
        features = self._head.features(torch.stack([tap for _, tap in heard]))
        for (span, _), feature in zip(heard, features, strict=True):
            self._newest[span.row] = (span.start + len(span.token_ids) - 1, feature)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Raises ValueError for a row whose last committed position was not observed."""
        asked = {index: one for index, row in enumerate(rows) if (one := self._asked(row)) is not None}
        if not asked:
            none = empty_draft(len(rows), self.capabilities.max_draft_len, self._pool.device)
            return replace(none, probs=self._no_probs(len(rows)))
        drafting = list(asked.values())
        draft = self._draft(drafting)
        self._watch.proposed([one.row for one in drafting], draft.tokens[:, :1])
        return place_draft(draft, list(asked), len(rows))

    def _asked(self, row: DraftRow) -> _Asked | None:
        """None for a row that cannot draft."""
        root = len(row.token_ids) - 1
        budget = min(row.budget, self.capabilities.max_draft_len)
        if budget <= 0 or root >= self._context_length:
            return None
        position, feature = self._newest.get(row.row, (-1, None))
        if feature is None or position != root - 1:
            raise ValueError(f"row {row.row} has position {root - 1} behind it; observed was {position}")
        return _Asked(row, budget, feature)

    def _draft(self, asked: Sequence[_Asked]) -> Draft:
        """All rows run as many steps as the longest budget wants: a step writes nothing."""
        device, num_steps = self._pool.device, max(one.budget for one in asked)
        tokens = torch.zeros(len(asked), self.capabilities.max_draft_len, dtype=torch.int64, device=device)
        probs = self._no_probs(len(asked))
        chooser = None if probs is None else Chooser([one.row for one in asked], self._head.vocab_size, device)
        uploaded = self._pool.slots_tensor([one.root for one in asked] + [one.row.token_ids[-1] for one in asked])
        roots, newest = torch.split_with_sizes(uploaded, [len(asked)] * 2)
        # One query per row, at the slot before the root: it sees that slot and all before it, and stands at the root.
        layout = self._attention.layout([SpanLayout(one.root - 1, 1, one.row.block_ids) for one in asked])
        rotation = self._head.rotation(roots)
        features = torch.stack([one.feature for one in asked])
        for step in range(num_steps):
            hidden = self._head.forward(self._attention, layout, features, newest, rotation)
            logits = self._head.logits(hidden)
            if chooser is None or probs is None:
                newest = logits.argmax(dim=1)
            else:
                newest, probs[:, step] = chooser.choose(logits, roots + 1 + step)
            tokens[:, step] = newest
            features = self._head.fed_back(hidden)
        return Draft(
            tokens=tokens.to(torch.int32),
            lengths=torch.tensor([one.budget for one in asked], dtype=torch.int32),
            parents=None,
            probs=probs,
            roots=None,
            sources=torch.zeros(len(asked), dtype=torch.int8),
            num_forwards=num_steps,
        )

    def _no_probs(self, count: int) -> torch.Tensor | None:
        """float32 [count, W, V] of zeros, where drafts are drawn."""
        if not self.capabilities.gives_probs:
            return None
        width = self.capabilities.max_draft_len
        return torch.zeros(count, width, self._head.vocab_size, device=self._pool.device)
