"""The KV cache as sequences use it: blocks to hold, prefixes to find, forks to share.

Joins the block allocator and the prefix index; never decides who runs. Called by the scheduler only. It writes the
`block_ids`, `prefix_*` and (on admission) `num_computed` fields of a sequence.
"""

from collections.abc import Iterable

from engine.kv.blocks import BlockAllocator
from engine.kv.prefix import ROOT, PrefixIndex
from engine.sequence import Sequence


class KVCache:
    """All KV blocks of one engine. Lengths are in tokens.

    `lookahead`: how many tokens behind a position the drafter's keys there depend on. A cached block is shared only when
    that many tokens behind it are equal too.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool, lookahead: int = 0) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._lookahead = lookahead
        self._index = PrefixIndex(block_size, lookahead)
        self._blocks = BlockAllocator(num_blocks, block_size, self._index.forget)

    @property
    def num_available(self) -> int:
        return self._blocks.num_available

    @property
    def num_held(self) -> int:
        return self._blocks.num_held

    def can_read(self, sequence: Sequence) -> bool:
        """Whether cached blocks may stand in for computing: not while the prompt's own log-probabilities are wanted."""
        if not self.prefix_caching:
            return False
        return sequence.is_prompt_done or sequence.sampling.prompt_logprobs is None

    def admit(self, sequence: Sequence, spare: int) -> int | None:
        """Hold blocks for everything the sequence has so far; returns the tokens found in the prefix cache.

        None, and nothing changed, when fewer than `spare` blocks would be left. At least one token stays to compute.
        """
        length = len(sequence.token_ids)
        found: tuple[int, ...] = ()
        node = ROOT
        if not sequence.block_ids and self.can_read(sequence):
            found, node = self._index.match(sequence.token_ids, (length - 1) // self.block_size)
            self._blocks.share(found)
        held = sequence.block_ids or found
        missing = self._blocks.blocks_for(length) - len(held)
        block_ids = None
        if missing + spare <= self._blocks.num_available:
            block_ids = self._blocks.reserve(held, length)
        if block_ids is None:
            self._blocks.release(found)
            return None
        sequence.block_ids = block_ids
        if found:
            sequence.num_computed = len(found) * self.block_size
            sequence.prefix_node, sequence.prefix_num_blocks = node, len(found)
        return len(found) * self.block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens` positions; False, and nothing changed, when there are too few."""
        if num_tokens <= len(sequence.block_ids) * self.block_size:
            return True
        block_ids = self._blocks.reserve(sequence.block_ids, num_tokens)
        if block_ids is None:
            return False
        sequence.block_ids = block_ids
        return True

    def room(self, sequence: Sequence) -> int:
        """Positions the sequence could cover without anybody giving up a block."""
        return (len(sequence.block_ids) + self._blocks.num_available) * self.block_size

    def commit(self, sequence: Sequence) -> None:
        """Make the computed full blocks findable and give back what rejected drafts had reserved."""
        size = self.block_size
        if self.prefix_caching and (sequence.prefix_num_blocks + 1) * size <= sequence.num_computed:
            self._make_findable(sequence)
        if (len(sequence.block_ids) - 1) * size >= len(sequence.token_ids):
            sequence.block_ids = self._blocks.commit(sequence.block_ids, len(sequence.token_ids))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the parent's full blocks of their common prompt, all but the prompt's last token at most."""
        num_blocks = max(0, child.num_prompt - max(1, self._lookahead)) // self.block_size
        child.block_ids = parent.block_ids[:num_blocks]
        child.num_computed = num_blocks * self.block_size
        self._blocks.share(child.block_ids)

    def free(self, sequence: Sequence) -> None:
        """Let go of everything; the sequence would have to be computed again."""
        self._blocks.release(sequence.block_ids)
        sequence.block_ids = ()
        sequence.num_computed = 0
        sequence.prefix_node, sequence.prefix_num_blocks = ROOT, 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `IntegrityError` unless `sequences` (all that live) hold exactly the blocks that are held."""
        self._blocks.check_integrity((s.block_ids for s in sequences), self._index.cached_blocks())

    def _make_findable(self, sequence: Sequence) -> None:
        size = self.block_size
        # A drafter hears one token behind what is computed, however far the prompt goes on: its further keys are to come.
        num_heard = min(sequence.num_computed + 1, len(sequence.token_ids))
        last = min(sequence.num_computed, num_heard - self._lookahead)
        while (end := (sequence.prefix_num_blocks + 1) * size) <= last:
            block_id = sequence.block_ids[sequence.prefix_num_blocks]
            tokens = sequence.token_ids[end - size : end + self._lookahead]
            sequence.prefix_node, is_new = self._index.insert(sequence.prefix_node, tokens, block_id)
            sequence.prefix_num_blocks += 1
            if is_new:
                self._blocks.keep(block_id)
