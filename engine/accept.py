"""The verdict on a draft: which tokens the target itself would have emitted. Pure; no host synchronisation.

Owns the acceptance rules, chosen only from (greedy, draft probabilities present, tree), never from the drafter.
Never counts, never stops a sequence (EOS, stops and max_tokens are the ledger's), never changes its arguments.
Called by the model executor once per step. B = spans that sample, W = max_draft_len, R = logits rows, V = vocabulary,
n = logits rows and S = spans of one group.

    state = SamplingState(params, seed, token_ids, num_prompt_tokens, model)     # when the row begins
    rows = SamplingRows.build(states, [1 + drafted for drafted in lengths], device)  # B states, every sampling span
    verdict = accept(logits, place_draft(draft, indices, len(states)), rows)     # draft rows sit at `indices` of B
    packed = pack(verdict, logprobs).cpu()                                       # engine.logprobs: the one copy
    state.commit(committed_tokens)                                               # what the ledger kept
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.sampling import SamplingRows
from engine.speculation.draft import Draft
from engine.transforms import (
    DraftPaths,
    Truncation,
    target_probs,
    transformed_logits,
    truncation_kinds,
)

# Most entries (rows x V) of one float64 distribution: 8 MiB stay in a CPU's cache (96 rows of 49152: 62 ms of CPU time
# instead of 125 ms at 128 MiB, AVX2); on a device 128 MiB bound the memory.
_GROUP_ELEMENTS_ON_HOST = 2**20
_GROUP_ELEMENTS_ON_DEVICE = 2**24


@dataclass(frozen=True)
class Verdict:
    """What each span came to. Entries of `tokens` at and beyond accepted + num_non_draft are zero."""

    tokens: torch.Tensor  # int32 [B, W + 2], accepted draft tokens, then the target's own; in sequence order
    accepted: torch.Tensor  # int32 [B]
    num_non_draft: torch.Tensor  # int32 [B]: 1, or 2 when drafting produced a root (UNO: it comes first in `tokens`)
    path: torch.Tensor | None  # int32 [B, W], accepted tree nodes in order (then -1); None for chains
    rows: torch.Tensor  # int64 [B, W + 1], the logits row that decided the i-th verified token; valid to `accepted`
    finite: torch.Tensor  # bool [B], raw logits on the accepted path were finite; False: every other field is garbage
    has_choice: torch.Tensor  # bool [B], the request's own bans left a token to choose; False: garbage as well


def accept(logits: torch.Tensor, draft: Draft, rows: SamplingRows) -> Verdict:
    """Judge the drafts of B spans against raw target logits, float32 [R, V]. Draft's B follows `rows.states`.

    Greedy rows take the argmax (lowest index wins). Sampled rows without draft probabilities, and every tree, draw the
    target's own token with the number plain decoding would use at that position; a draft token stays while it equals
    the draw: the law of one-hot rejection sampling, and the very tokens of plain decoding. Sampled chains with draft
    probabilities follow rejection sampling (Leviathan et al., arXiv 2211.17192, strict form): the law only. A draft that
    says how many of its tokens stay (a chain without probabilities) is not judged: synthetic acceptance, no law at all.
    """
    step = _Step.of(logits, draft, rows)
    groups = _sampled_groups(rows, logits.shape[1], logits.device)
    chosen = step.target.argmax(dim=1)  # int64 [R], what the row itself would emit
    if step.draft_probs is None:
        for group in groups:
            chosen[group.rows] = _draw_at(step, group)
    if step.paths.parents is not None:
        return _tree_verdict(step, chosen)
    keeps = step.judged_tokens() == chosen  # bool [R], the draft token the row judges stays
    if step.draft_probs is not None:
        for group in groups:
            keeps[group.rows] = _keeps(step, group, step.draft_probs)
    accepted = (keeps[step.grid[:, :-1]] & step.valid).to(torch.int64).cumprod(dim=1).sum(dim=1)
    if draft.accepted is not None:
        wanted = draft.accepted.to(device=logits.device, dtype=torch.int64, non_blocking=True)
        accepted = torch.minimum(wanted, step.lengths)
    final = chosen[_at(step.grid, accepted)]
    if step.draft_probs is not None:
        for group in groups:
            final[group.spans] = _correct(step, group, accepted[group.spans], step.draft_probs)
    return _verdict(step, step.paths.tokens, accepted, final, step.grid)


def place_draft(draft: Draft, indices: Sequence[int], num_spans: int) -> Draft:
    """Spread a draft of `len(indices)` rows over `num_spans` spans; the other spans get length zero."""
    if list(indices) == list(range(num_spans)):
        return draft
    where = torch.tensor(indices, dtype=torch.int64)
    where_tokens = where.to(draft.tokens.device, non_blocking=True)

    def placed(part: torch.Tensor, fill: int = 0) -> torch.Tensor:
        # Lengths and sources may have stayed on the host, which knows them without a copy from the device.
        at = where_tokens if part.device == where_tokens.device else where
        spread = torch.full((num_spans, *part.shape[1:]), fill, dtype=part.dtype, device=part.device)
        return spread.index_copy_(0, at, part)

    return replace(
        draft,
        tokens=placed(draft.tokens),
        lengths=placed(draft.lengths),
        parents=None if draft.parents is None else placed(draft.parents, -1),
        probs=None if draft.probs is None else placed(draft.probs),
        roots=None if draft.roots is None else placed(draft.roots, -1),
        accepted=None if draft.accepted is None else placed(draft.accepted),
        has_root=None if draft.has_root is None else placed(draft.has_root),
        sources=placed(draft.sources),
    )


# ---- the step as the rules read it ----


@dataclass(frozen=True)
class _Step:
    """One call's inputs, cleaned: everything on the logits' device, nothing undefined."""

    raw: torch.Tensor  # float32 [R, V]
    target: torch.Tensor  # float32 [R, V], after bans, bias and penalties
    rows: SamplingRows
    paths: DraftPaths
    lengths: torch.Tensor  # int64 [B]
    valid: torch.Tensor  # bool [B, W]
    draft_probs: torch.Tensor | None  # float32 [B, W, V], where the rule reads them
    lacks_root: torch.Tensor | None  # bool [B], a root was to be drawn from logits that were not finite
    grid: torch.Tensor  # int64 [B, W + 1], the logits row of each step of a span; its last row beyond

    @classmethod
    def of(cls, logits: torch.Tensor, draft: Draft, rows: SamplingRows) -> "_Step":
        device = logits.device
        # Uploads never wait (`non_blocking`, here and wherever sampling uploads): the device still computes the logits.
        lengths = draft.lengths.to(device=device, dtype=torch.int64, non_blocking=True)
        width = draft.tokens.shape[1]
        valid = torch.arange(width, device=device) < lengths[:, None]
        tokens = torch.where(valid, draft.tokens.to(device=device, dtype=torch.int64, non_blocking=True), 0)
        parents = None
        if draft.parents is not None:
            parents = torch.where(valid, draft.parents.to(device=device, dtype=torch.int64, non_blocking=True), -1)
        roots = None if draft.roots is None else draft.roots.to(device=device, dtype=torch.int64, non_blocking=True)
        paths = DraftPaths.of(tokens, parents, roots, rows)
        reads_probs = draft.probs is not None and parents is None and width > 0
        grid = rows.first_row[:, None] + torch.arange(width + 1, device=device)
        return cls(
            raw=logits,
            target=transformed_logits(logits, paths, rows),
            rows=rows,
            paths=paths,
            lengths=lengths,
            valid=valid,
            draft_probs=draft.probs.to(device, non_blocking=True) if draft.probs is not None and reads_probs else None,
            lacks_root=None
            if roots is None or draft.has_root is None
            else draft.has_root.to(device, non_blocking=True) & (roots < 0),
            grid=torch.minimum(grid, rows.last_row[:, None]),
        )

    def judged_tokens(self) -> torch.Tensor:
        """Int64 [R]: the chain token each row judges; -1 behind the last."""
        padded = torch.nn.functional.pad(torch.where(self.valid, self.paths.tokens, -1), (0, 1), value=-1)
        return padded[self.rows.span, self.rows.step.clamp(max=padded.shape[1] - 1)]

    def positions(self) -> torch.Tensor:
        """Int64 [R]: the index in the whole sequence of the token each row decides."""
        return self.rows.num_tokens + self.paths.depth


@dataclass(frozen=True)
class _Group:
    """Sampled spans with the same kinds of truncation, so that one call cuts them all and none pays for another's."""

    spans: torch.Tensor  # int64 [S]
    rows: torch.Tensor  # int64 [n], all their logits rows
    by_row: Truncation
    by_span: Truncation


