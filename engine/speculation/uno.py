"""UNO: the target drafts for itself, several positions in one forward, with an adapter on the rows it has to guess for.

Owns the drafting forward and what is chosen from it; keeps nothing of a row, so a prefix-cache hit, a preemption or a
rollback leaves nothing to repair. Never hears of a rejected token. Built by `uno_recipe`. Source: "Unlocking Lossless
Speedups in LLMs via Discrete Diffusion", as served by SGLang (pull request 37667).

The forward feeds the last committed token as it is and, behind it, tokens drawn uniformly from the vocabulary: noise. The
first row has the target's own weights, so what it says is the target's own next token: the root of the draft, which needs
no verdict. Noise row j has the adapter and guesses the token behind its own place. The verify forward then computes all
these positions again with the target's own weights, the last committed token among them: nothing that a drafter wrote is
ever read by a verdict. Two forwards, and two tokens of the target's own: the root, and what the verdict adds.

n = rows that draft, B = rows asked for, T = tokens of the forward, J = most noise rows of a row, V = vocabulary,
W = max_draft_len.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.accept import place_draft
from engine.kv.pool import KVPool
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.model.low_rank import LayerAdapter, RowAdapter
from engine.noise import Purpose, uniforms
from engine.speculation.choice import Chooser
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.draft_step import DraftSpan, DraftStep
from engine.speculation.first_token_watch import FirstTokenWatch
from engine.speculation.growing_tree import ROOT, GrowingTree
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, Speculator


@dataclass(frozen=True)
class _Guesses:
    """What one drafting forward said. Columns at and beyond a row's `counts` repeat its last one."""

    rows: Sequence[DraftRow]  # n
    counts: tuple[int, ...]  # n, noise rows of each
    logits: torch.Tensor  # float32 [n, 1 + J, V]; column 0 is the target's own


