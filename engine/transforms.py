"""From raw logits to the target's distribution at every verify row, each row counting its drafts as already emitted.

Owns the transforms and their order (vLLM's): allowed_token_ids, bad_words, min_tokens, logit_bias, penalties,
temperature, min_p, top_k, top_p. Never changes the raw logits, never draws. Called by accept.
B = spans that sample, W = max_draft_len, R = logits rows, V = vocabulary, n = some of the R rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.sampling import PenaltyCounts, SamplingRows
from protocol.sampling import SamplingParams

NO_TOKEN = -float("inf")  # the logit of a banned token
_PENALTY_SPANS = 64  # spans penalised at once: bounds the stacked counts, int32 [64, V]
_LARGEST_ON_HOST = (64, 1024)  # see `_nucleus_edge`


@dataclass(frozen=True)
class DraftPaths:
    """The draft as seen from each logits row: which drafted tokens lie between the committed history and the row."""

    tokens: torch.Tensor  # int64 [B, W], 0 beyond the real length
    parents: torch.Tensor | None  # int64 [B, W], -1 = the root; None = chain
    roots: torch.Tensor | None  # int64 [B], -1 = none
    depth: torch.Tensor  # int64 [R], draft tokens before the row's own prediction (a root counts)
    ancestors: torch.Tensor | None  # bool [B, W + 1, W], node i is on the path to step j; None = chain

    @classmethod
    def of(
        cls, tokens: torch.Tensor, parents: torch.Tensor | None, roots: torch.Tensor | None, rows: SamplingRows
    ) -> "DraftPaths":
        """See the fields; `tokens` and `parents` are clean beyond the real lengths."""
        tree = None if parents is None else _ancestors(parents)
        depth = rows.step if tree is None else tree.sum(dim=2)[rows.span, rows.step.clamp(max=tokens.shape[1])]
        if roots is not None:
            depth = depth + (roots >= 0)[rows.span]
        return cls(tokens, parents, roots, depth, tree)

    def emitted(self, rows: SamplingRows, index: torch.Tensor) -> torch.Tensor:
        """Bool [n, W]: the draft nodes already emitted at logits rows `index`."""
        step = rows.step[index]
        if self.ancestors is not None:
            return self.ancestors[rows.span[index], step.clamp(max=self.tokens.shape[1])]
        return torch.arange(self.tokens.shape[1], device=step.device) < step[:, None]


def transformed_logits(logits: torch.Tensor, paths: DraftPaths, rows: SamplingRows) -> torch.Tensor:
    """Float32 [R, V] after bans, bias and penalties: what greedy rows maximise. `logits` itself when nothing applies."""
    masked = [index for index, state in enumerate(rows.states) if state.has_masks_or_bias]
    penalised = [index for index, state in enumerate(rows.states) if state.penalties is not None]
    if not masked and not penalised:
        return logits
    changed = logits.clone()
    for index in masked:
        _apply_masks(changed, paths, rows, index)
    for start in range(0, len(penalised), _PENALTY_SPANS):
        _apply_penalties(changed, paths, rows, penalised[start : start + _PENALTY_SPANS])
    return changed


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Bool [B, W + 1, W] from parents int64 [B, W]: row 0 is the root's (empty), row 1 + i has i and its ancestors."""
    num_spans, width = parents.shape
    reached = torch.zeros(num_spans, width + 1, width, dtype=torch.bool, device=parents.device)
    spans = torch.arange(num_spans, device=parents.device)
    for node in range(width):
        reached[:, node + 1] = reached[spans, parents[:, node] + 1]
        reached[:, node + 1, node] = True
    return reached


def _span_rows(rows: SamplingRows, index: int) -> slice:
    """The logits rows of span `index`."""
    return slice(rows.offsets[index], rows.offsets[index] + rows.counts[index])


# ---- bans and bias: few requests use them, so one span at a time ----


def _apply_masks(logits: torch.Tensor, paths: DraftPaths, rows: SamplingRows, index: int) -> None:
    """Change the rows of one span in place, in the documented order."""
    state = rows.states[index]
    where = _span_rows(rows, index)
    block = logits[where]
    if state.allowed is not None:
        block.masked_fill_(~state.allowed, NO_TOKEN)
    if state.bad_words is not None:
        _ban_bad_words(block, paths, rows, index)
    if state.floor_ids is not None:
        below = state.num_generated + paths.depth[where] < state.params.min_tokens  # bool [n]
        chosen = block[:, state.floor_ids]
        block[:, state.floor_ids] = torch.where(below[:, None], NO_TOKEN, chosen)
    if state.bias is not None:
        ids, values = state.bias
        block.index_add_(1, ids, values.expand(block.shape[0], -1))


