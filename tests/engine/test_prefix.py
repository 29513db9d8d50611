"""Finding cached blocks by their exact prefix, alone and as sequences use it."""

import pytest

from engine.kv.cache import KVCache
from engine.kv.prefix import ROOT, PrefixIndex
from engine.sequence import ChildKey, Sequence, StopRules
from tests.fakes import Engine, plain_tokens, submit


def sequence(tokens: list[int], request_id: int = 1, **sampling: object) -> Sequence:
    rules = StopRules(frozenset(), frozenset(), 0, 50)
    return Sequence(ChildKey("f", request_id, 0), submit(request_id, tokens, **sampling), rules, 0, 0)


def compute(cache: KVCache, child: Sequence, num_tokens: int) -> None:
    child.num_computed = num_tokens
    cache.commit(child)


def test_match_is_exact_in_tokens_and_in_prefix() -> None:
    index = PrefixIndex(2)
    first, _ = index.insert(ROOT, [1, 2], 7)
    index.insert(first, [3, 4], 8)
    assert index.match([1, 2, 3, 4, 5], 2)[0] == (7, 8)
    assert index.match([1, 2, 3, 4, 5], 1)[0] == (7,)
    assert index.match([3, 4, 1, 2], 2) == ((), ROOT)
    assert index.match([1, 2, 3, 5], 2)[0] == (7,)


def test_tokens_whose_hashes_collide_are_told_apart() -> None:
    assert hash((-1,)) == hash((-2,)), "a collision of Python's own hash"
    index = PrefixIndex(1)
    index.insert(ROOT, [-1], 3)
    assert index.match([-2], 1) == ((), ROOT)


def test_children_of_an_evicted_block_are_not_found_under_its_successor() -> None:
    index = PrefixIndex(2)
    parent, _ = index.insert(ROOT, [1, 2], 0)
    index.insert(parent, [3, 4], 1)
    index.forget(0)
    index.insert(ROOT, [1, 2], 5)
    assert index.match([1, 2, 3, 4], 2)[0] == (5,)
    assert index.cached_blocks() == {1, 5}


def test_first_of_two_equal_blocks_stays() -> None:
    index = PrefixIndex(2)
    node, _ = index.insert(ROOT, [1, 2], 0)
    assert index.insert(ROOT, [1, 2], 1) == (node, False)
    with pytest.raises(ValueError, match="only full blocks"):
        index.insert(ROOT, [1], 2)


def test_a_block_below_an_evicted_prefix_is_found_again_where_it_is_inserted_again() -> None:
    index = PrefixIndex(2)
    evicted, _ = index.insert(ROOT, [1, 2], 0)
    index.insert(evicted, [3, 4], 1)
    index.forget(0)
    parent, _ = index.insert(ROOT, [1, 2], 5)
    assert index.insert(parent, [3, 4], 1)[1]
    assert index.match([1, 2, 3, 4], 2)[0] == (5, 1)
    index.forget(1)
    assert index.cached_blocks() == {5}
    index.insert(parent, [3, 4], 6)
    with pytest.raises(ValueError, match="other tokens"):
        index.insert(parent, [9, 9], 6)


def test_a_fork_whose_parent_followed_an_evicted_prefix_is_served() -> None:
    """The parent's first block is found under another sequence's, which ends and is evicted before the fork."""
    cache = KVCache(7, 2, prefix_caching=True)
    first, parent, child = sequence([1, 2, 3], 1), sequence([1, 2, 3, 4, 5], 2), sequence([1, 2, 3, 4, 5], 4)
    cache.admit(first, 0)
    cache.admit(parent, 0)
    compute(cache, first, 2)
    compute(cache, parent, 5)
    cache.free(first)
    crowd = sequence([*range(20, 27)], 3)
    assert cache.admit(crowd, 0) == 0 and cache.num_available == 0, "the first one's block is evicted"
    cache.fork(parent, child)
    cache.free(crowd)
    assert cache.admit(child, 0) == 0
    compute(cache, child, 5)
    cache.check_integrity([parent, child])
    assert cache.admit(sequence([1, 2, 3, 4, 5, 6], 5), 0) == 4, "and the prefix can be found again"


def test_at_least_one_prompt_token_is_computed() -> None:
    cache = KVCache(8, 4, prefix_caching=True)
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.admit(first, 0) == 0
    compute(cache, first, 8)
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert cache.admit(again, 0) == 4 and again.num_computed == 4
    longer = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    assert cache.admit(longer, 0) == 8
    cache.check_integrity([first, again, longer])