def _sampled_groups(rows: SamplingRows, vocab_size: int, device: torch.device) -> list[_Group]:
    """The sampled spans by truncation kind, in pieces that bound the memory of their distributions."""
    most = (_GROUP_ELEMENTS_ON_HOST if device.type == "cpu" else _GROUP_ELEMENTS_ON_DEVICE) // vocab_size
    pieces: list[list[int]] = []
    open_pieces: dict[tuple[bool, bool, bool], tuple[list[int], int]] = {}
    for index, state in enumerate(rows.states):
        if state.params.is_greedy:
            continue
        kinds = truncation_kinds(state.params)
        piece, num_rows = open_pieces.get(kinds, ([], 0))
        if not piece or num_rows + rows.counts[index] > most:
            piece, num_rows = [], 0
            pieces.append(piece)
        piece.append(index)
        open_pieces[kinds] = (piece, num_rows + rows.counts[index])
    return [_group(piece, rows, vocab_size, device) for piece in pieces]


def _group(spans: Sequence[int], rows: SamplingRows, vocab_size: int, device: torch.device) -> _Group:
    params = [rows.states[index].params for index in spans]
    counts = [rows.counts[index] for index in spans]
    indices = [row for index, count in zip(spans, counts, strict=True) for row in _span_rows(rows, index, count)]
    where = torch.tensor([*spans, *indices], dtype=torch.int64).to(device, non_blocking=True)
    by_row = [one for one, count in zip(params, counts, strict=True) for _ in range(count)]
    return _Group(
        spans=where[: len(spans)],
        rows=where[len(spans) :],
        by_row=Truncation.of(by_row, vocab_size, device),
        by_span=Truncation.of(params, vocab_size, device),
    )


