"""Who holds which KV block: reference counts, free blocks, and cached blocks nobody holds at present.

Owns block ids only; the tensors behind them belong to the pool, the meaning of cached contents to engine.kv.prefix.
Called by the scheduler. A block is free, held (references >= 1), or reusable (cached, no reference, evicted when needed).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class IntegrityError(Exception):
    """The books of the block allocator contradict each other: a bug in the engine."""


class BlockAllocator:
    """Blocks 0 .. num_blocks - 1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, forget: Callable[[int], None]) -> None:
        """`forget(block_id)` is called when a cached block is about to hold something else."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache needs at least one block of one token, got {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._forget = forget
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, hot ones again soon
        self._references = [0] * num_blocks
        self._cached: set[int] = set()
        self._reusable: dict[int, None] = {}  # insertion order = least recently released first

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can still give, cached ones nobody holds included."""
        return len(self._free) + len(self._reusable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, block_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...] | None:
        """`block_ids` extended to cover `num_tokens` tokens, or None (nothing changed) when there are too few blocks."""
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        if missing <= 0:
            return block_ids
        if missing > self.num_available:
            return None
        return block_ids + tuple([self._take() for _ in range(missing)])

    def commit(self, block_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Give back the surplus behind `num_tokens` tokens; returns what is kept."""
        needed = -(-num_tokens // self.block_size)
        if needed >= len(block_ids):
            return block_ids
        self.release(block_ids[needed:])
        return block_ids[:needed]

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; they must be held or cached."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                if block_id not in self._reusable:
                    raise IntegrityError(f"block {block_id} is free and cannot be shared")
                del self._reusable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block. Last first, so that the tail of a cached prefix is evicted before its head."""
        for block_id in reversed(block_ids):
            references = self._references[block_id] - 1
            if references < 0:
                raise IntegrityError(f"block {block_id} is released by someone who does not hold it")
            self._references[block_id] = references
            if references == 0:
                if block_id in self._cached:
                    self._reusable[block_id] = None
                else:
                    self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """The block's contents are now findable: keep them after the last release, until the block is needed."""
        if self._references[block_id] == 0:
            raise IntegrityError(f"block {block_id} is cached while nobody holds it")
        self._cached.add(block_id)

    def check_integrity(self, holders: Iterable[Sequence[int]], cached: Iterable[int]) -> None:
        """Raise `IntegrityError` unless `holders` (one list of block ids per holder) and `cached` explain every block."""
        held = Counter(block_id for block_ids in holders for block_id in block_ids)
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is free twice")
        if self._cached != set(cached):
            raise IntegrityError(f"cached blocks {sorted(self._cached)} differ from the index's {sorted(cached)}")
        for block_id, references in enumerate(self._references):
            if references != held[block_id]:
                raise IntegrityError(f"block {block_id} has {references} references and {held[block_id]} holders")
            states = (references > 0) + (block_id in free) + (block_id in self._reusable)
            if states != 1:
                raise IntegrityError(f"block {block_id} is in {states} of the states held, free and reusable")
        if not self._cached.issuperset(self._reusable):
            raise IntegrityError("a reusable block is not cached")
        if not self._cached.isdisjoint(free):
            raise IntegrityError("a free block is cached")

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = next(iter(self._reusable))
            del self._reusable[block_id]
            self._cached.discard(block_id)
            self._forget(block_id)
        self._references[block_id] = 1
        return block_id