def _ban_bad_words(block: torch.Tensor, paths: DraftPaths, rows: SamplingRows, index: int) -> None:
    """Ban the last token of every word whose other tokens end the output at that row (prompt tokens never match)."""
    words = rows.states[index].bad_words
    assert words is not None
    matches = torch.ones(block.shape[0], len(words.last), dtype=torch.bool, device=block.device)
    for back, tokens in enumerate(_walk_back(paths, rows, index, words.max_prefix)):
        wanted = words.prefixes[:, back]  # int64 [words]
        matches &= (wanted == tokens[:, None]) | (wanted == -1)
    # Several words may end alike, so bans are added up instead of written: writes to one place have no order.
    bans = torch.zeros_like(block, dtype=torch.int32)
    bans.index_add_(1, words.last, matches.to(torch.int32))
    block.masked_fill_(bans > 0, NO_TOKEN)


def _walk_back(paths: DraftPaths, rows: SamplingRows, index: int, num_tokens: int) -> Iterable[torch.Tensor]:
    """The output tokens before each row of the span, nearest first: int64 [n] each, -2 where the output began."""
    where = _span_rows(rows, index)
    node = rows.step[where] - 1
    tail = [-2] * num_tokens + list(rows.states[index].output_tail)
    history = torch.tensor(tail[-num_tokens:] if num_tokens else [], dtype=torch.int64).to(
        node.device, non_blocking=True
    )
    if paths.roots is not None and num_tokens:
        root = paths.roots[index].reshape(1)
        history = torch.where(root >= 0, torch.cat([history[1:], root]), history)
    taken = torch.zeros_like(node)
    for _ in range(num_tokens):
        in_draft = node >= 0
        drafted = node.clamp(min=0)
        tokens = history[num_tokens - 1 - taken]
        if paths.tokens.shape[1]:
            tokens = torch.where(in_draft, paths.tokens[index, drafted.clamp(max=paths.tokens.shape[1] - 1)], tokens)
        yield tokens
        taken = taken + (~in_draft).to(torch.int64)
        parent = node - 1 if paths.parents is None else paths.parents[index, drafted]
        node = torch.where(in_draft, parent, node)


# ---- penalties: common (some models' defaults ask for one), so batched ----