def test_only_computed_full_blocks_are_found() -> None:
    cache = KVCache(8, 4, prefix_caching=True)
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.admit(first, 0)
    compute(cache, first, 7)
    assert cache.admit(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 2), 0) == 4


def test_a_drafter_that_looks_ahead_shares_only_blocks_whose_following_tokens_are_equal() -> None:
    cache = KVCache(16, 4, prefix_caching=True, lookahead=1)
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.admit(first, 0) == 0
    compute(cache, first, 9)
    assert cache.admit(sequence([1, 2, 3, 4, 5, 6, 7, 8, 20], 2), 0) == 4, "the second block's keys depend on the 9"
    assert cache.admit(sequence([1, 2, 3, 4, 5, 30], 3), 0) == 4
    other = sequence([1, 2, 3, 4, 6, 7, 8, 9, 10], 6)
    assert cache.admit(other, 0) == 0, "the first block's last keys depend on the 5"
    compute(cache, other, 9)
    assert cache.admit(sequence([1, 2, 3, 4, 6, 7, 8, 9, 10, 11], 7), 0) == 8, "both blocks are its own"
    fork = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 5)
    cache.fork(first, fork)
    assert fork.num_computed == 8, "a fork knows its own next token"
    wide = KVCache(12, 4, prefix_caching=True, lookahead=3)
    parent, child = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]), sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    assert wide.admit(parent, 0) == 0
    compute(wide, parent, 9)
    wide.fork(parent, child)
    assert child.num_computed == 4


def test_a_block_is_found_once_the_drafter_has_heard_as_far_as_it_looks_ahead() -> None:
    """In the middle of a prompt the tokens behind a block are known, but the drafter's keys for its end are not there."""
    cache = KVCache(16, 4, prefix_caching=True, lookahead=3)
    first = sequence(list(range(1, 14)))
    cache.admit(first, 0)
    for num_computed, found in ((4, 0), (5, 0), (6, 4), (8, 4), (9, 4), (10, 8)):
        compute(cache, first, num_computed)
        second = sequence(list(range(1, 14)), 2)
        assert cache.admit(second, 0) == found, num_computed
        cache.free(second)


def test_cache_is_not_read_when_prompt_logprobs_are_asked_or_caching_is_off() -> None:
    cache = KVCache(8, 4, prefix_caching=True)
    first = sequence([1, 2, 3, 4, 5])
    cache.admit(first, 0)
    compute(cache, first, 5)
    assert cache.admit(sequence([1, 2, 3, 4, 5], 2, prompt_logprobs=1), 0) == 0
    off = KVCache(8, 4, prefix_caching=False)
    off.admit(first := sequence([1, 2, 3, 4, 5]), 0)
    compute(off, first, 5)
    assert off.admit(sequence([1, 2, 3, 4, 5], 2), 0) == 0


def test_admission_that_fails_changes_nothing() -> None:
    cache = KVCache(4, 4, prefix_caching=True)
    first = sequence([1, 2, 3, 4, 5])
    cache.admit(first, 0)
    compute(cache, first, 5)
    late = sequence([1, 2, 3, 4, *range(10, 24)], 2)
    assert cache.admit(late, 0) is None
    assert late.block_ids == () and late.num_computed == 0
    assert cache.admit(sequence([20], 3), 2) is None, "two blocks must stay spare"
    cache.check_integrity([first, late])


def test_queries_and_hits_count_once_per_request_also_over_retries_and_preemption() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=4)
    engine.submit(1, range(10, 19), max_tokens=20)
    engine.submit(2, range(10, 19), max_tokens=20)
    engine.submit(3, range(10, 19), max_tokens=20)
    engine.run_dry()
    counters = engine.counters
    assert counters.num_preemptions > 0
    assert counters.prefix_cache_queries == 27 == counters.prompt_tokens
    assert counters.prefix_cache_hits == counters.prompt_tokens_cached <= 27


def test_rejected_tokens_never_enter_the_prefix_index() -> None:
    """FakeExecutor leaves wrong tokens in the slots of rejected drafts and checks every slot it reads."""
    engine = Engine(max_num_seqs=2)
    engine.fake.acceptance = 0.2
    engine.submit(1, range(10, 19), max_tokens=40)
    engine.run_dry()
    answer = engine.tokens(1)
    longer = [*range(10, 19), *answer, 44]
    engine.submit(2, longer, max_tokens=5)
    engine.run_dry()
    assert engine.counters.prefix_cache_hits >= 44
    assert engine.tokens(2) == plain_tokens(longer, 2, 5)