class UnoSpeculator(Speculator):
    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        adapter: tuple[LayerAdapter, ...],
        capabilities: Capabilities,
        tree: tuple[int, int] | None,
        watch: FirstTokenWatch,
    ) -> None:
        """`model` and `pool`: the target's own. `tree`: (levels, choices per level) of trees; None: chains."""
        self.capabilities = capabilities
        self._model = model
        self._pool = pool
        self._attention = GroupedAttention(pool, model.arch.num_heads)
        self._adapter = adapter
        self._tree = tree
        self._watch = watch

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        self._watch.observe(spans)

    def end(self, row: int) -> None:
        self._watch.forget(row)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """A root and `budget` - 1 tokens behind it. With room for the root alone nothing: plain decoding says it as well."""
        able = [index for index, row in enumerate(rows) if row.budget >= 2]
        if not able:
            return empty_draft(len(rows), self.capabilities.max_draft_len, torch.device("cpu"))
        guesses = self._guess([rows[index] for index in able])
        draft = self._chains(guesses) if self._tree is None else self._trees(guesses, self._tree[1])
        self._watch.proposed(guesses.rows, draft.tokens[:, :1], num_between=1)
        return place_draft(draft, able, len(rows))

    # ---- the forward ----

    def _guess(self, rows: Sequence[DraftRow]) -> _Guesses:
        levels = self.capabilities.max_draft_len - 1 if self._tree is None else self._tree[0]
        counts = tuple(min(row.budget, self.capabilities.max_draft_len) - 1 for row in rows)
        counts = tuple(min(count, levels) for count in counts)
        spans = [
            DraftSpan(len(row.token_ids) - 1, 1 + count, row.block_ids) for row, count in zip(rows, counts, strict=True)
        ]
        stale = [slot for span in spans for slot in self._stale_slots(span)]
        if stale:
            self._pool.clear(self._pool.slots_tensor(stale))
        step = DraftStep.of(spans, self._pool)
        tokens, noise, grid = self._fed(rows, counts, step)
        layout = self._attention.layout(step.layouts)
        hidden, _ = self._model.forward(
            ForwardInput(tokens, step.positions, step.slots),
            self._attention,
            layout,
            adapter=RowAdapter(self._adapter, noise),
        )
        return _Guesses(rows, counts, self._model.logits(hidden)[grid])

    def _fed(
        self, rows: Sequence[DraftRow], counts: Sequence[int], step: DraftStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids int64 [T], which of them are noise int64 [T - n], and each row's places in the step int64 [n, 1 + J].

        Noise is a function of the sequence's seed and the position, so a draft can be made again.
        """
        seeds = [row.seed for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        ends = [int(end) for end in torch.tensor(counts).add(1).cumsum(0)]
        places = [list(range(end - count - 1, end)) for end, count in zip(ends, counts, strict=True)]
        widest = 1 + max(counts)
        grid = [index for own in places for index in (*own, *[own[-1]] * (widest - len(own)))]
        noise = [index for own in places for index in own[1:]]
        roots = [own[0] for own in places]
        parts = [seeds, noise, roots, [row.token_ids[-1] for row in rows], grid]
        uploaded = self._pool.slots_tensor([value for part in parts for value in part])
        seeds_at, noise_at, roots_at, last, grid_at = torch.split_with_sizes(uploaded, [len(part) for part in parts])
        numbers = uniforms(seeds_at, step.positions[noise_at], Purpose.NOISE)
        tokens = torch.empty(ends[-1], dtype=torch.int64, device=self._pool.device)
        tokens[noise_at] = (numbers * self._model.arch.vocab_size).to(torch.int64)
        tokens[roots_at] = last
        return tokens, noise_at, grid_at.view(len(rows), widest)

    def _stale_slots(self, span: DraftSpan) -> Iterable[int]:
        """Slots behind the fed tokens in blocks the row enters: whole blocks are read under a mask, and 0 * NaN is NaN."""
        size, end = self._pool.block_size, span.start + span.num_tokens
        first_entered = -(-span.start // size) * size
        behind = range(max(first_entered, end), -(-end // size) * size)
        return (self._pool.slot(span.block_ids, position) for position in behind)

    # ---- what it comes to ----

    def _chains(self, guesses: _Guesses) -> Draft:
        """The likeliest token of each noise row, or one drawn from it and the distribution it was drawn from."""
        rows, logits = guesses.rows, guesses.logits
        width, vocab_size, device = self.capabilities.max_draft_len, logits.shape[2], logits.device
        chooser = Chooser(rows, vocab_size, device)
        behind = self._pool.slots_tensor([len(row.token_ids) for row in rows])
        roots = _roots(chooser, logits[:, 0], behind)
        tokens = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        most = max(guesses.counts)
        if not self.capabilities.gives_probs:
            tokens[:, :most] = logits[:, 1:].argmax(dim=2).to(torch.int32)
            return _draft(tokens, guesses.counts, None, None, roots)
        probs = torch.zeros(len(rows), width, vocab_size, device=device)
        for index in range(most):
            tokens[:, index], probs[:, index] = chooser.choose(logits[:, 1 + index], behind + 1 + index)
        return _draft(tokens, guesses.counts, None, probs, roots)

    def _trees(self, guesses: _Guesses, top_k: int) -> Draft:
        """The likeliest paths through the noise rows' choices, which do not see each other. Deterministic.

        The one copy to the host: which nodes there are depends on the values.
        """
        logits = guesses.logits
        behind = self._pool.slots_tensor([len(row.token_ids) for row in guesses.rows])
        roots = _roots(Chooser(guesses.rows, logits.shape[2], logits.device), logits[:, 0], behind)
        values, choices = logits[:, 1:].log_softmax(dim=2).topk(top_k, dim=2)
        on_host = torch.stack([values.to(torch.float64), choices.to(torch.float64)]).cpu()
        all_values, all_choices = on_host[0].tolist(), on_host[1].to(torch.int64).tolist()
        width = self.capabilities.max_draft_len
        tokens = torch.zeros(len(guesses.rows), width, dtype=torch.int32)
        parents = torch.full((len(guesses.rows), width), ROOT, dtype=torch.int32)
        lengths = []
        for index, row in enumerate(guesses.rows):
            tree = GrowingTree(min(row.budget, width) - 1, top_k)
            for level in range(guesses.counts[index]):
                beams = len(tree.beams)
                tree.extend([all_choices[index][level]] * beams, [all_values[index][level]] * beams)
            node_tokens, node_parents = tree.draft()
            lengths.append(len(node_tokens))
            tokens[index, : len(node_tokens)] = torch.tensor(node_tokens, dtype=torch.int32)
            parents[index, : len(node_parents)] = torch.tensor(node_parents, dtype=torch.int32)
        return _draft(tokens.to(logits.device), lengths, parents, None, roots)


def _roots(chooser: Chooser, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Int32 [n]: the target's own tokens; -1 where it said nothing that is a number, which fails the row's verdict."""
    # One pass, as in engine.accept: a finite row's sum stays finite.
    return torch.where(logits.sum(dim=1).isfinite(), chooser.of_target(logits, positions), -1).to(torch.int32)


def _draft(
    tokens: torch.Tensor,
    lengths: Sequence[int],
    parents: torch.Tensor | None,
    probs: torch.Tensor | None,
    roots: torch.Tensor,
) -> Draft:
    """Lengths, sources and a tree's shape stay on the host, which knows them already."""
    return Draft(
        tokens=tokens,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        parents=parents,
        probs=probs,
        roots=roots,
        sources=torch.zeros(len(lengths), dtype=torch.int8),
        num_forwards=1,
        has_root=torch.ones(len(lengths), dtype=torch.bool),
    )