def _apply_penalties(logits: torch.Tensor, paths: DraftPaths, rows: SamplingRows, spans: Sequence[int]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output, in place.

    Only the columns of tokens that were seen can change, so only those are read and written: n x columns, not n x V.
    """
    table = [
        (row, local, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for local, index in enumerate(spans)
        for params in (rows.states[index].params,)
        for row in range(rows.offsets[index], rows.offsets[index] + rows.counts[index])
    ]
    parts = torch.tensor(table, dtype=torch.float64).to(logits.device, non_blocking=True).unbind(dim=1)
    index, local = parts[0].to(torch.int64)[:, None], parts[1].to(torch.int64)
    repetition, frequency, presence = (part.to(torch.float32)[:, None] for part in parts[2:])

    counters = [counts for span in spans for counts in (rows.states[span].penalties,) if counts is not None]
    columns = _seen_columns(counters, paths, rows.span[index[:, 0]], local)
    counts = torch.stack([counter.output for counter in counters])[local[:, None], columns]
    counts += _drafted_counts(columns, paths, rows, index[:, 0])
    seen = torch.stack([counter.in_prompt for counter in counters])[local[:, None], columns] | (counts > 0)
    part = logits[index, columns]
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= frequency * counts
    part -= presence * (counts > 0)
    logits[index, columns] = part


def _seen_columns(
    counters: Sequence[PenaltyCounts], paths: DraftPaths, span: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """Token ids int64 [n, columns] that a row's penalties may touch. Repeats are harmless: both get the same value."""
    seen = torch.nn.utils.rnn.pad_sequence([counter.seen for counter in counters], batch_first=True)[local]
    drafted = paths.tokens[span]
    if paths.roots is None:
        return torch.cat([seen, drafted], dim=1)
    return torch.cat([seen, drafted, paths.roots[span][:, None].clamp(min=0)], dim=1)


def _drafted_counts(columns: torch.Tensor, paths: DraftPaths, rows: SamplingRows, index: torch.Tensor) -> torch.Tensor:
    """Int32 [n, columns]: how often the drafts before each of the logits rows `index` emitted the column's token."""
    emitted = paths.emitted(rows, index)
    tokens = torch.where(emitted, paths.tokens[rows.span[index]], -1)
    if paths.roots is not None:
        tokens = torch.cat([tokens, paths.roots[rows.span[index]][:, None]], dim=1)
    counts = torch.zeros_like(columns, dtype=torch.int32)
    for emitted_token in tokens.unbind(dim=1):
        counts += columns == emitted_token[:, None]
    return counts


# ---- temperature and truncation: float64, sampled rows only ----


@dataclass(frozen=True)
class Truncation:
    """Temperature and truncation of n rows that ask for the same kinds; an unused kind is None."""

    temperature: torch.Tensor  # float64 [n, 1], > 0
    min_p: torch.Tensor | None  # float64 [n, 1]
    top_k: torch.Tensor | None  # int64 [n, 1], 1..V
    max_top_k: int
    top_p: torch.Tensor | None  # float64 [n, 1]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "Truncation":
        """For rows with these parameters, which agree in `truncation_kinds`. One upload."""
        top_k = [min(one.top_k or vocab_size, vocab_size) for one in params]
        table = [(one.temperature, one.min_p, float(k), one.top_p) for one, k in zip(params, top_k, strict=True)]
        columns = torch.tensor(table, dtype=torch.float64).to(device, non_blocking=True)
        has_min_p, has_top_k, has_top_p = truncation_kinds(params[0])
        return cls(
            temperature=columns[:, 0:1],
            min_p=columns[:, 1:2] if has_min_p else None,
            top_k=columns[:, 2:3].to(torch.int64) if has_top_k else None,
            max_top_k=max(top_k),
            top_p=columns[:, 3:4] if has_top_p else None,
        )


def truncation_kinds(params: SamplingParams) -> tuple[bool, bool, bool]:
    """Which of (min_p, top_k, top_p) cut anything."""
    return params.min_p > 0.0, params.top_k > 0, params.top_p < 1.0


def target_probs(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Float64 [n, V]: the distribution the next token is drawn from, given n rows of `transformed_logits`.

    The division happens behind the subtraction of the maximum and in float64, so that no temperature above 0
    overflows. A row without a possible token gives NaN. Ties: top_k keeps every token tied with the k-th (as vLLM
    does); top_p keeps the lowest ids of those tied at its edge (vLLM leaves that to its sort).
    """
    scaled = (logits - logits.amax(dim=1, keepdim=True)).to(torch.float64)
    scaled.div_(truncation.temperature)
    if truncation.min_p is not None:
        scaled.masked_fill_(scaled < truncation.min_p.log(), NO_TOKEN)
    if truncation.top_k is not None:
        largest = scaled.topk(truncation.max_top_k, dim=1).values
        scaled.masked_fill_(scaled < largest.gather(1, truncation.top_k - 1), NO_TOKEN)
    probs = scaled.exp_()
    probs.div_(probs.sum(dim=1, keepdim=True))
    if truncation.top_p is not None:
        _cut_to_nucleus(probs, truncation.top_p)
    return probs


def _cut_to_nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep each row's most likely tokens until their mass reaches top_p (at least one) and renormalise, in place."""
    edge, num_ties = _nucleus_edge(probs, top_p)
    ties = probs == edge
    dropped = (probs < edge) | (ties & (ties.cumsum(dim=1, dtype=torch.int32) > num_ties))
    probs.masked_fill_(dropped, 0.0)
    probs.div_(probs.sum(dim=1, keepdim=True))


def _nucleus_edge(probs: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest probability kept, float64 [n, 1], and how many tokens tied with it are kept, int64 [n, 1].

    Sorting the vocabulary is the slowest part of a sampled step on the CPU (49152 entries: 4 to 8 ms a row), and the
    nucleus of real text is small: take a few largest first, and more only for rows where they do not reach. Asking
    whether they do is free on the CPU and would be a synchronisation on a device, which sorts once instead.
    """
    num_rows, vocab_size = probs.shape
    sizes = [vocab_size] if probs.is_cuda else [*(size for size in _LARGEST_ON_HOST if size < vocab_size), vocab_size]
    edge = torch.empty(num_rows, 1, dtype=probs.dtype, device=probs.device)
    num_ties = torch.empty(num_rows, 1, dtype=torch.int64, device=probs.device)
    pending = torch.arange(num_rows, device=probs.device)
    for size in sizes:
        part, limit = probs[pending], top_p[pending]
        largest = part.sort(dim=1, descending=True).values if size == vocab_size else part.topk(size, dim=1).values
        before = largest.cumsum(dim=1) - largest
        num_kept = (before < limit).sum(dim=1, keepdim=True).clamp(min=1)
        edge[pending] = largest.gather(1, num_kept - 1)
        num_ties[pending] = num_kept - (largest > edge[pending]).sum(dim=1, keepdim=True)
        if size < vocab_size:
            pending = pending[largest.sum(dim=1) <= limit[:, 0]]
            if not len(pending):
                break
    return edge, num_ties
