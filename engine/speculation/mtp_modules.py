"""Several MTP modules as a speculator: module j drafts the j-th token behind the root.

Owns, per row, what each module has not read yet; the modules' keys live in one pool under the target's block ids, a
module per layer. Never hears of a rejected token. Built by `mtp_recipe`; one module alone is drafted with by
`eagle_drafter`. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2: the modules keep the causal chain at each depth).
h = width, W = max_draft_len, V = vocabulary, n = rows.

Module j reads at position i the output of module j - 1 there and the token at i + 1 + j. Behind a root at position C the
text is known up to C, so module j has its keys up to position C - 1 - j: it lags by j. The outputs that it will read
first, when more text is known, are kept. Drafting computes the missing positions with drafted tokens; they are computed
again with the committed ones, which writes the same slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.accept import place_draft
from engine.kv.pool import KVPool
from engine.model.grouped import GroupedAttention
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.draft_step import DraftSpan, DraftStep
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.mtp_head import MtpModule
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator


@dataclass(frozen=True)
class _Heard:
    """What the modules know of a row. `waiting` of module j: its inputs from position `end(j)` on, none or one."""

    first: int  # positions before it came from the prefix cache, with the keys of all modules
    root: int
    waiting: tuple[torch.Tensor, ...]  # per module [0 or 1, h]

    def end(self, module: int) -> int:
        """The first position whose keys the module cannot have yet."""
        return max(self.first, self.root - module)


@dataclass(frozen=True)
class _Asked:
    """A row that drafts."""

    row: DraftRow
    budget: int
    heard: _Heard


class MtpModulesSpeculator(Speculator):
    """`context_length`: positions the modules were made for; rows beyond run at k = 0."""

    def __init__(
        self,
        modules: Sequence[MtpModule],
        pool: KVPool,
        capabilities: Capabilities,
        context_length: int,
        watch: FirstTokenWatch,
    ) -> None:
        """Two modules or more, as many as `capabilities` drafts tokens or more; each has its layer of `pool`."""
        self.capabilities = capabilities
        self._modules = tuple(modules)
        self._pool = pool
        self._attention = GroupedAttention(pool, modules[0].arch.num_heads)
        self._context_length = context_length
        self._watch = watch
        self._rows: dict[int, _Heard] = {}

    def begin(self, start: SequenceStart) -> None:
        self.end(start.row)

    def end(self, row: int) -> None:
        self._rows.pop(row, None)
        self._watch.forget(row)

    # ---- committed text ----

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """Raises ValueError for a span that does not follow the row's last one."""
        self._watch.observe(spans)
        spans = [span for span in spans if span.token_ids]
        if not spans:
            return
        before = [self._before(span) for span in spans]
        self._clear_from(spans)
        taps = torch.cat([span.taps for span in spans if span.taps is not None])
        counts = [len(span.token_ids) for span in spans]
        outputs = self._modules[0].features(taps).split_with_sizes(counts)
        waiting: list[list[torch.Tensor]] = [[] for _ in spans]
        for module in self._modules:
            inputs = [torch.cat([heard.waiting[module.index], new]) for heard, new in zip(before, outputs, strict=True)]
            outputs = self._extend(module, spans, before, inputs)
            for kept, read, given in zip(waiting, inputs, self._num_read(module, spans, before), strict=True):
                kept.append(read[given:].clone())  # a view would keep the whole prompt's outputs alive
        for span, heard, kept in zip(spans, before, waiting, strict=True):
            self._rows[span.row] = _Heard(heard.first, _root(span), tuple(kept))

    def _before(self, span: CommittedSpan) -> _Heard:
        heard = self._rows.get(span.row)
        if heard is None:
            arch = self._modules[0].arch
            nothing = torch.empty(0, arch.hidden_size, dtype=self._pool.shape.dtype, device=self._pool.device)
            return _Heard(span.start, span.start, (nothing,) * len(self._modules))
        if heard.root != span.start:
            raise ValueError(f"row {span.row} goes on at position {span.start}; observed was up to {heard.root}")
        return heard

    def _num_read(self, module: MtpModule, spans: Sequence[CommittedSpan], before: Sequence[_Heard]) -> list[int]:
        """Positions per span that the module can compute now."""
        ends = [_Heard(heard.first, _root(span), ()).end(module.index) for span, heard in zip(spans, before)]
        return [end - heard.end(module.index) for end, heard in zip(ends, before, strict=True)]

    def _extend(
        self,
        module: MtpModule,
        spans: Sequence[CommittedSpan],
        before: Sequence[_Heard],
        inputs: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Write the module's keys as far as the text goes; its outputs per span, none of the last module."""
        counts = self._num_read(module, spans, before)
        laid, tokens = [], []
        for span, heard, count in zip(spans, before, counts, strict=True):
            if not count:
                continue
            start = heard.end(module.index)
            behind = [*span.token_ids[1:], span.next_token_id]  # from position span.start + 1 on
            first = start + module.index - span.start
            tokens += behind[first : first + count]
            laid.append(DraftSpan(start, count, span.block_ids))
        features = torch.cat([read[:count] for read, count in zip(inputs, counts, strict=True)])
        if module is self._modules[-1] and laid:
            step = DraftStep.of(laid, self._pool)
            token_ids = self._pool.slots_tensor(tokens)
            module.write_keys(self._attention, features, token_ids, step.positions, step.slots)
        elif laid:
            features = self._run(module, laid, features, self._pool.slots_tensor(tokens))
        return features.split_with_sizes(counts)

    def _run(
        self, module: MtpModule, spans: Sequence[DraftSpan], features: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        step = DraftStep.of(spans, self._pool)
        layout = self._attention.layout(step.layouts)
        return module.forward(self._attention, layout, features, token_ids, step.positions, step.slots)

    def _clear_from(self, spans: Sequence[CommittedSpan]) -> None:
        """Zero what the spans enter, to the end of their last blocks.

        Whole blocks are read under a mask, and a block may have been somebody else's: 0 * NaN would be NaN.
        """
        slots: list[int] = []
        for span in spans:
            end = _root(span)
            end += -end % self._pool.block_size
            slots += (self._pool.slot(span.block_ids, position) for position in range(span.start, end))
        self._pool.clear(self._pool.slots_tensor(slots))

    # ---- drafts ----

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Raises ValueError for a row whose last committed position was not observed."""
        asked = {index: one for index, row in enumerate(rows) if (one := self._asked(row)) is not None}
        if not asked:
            draft = empty_draft(len(rows), self.capabilities.max_draft_len, self._pool.device)
            probs = self._no_probs(len(rows))
            return Draft(draft.tokens, draft.lengths, None, probs, None, draft.sources, num_forwards=0)
        drafting = list(asked.values())
        draft = self._draft(drafting)
        self._watch.proposed([one.row for one in drafting], draft.tokens[:, :1])
        return place_draft(draft, list(asked), len(rows))

    def _asked(self, row: DraftRow) -> _Asked | None:
        """None for a row that cannot draft."""
        root = len(row.token_ids) - 1
        budget = min(row.budget, self.capabilities.max_draft_len, self._context_length - root)
        if budget <= 0:
            return None
        heard = self._rows.get(row.row)
        if heard is None or heard.root != root:
            observed = -1 if heard is None else heard.root - 1
            raise ValueError(f"row {row.row} has position {root - 1} behind it; observed was {observed}")
        return _Asked(row, budget, heard)

    def _draft(self, asked: Sequence[_Asked]) -> Draft:
        """All rows run as many modules as the longest budget wants: they write to slots before the root only."""
        device, vocab_size = self._pool.device, self._modules[0].arch.vocab_size
        tokens = torch.zeros(len(asked), self.capabilities.max_draft_len, dtype=torch.int64, device=device)
        probs = self._no_probs(len(asked))
        chooser = None if probs is None else Chooser([one.row for one in asked], vocab_size, device)
        roots = self._pool.slots_tensor([one.heard.root for one in asked])
        num_steps = max(one.budget for one in asked)
        # The first module's newest output exists already: the second one waits to read it.
        newest = torch.cat([one.heard.waiting[1] for one in asked])
        outputs: Sequence[torch.Tensor] = [newest[:0]] * len(asked)
        for step, module in enumerate(self._modules[:num_steps]):
            if step:
                outputs = self._ahead(module, asked, outputs, tokens)
                newest = torch.stack([output[-1] for output in outputs])
            logits = module.logits(newest)
            if chooser is None or probs is None:
                tokens[:, step] = logits.argmax(dim=1)
            else:
                tokens[:, step], probs[:, step] = chooser.choose(logits, roots + 1 + step)
        return Draft(
            tokens=tokens.to(torch.int32),
            lengths=torch.tensor([one.budget for one in asked], dtype=torch.int32).to(device),
            parents=None,
            probs=probs,
            roots=None,
            sources=torch.zeros(len(asked), dtype=torch.int8, device=device),
            num_forwards=num_steps - 1,
        )

    def _ahead(
        self, module: MtpModule, asked: Sequence[_Asked], outputs: Sequence[torch.Tensor], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The module's outputs at the positions before the root that drafted tokens complete, per row."""
        laid, inputs, behind = [], [], []
        for one, drafted, new in zip(asked, tokens, outputs, strict=True):
            start = one.heard.end(module.index)
            count = one.heard.root - start
            laid.append(DraftSpan(start, count, one.row.block_ids))
            inputs += [one.heard.waiting[module.index], new]
            behind.append(drafted[module.index - count : module.index])
        hidden = self._run(module, laid, torch.cat(inputs), torch.cat(behind))
        return hidden.split_with_sizes([span.num_tokens for span in laid])

    def _no_probs(self, count: int) -> torch.Tensor | None:
        """float32 [count, W, V] of zeros, where drafts are drawn."""
        if not self.capabilities.gives_probs:
            return None
        width, vocab_size = self.capabilities.max_draft_len, self._modules[0].arch.vocab_size
        return torch.zeros(count, width, vocab_size, device=self._pool.device)


def _root(span: CommittedSpan) -> int:
    """Position of the token behind the span."""
    return span.start + len(span.token_ids)
