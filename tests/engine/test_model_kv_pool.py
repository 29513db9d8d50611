"""The KV pool keeps what is written, clears what it is told to, and moves accepted tree nodes into line."""

import pytest
import torch

from engine.kv.pool import KVPool, KVShape

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.float32)


def filled_pool() -> KVPool:
    """Every slot of layer l holds l * 1000 + slot (values: negated)."""
    pool = KVPool(SHAPE, 6, torch.device("cpu"))
    slots = torch.arange(24)
    for layer in range(3):
        content = (layer * 1000 + slots).float()[:, None, None].expand(24, 2, 4)
        pool.write(layer, slots, content, -content)
    return pool


def content(pool: KVPool, blocks: tuple[int, ...], position: int) -> list[tuple[float, float]]:
    block, offset = blocks[position // 4], position % 4
    keys, values = pool.keys[:, block, offset], pool.values[:, block, offset]
    assert (keys == keys[:, :1, :1]).all() and (values == values[:, :1, :1]).all()
    return list(zip(keys[:, 0, 0].tolist(), values[:, 0, 0].tolist(), strict=True))


def test_bytes_per_token_are_those_allocated():
    pool = KVPool(SHAPE, 6, torch.device("cpu"))
    allocated = sum(part.numel() * part.element_size() for part in (pool.keys, pool.values))
    assert allocated == SHAPE.bytes_per_token * 6 * 4


def test_write_puts_each_token_into_its_slot_of_one_layer():
    pool = KVPool(SHAPE, 6, torch.device("cpu"))
    keys = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    pool.write(1, torch.tensor([5, 23, 0]), keys, 2 * keys)
    assert torch.equal(pool.keys[1, 1, 1], keys[0])
    assert torch.equal(pool.values[1, 5, 3], 2 * keys[1])
    assert pool.keys[0].count_nonzero() == 0 and pool.keys[2].count_nonzero() == 0


@pytest.mark.parametrize("path", [(0, 1, 2), (2, 4, 7), (1,), (0, 3, 5, 6), ()])
def test_compact_moves_accepted_nodes_behind_the_root_in_every_layer(path: tuple[int, ...]):
    pool, blocks, root = filled_pool(), (5, 0, 2), 2  # nodes cross from block 5 through 0 into 2
    before = {position: content(pool, blocks, position) for position in range(12)}
    pool.compact(blocks, root, path)
    for index, node in enumerate(path):
        assert content(pool, blocks, root + 1 + index) == before[root + 1 + node]
    for position in range(root + 1):
        assert content(pool, blocks, position) == before[position]
    assert torch.equal(pool.keys[:, (1, 3, 4)], filled_pool().keys[:, (1, 3, 4)])


def test_clear_zeroes_slots_in_every_layer_even_when_they_hold_nan():
    pool = filled_pool()
    pool.keys[:, 1] = torch.nan
    pool.values[:, 1] = torch.inf
    pool.clear(torch.tensor([5, 6, 7]))
    assert pool.keys[:, 1, 1:].count_nonzero() == 0 and pool.values[:, 1, 1:].count_nonzero() == 0
    assert pool.keys[:, 1, 0].isnan().all()


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        KVPool(SHAPE, 0, torch.device("cpu"))


def test_a_pool_larger_than_the_memory_is_refused_with_the_option_that_asked_for_it():
    with pytest.raises(ValueError, match=r"KV cache of 4398046511104 tokens takes 786432\.0 GiB.*--kv-cache-tokens"):
        KVPool(SHAPE, 2**40, torch.device("cpu"))