def _span_rows(rows: SamplingRows, index: int, count: int) -> range:
    return range(rows.offsets[index], rows.offsets[index] + count)


# ---- the rules ----


def _draw_at(step: _Step, group: _Group) -> torch.Tensor:
    """Int64 [n]: the target's own token at every row of the group."""
    probs = target_probs(step.target[group.rows], group.by_row)
    return draw(probs, uniforms(step.rows.seeds[group.rows], step.positions()[group.rows], Purpose.SAMPLE))


def _keeps(step: _Step, group: _Group, draft_probs: torch.Tensor) -> torch.Tensor:
    """Bool [n]: rejection sampling keeps the draft token a row judges. Strict, so a target probability of 0 never stays."""
    span = step.rows.span[group.rows]
    index = step.rows.step[group.rows].clamp(max=draft_probs.shape[1] - 1)
    token = step.paths.tokens[span, index]
    probs = target_probs(step.target[group.rows], group.by_row).gather(1, token[:, None]).squeeze(1)
    number = uniforms(step.rows.seeds[group.rows], step.positions()[group.rows], Purpose.ACCEPT)
    return number * draft_probs[span, index, token].to(torch.float64) < probs


def _correct(step: _Step, group: _Group, accepted: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Int64 [S]: the token behind the accepted run: of the residual after a rejection, else of the target."""
    row = _at(step.grid[group.spans], accepted)
    probs = target_probs(step.target[row], group.by_span)
    proposed = draft_probs[group.spans, accepted.clamp(max=draft_probs.shape[1] - 1)].to(torch.float64)
    residual = (probs - proposed).clamp(min=0.0)
    # No mass left means target and draft agree to the last bit; then the target itself is the residual's limit.
    use_residual = (accepted < step.lengths[group.spans]) & (residual.sum(dim=1) > 0.0)
    number = uniforms(step.rows.seeds[row], step.positions()[row], Purpose.SAMPLE)
    return draw(torch.where(use_residual[:, None], residual, probs), number)


def _tree_verdict(step: _Step, chosen: torch.Tensor) -> Verdict:
    """Target-only tree sampling: from the root, go to the child that equals the node's own choice while there is one."""
    tokens, parents = step.paths.tokens, step.paths.parents
    assert parents is not None
    choices = chosen[step.grid]
    at = torch.full_like(step.lengths, -1)
    path = torch.full_like(tokens, -1)
    for depth in range(tokens.shape[1]):
        wanted = choices.gather(1, at[:, None] + 1)
        child = step.valid & (parents == at[:, None]) & (tokens == wanted)
        node = torch.where(child.any(dim=1), child.to(torch.int8).argmax(dim=1), -1)
        path[:, depth] = node
        at = torch.where(node >= 0, node, at)
    accepted = (path >= 0).sum(dim=1)
    decided_by = torch.cat([step.grid[:, :1], step.grid.gather(1, path.clamp(min=0) + 1)], dim=1)
    final = chosen[_at(decided_by, accepted)]
    verdict = _verdict(step, tokens.gather(1, path.clamp(min=0)), accepted, final, decided_by)
    return replace(verdict, path=path.to(torch.int32))


def _verdict(
    step: _Step, kept: torch.Tensor, accepted: torch.Tensor, final: torch.Tensor, decided_by: torch.Tensor
) -> Verdict:
    """Put the answer together; `kept` int64 [B, W] holds the accepted tokens first."""
    order = torch.arange(kept.shape[1] + 1, device=kept.device)
    tokens = torch.nn.functional.pad(kept, (0, 1))
    tokens = torch.where(order < accepted[:, None], tokens, torch.where(order == accepted[:, None], final[:, None], 0))
    tokens = torch.nn.functional.pad(tokens, (0, 1))
    num_non_draft = torch.ones_like(accepted)
    if step.paths.roots is not None:
        root = step.paths.roots[:, None]
        tokens = torch.where(root >= 0, torch.cat([root, tokens[:, :-1]], dim=1), tokens)
        num_non_draft = num_non_draft + (root[:, 0] >= 0)
    decided = decided_by[:, : kept.shape[1] + 1]
    unvisited = order > accepted[:, None]
    # One pass instead of isfinite's three; a finite row's sum stays finite below 1e33 per logit.
    finite = (step.raw.sum(dim=1).isfinite()[decided] | unvisited).all(dim=1)
    if step.lacks_root is not None:
        finite &= ~step.lacks_root
    possible = step.target.amax(dim=1) > -float("inf")
    return Verdict(
        tokens=tokens.to(torch.int32),
        accepted=accepted.to(torch.int32),
        num_non_draft=num_non_draft.to(torch.int32),
        path=None,
        rows=decided,
        finite=finite,
        has_choice=(possible[decided] | unvisited).all(dim=1),
    )


def _at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[b, index[b]] for every b."""
    return table.gather(1, index[:, None]).squeeze(1)
