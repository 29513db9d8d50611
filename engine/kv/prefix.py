"""Which cached block holds which tokens behind which prefix: an exact tree, without hashes that could collide.

Owns the mapping only; block lives belong to engine.kv.blocks. Only full blocks of committed tokens enter, so a rejected
draft can never be found here. Called by the scheduler.
"""

from collections.abc import Sequence

ROOT = 0

_Key = tuple[int, tuple[int, ...]]  # (parent node, the block's tokens and as many behind it as a drafter looks ahead)


class PrefixIndex:
    """A node is one full block behind one exact prefix. Node numbers are never used twice, so that what hung below an
    evicted node cannot be found under its successor.

    `lookahead`: how many tokens behind a position the drafter's keys there depend on; they are part of what a block is.
    """

    def __init__(self, block_size: int, lookahead: int = 0) -> None:
        self._block_size = block_size
        self._num_tokens = block_size + lookahead  # of a key
        self._nodes: dict[_Key, tuple[int, int]] = {}  # -> (node, block id)
        self._key_of_block: dict[int, _Key] = {}
        self._last_node = ROOT

    def match(self, token_ids: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], int]:
        """Block ids of the longest cached prefix of at most `num_blocks` blocks, and its deepest node."""
        size = self._block_size
        block_ids: list[int] = []
        node = ROOT
        for start in range(0, num_blocks * size, size):
            found = self._nodes.get((node, tuple(token_ids[start : start + self._num_tokens])))
            if found is None:
                break
            node, block_id = found
            block_ids.append(block_id)
        return tuple(block_ids), node

    def insert(self, parent: int, token_ids: Sequence[int], block_id: int) -> tuple[int, bool]:
        """The node of one full block behind `parent`, and whether `block_id` is now the block found there.

        `token_ids`: the block's and the `lookahead` tokens behind it.

        False when another block already holds the same tokens behind the same prefix: the first one stays.
        """
        key = (parent, tuple(token_ids))
        if len(key[1]) != self._num_tokens:
            raise ValueError(f"only full blocks are cached: {len(key[1])} tokens where {self._num_tokens} are needed")
        found = self._nodes.get(key)
        if found is not None:
            return found[0], False
        hung = self._key_of_block.get(block_id)
        if hung is not None:
            if hung[1] != key[1]:
                raise ValueError(f"block {block_id} is cached with other tokens")
            # It hung below an evicted block, where nothing finds it; whoever shares it may walk there anew.
            del self._nodes[hung]
        self._last_node += 1
        self._nodes[key] = (self._last_node, block_id)
        self._key_of_block[block_id] = key
        return self._last_node, True

    def forget(self, block_id: int) -> None:
        """The block is evicted: nothing finds it any more."""
        del self._nodes[self._key_of_block.pop(block_id)]

    def cached_blocks(self) -> frozenset[int]:
        return frozenset(self._key_of_block)
