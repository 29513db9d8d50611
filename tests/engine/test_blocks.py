"""Reference counts, reservation and eviction of KV blocks."""

import random

import pytest

from engine.kv.blocks import BlockAllocator, IntegrityError


def allocator(num_blocks: int = 4, forgotten: list[int] | None = None) -> BlockAllocator:
    return BlockAllocator(num_blocks, 4, (forgotten if forgotten is not None else []).append)


def test_reserve_covers_tokens_and_changes_nothing_when_it_cannot() -> None:
    blocks = allocator()
    held = blocks.reserve((), 9)
    assert held is not None and len(held) == 3 and blocks.num_held == 3
    assert blocks.reserve(held, 12) == held
    assert blocks.reserve(held, 17) is None and blocks.num_available == 1
    assert blocks.reserve((), 5) is None and blocks.num_available == 1


def test_commit_returns_the_surplus_only() -> None:
    blocks = allocator()
    held = blocks.reserve((), 16)
    assert held is not None
    kept = blocks.commit(held, 5)
    assert kept == held[:2] and blocks.num_available == 2
    assert blocks.commit(kept, 8) == kept


def test_shared_blocks_live_until_their_last_holder() -> None:
    blocks = allocator()
    held = blocks.reserve((), 8)
    assert held is not None
    blocks.share(held)
    blocks.release(held)
    assert blocks.num_held == 2
    blocks.release(held)
    assert blocks.num_held == 0


def test_cached_blocks_are_evicted_tail_first_and_only_when_needed() -> None:
    forgotten: list[int] = []
    blocks = allocator(3, forgotten)
    held = blocks.reserve((), 8)
    assert held is not None
    for block_id in held:
        blocks.keep(block_id)
    blocks.release(held)
    assert blocks.num_available == 3 and blocks.num_held == 0
    blocks.reserve((), 4)
    assert forgotten == []
    blocks.reserve((), 4)
    assert forgotten == [held[1]], "the tail of the prefix goes before its head"
    blocks.share(held[:1])
    assert blocks.num_available == 0 and blocks.reserve((), 1) is None


def test_misuse_raises_at_the_guilty_call() -> None:
    blocks = allocator()
    held = blocks.reserve((), 4)
    assert held is not None
    blocks.release(held)
    with pytest.raises(IntegrityError, match="does not hold"):
        blocks.release(held)
    with pytest.raises(IntegrityError, match="free and cannot be shared"):
        blocks.share(held)
    with pytest.raises(IntegrityError, match="nobody holds"):
        blocks.keep(held[0])
    with pytest.raises(ValueError, match="at least one block"):
        BlockAllocator(0, 4, print)


def test_integrity_check_sees_a_lost_block() -> None:
    blocks = allocator()
    held = blocks.reserve((), 4)
    assert held is not None
    blocks.check_integrity([held], [])
    with pytest.raises(IntegrityError, match="1 references and 0 holders"):
        blocks.check_integrity([], [])
    blocks.keep(held[0])
    with pytest.raises(IntegrityError, match="differ from the index"):
        blocks.check_integrity([held], [])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_the_books_straight(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    cached: set[int] = set()
    blocks = BlockAllocator(12, 4, cached.discard)
    holders: list[tuple[int, ...]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.3 or not holders:
            held = blocks.reserve((), rng.randint(1, 20))
            if held is not None:
                holders.append(held)
        else:
            position = rng.randrange(len(holders))
            held = holders[position]
            if action < 0.45:
                holders[position] = blocks.reserve(held, rng.randint(1, 30)) or held
            elif action < 0.6:
                holders[position] = blocks.commit(held, rng.randint(1, 4 * len(held) + 4))
            elif action < 0.7:
                blocks.share(held)
                holders.append(held)
            elif action < 0.8:
                blocks.keep(held[0])
                cached.add(held[0])
            elif action < 0.85 and cached:
                found = (rng.choice(sorted(cached)),)
                blocks.share(found)
                holders.append(found)
            else:
                blocks.release(holders.pop(position))
        holders = [held for held in holders if held]
        blocks.check_integrity(holders, cached)
