"""Suffix decoding: propose what followed when the same tokens were said before, in this sequence or in earlier answers.

Owns one tree per row (prompt and output) and, through `suffix_cache`, the answers of every scope. Hears of committed tokens
only; a sequence that is preempted goes on in its own answer. Built by the registry.
Source: SuffixDecoding (arXiv 2411.04975); its published implementation is what `tests/oracles` compares with.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch

from engine.speculation.draft import Draft, host_draft
from engine.speculation.recipe import SuffixSettings
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator
from engine.speculation.suffix_cache import Answer, AnswerCache
from engine.speculation.suffix_cursor import Cursor
from engine.speculation.suffix_match import MatchRule, Proposal, best_proposal
from engine.speculation.suffix_tree import SuffixTree

LOCAL, GLOBAL = 0, 1  # indices of the sources
_MOST_AT_ONCE = 4096  # prompt tokens indexed per call, some 20 ms: a long prompt found in the cache stalls nobody


class SuffixSpeculator(Speculator):
    """Drafts on the host."""

    def __init__(self, max_draft_len: int, settings: SuffixSettings) -> None:
        is_tree = settings.mode == "tree"
        self.capabilities = Capabilities(
            max_draft_len, ("suffix_local", "suffix_global"), tree=is_tree, drafts_on_host=True
        )
        self._rule = MatchRule(settings.factor, settings.min_probability, is_tree)
        self._max_depth = settings.max_depth
        self._shares = settings.share
        self._cache = AnswerCache(settings.max_depth, settings.max_cached_requests, settings.max_cached_tokens)
        self._rows: dict[int, _Row] = {}

    def begin(self, start: SequenceStart) -> None:
        scope = "" if self._shares else start.scope
        prompt, output = start.token_ids[: start.num_prompt_tokens], start.token_ids[start.num_prompt_tokens :]
        key = _digest(prompt)
        answer = self._cache.resume(scope, key, output) if output else None
        if answer is None:
            answer = self._cache.open(scope, key)
            self._cache.extend(answer, output)
        self._rows[start.row] = _Row(start.token_ids, answer, self._max_depth)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        for span in spans:
            row = self._rows[span.row]
            new = [*span.token_ids, span.next_token_id][max(0, row.num_tokens - span.start) :]
            row.hear(new)
            self._cache.extend(row.answer, new)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        found = [self._proposal(row) for row in rows]
        draft = host_draft([proposal.token_ids for proposal, _ in found], self.capabilities.max_draft_len)
        sources = torch.tensor([source for _, source in found], dtype=torch.int8)
        return replace(draft, sources=sources, parents=self._parents(found) if self.capabilities.tree else None)

    def end(self, row: int) -> None:
        ended = self._rows.pop(row, None)
        if ended is not None:
            self._cache.close(ended.answer)

    def _proposal(self, row: DraftRow) -> tuple[Proposal, int]:
        """The better of what this sequence and what its scope's answers suggest; ties go to the sequence."""
        state = self._rows[row.row]
        state.hear(())
        room = min(row.budget, self.capabilities.max_draft_len)
        local = best_proposal(state.tree, state.cursor.suffixes(row.token_ids), self._rule, room)
        tree = self._cache.tree(state.answer)
        if tree is None:
            return local, LOCAL
        suffixes = state.cursor_in(tree).suffixes(row.token_ids)
        learnt = best_proposal(tree, suffixes, self._rule, room, above=local.score)
        return (learnt, GLOBAL) if learnt.token_ids else (local, LOCAL)

    def _parents(self, found: Sequence[tuple[Proposal, int]]) -> torch.Tensor:
        """Int32 [B, W]; entries at and beyond a row's length are a chain's."""
        width = self.capabilities.max_draft_len
        parents = torch.arange(-1, width - 1, dtype=torch.int32).repeat(len(found), 1)
        for index, (proposal, _) in enumerate(found):
            parents[index, : len(proposal.parents)] = torch.tensor(list(proposal.parents), dtype=torch.int32)
        return parents


class _Row:
    """One sequence: its tree and its answer, and where its end is in its own tree and in its scope's."""

    def __init__(self, token_ids: Sequence[int], answer: Answer, max_depth: int) -> None:
        self.answer = answer
        self.tree = SuffixTree(max_depth)
        self.cursor = Cursor(self.tree)
        self.num_tokens = len(token_ids)  # committed
        self._learnt: Cursor | None = None
        self._text = self.tree.open()
        self._waiting = list(token_ids)  # to be indexed
        self.hear(())

    def hear(self, token_ids: Sequence[int]) -> None:
        """Take in tokens behind those that are known, and index some of what waits."""
        self.num_tokens += len(token_ids)
        if not self._waiting:
            self.tree.extend(self._text, token_ids)
            return
        self._waiting += token_ids
        self.tree.extend(self._text, self._waiting[:_MOST_AT_ONCE])
        del self._waiting[:_MOST_AT_ONCE]

    def cursor_in(self, tree: SuffixTree) -> Cursor:
        """In the scope's tree, which comes and goes with its answers."""
        if self._learnt is None or self._learnt.tree is not tree:
            self._learnt = Cursor(tree)
        return self._learnt


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids), digest_size=16).digest()
