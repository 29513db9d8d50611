"""Where a prompt goes: to whoever has its beginning, unless that engine is clearly more loaded; in turns among equals."""

import random

import pytest

from frontend.routing import BLOCK_TOKENS, HOME_WORTH, PREFIX_WORTH, Candidate, PrefixTable, Router, block_hashes

SEQUENCES = 64


def prompt(seed: int, blocks: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(49152) for _ in range(blocks * BLOCK_TOKENS))


def engines(**loads: int) -> list[Candidate]:
    return [Candidate(name, sequences, SEQUENCES) for name, sequences in loads.items()]


def best(router: Router, token_ids: tuple[int, ...], **loads: int) -> str:
    return router.route(token_ids, engines(**loads)).engine_ids[0]


def send(router: Router, token_ids: tuple[int, ...], engine_id: str) -> None:
    router.sent(router.route(token_ids, engines(a=0, b=0)), engine_id)


def test_without_a_known_prefix_the_least_loaded_engine_is_best_relative_to_its_size():
    router = Router()
    assert best(router, (1, 2, 3), a=5, b=4) == "b"
    candidates = [Candidate("small", 2, 4), Candidate("large", 20, 64)]
    assert router.route((1, 2, 3), candidates).engine_ids == ("large", "small")


def test_equal_engines_take_turns():
    router = Router()
    chosen = []
    for _ in range(6):
        route = router.route((1, 2, 3), engines(a=0, b=0, c=0))
        router.sent(route, route.engine_ids[0])
        chosen.append(route.engine_ids[0])
    assert chosen == ["a", "b", "c"] * 2


def test_the_longest_known_prefix_wins():
    router, shared = Router(), prompt(1, 4)
    send(router, shared[: 2 * BLOCK_TOKENS], "a")
    send(router, shared, "b")
    assert best(router, shared + prompt(2, 1), a=3, b=4) == "b"


def test_a_clearly_more_loaded_engine_loses_its_prefix():
    router, known = Router(), prompt(1, 4)
    send(router, known, "a")
    worth = int(PREFIX_WORTH * SEQUENCES)
    assert best(router, known, a=worth - 1, b=0) == "a"
    assert best(router, known, a=worth + 1, b=0) == "b"


def test_a_prefix_is_worth_as_much_as_it_saves():
    router, head = Router(), prompt(1, 1)
    send(router, head, "a")
    assert best(router, head + prompt(2, 15), a=2, b=0) == "b", "a sixteenth of the prompt is not worth two sequences"
    assert best(router, head, a=2, b=0) == "a"


def test_both_engines_that_know_a_prefix_share_it_by_load():
    router, known = Router(), prompt(1, 4)
    send(router, known, "a")
    send(router, known, "b")
    assert best(router, known, a=1, b=0) == "b" and best(router, known, a=0, b=1) == "a"


def test_frontends_that_do_not_talk_send_an_unknown_prefix_to_the_same_engine():
    homes = [best(Router(), prompt(seed, 2), a=0, b=0, c=0) for seed in range(60)]
    assert homes == [best(Router(), prompt(seed, 2), c=0, a=0, b=0) for seed in range(60)]
    assert set(homes) == {"a", "b", "c"}, "and different prefixes to different ones"
    moved = [best(Router(), prompt(seed, 2), a=0, b=0) for seed in range(60)]
    assert all(now == before for now, before in zip(moved, homes, strict=True) if before != "c")


def test_a_home_is_worth_little():
    router, unknown = Router(), prompt(3, 2)
    home = best(router, unknown, a=0, b=0)
    other = "b" if home == "a" else "a"
    limit = int(HOME_WORTH * SEQUENCES)
    assert best(router, unknown, **{home: limit - 1, other: 0}) == home
    assert best(router, unknown, **{home: limit + 1, other: 0}) == other


def test_a_restarted_engine_has_no_prefix_any_more():
    router, known = Router(), prompt(1, 4)
    send(router, known, "a")
    send(router, known, "b")
    router.forget("a")
    assert best(router, known, a=0, b=3) == "b"


@pytest.mark.parametrize("changed", [0, BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1])
def test_a_block_is_known_only_behind_the_same_beginning(changed: int):
    token_ids = list(prompt(1, 3))
    before = block_hashes(token_ids)
    token_ids[changed] += 1
    after = block_hashes(token_ids)
    first = changed // BLOCK_TOKENS
    assert after[:first] == before[:first]
    assert all(one != other for one, other in zip(after[first:], before[first:], strict=True))


def test_only_full_blocks_count():
    assert block_hashes(prompt(1, 1)[:-1]) == []
    assert block_hashes(prompt(1, 2)[:-1]) == block_hashes(prompt(1, 2))[:1]


def test_the_table_is_bounded_and_forgets_ends_before_beginnings():
    table = PrefixTable(max_blocks=6)
    old, new = block_hashes(prompt(1, 4)), block_hashes(prompt(2, 4))
    table.remember(old, "a")
    table.remember(new, "b")
    assert len(table) == 6
    assert table.known(old) == {"a": 2} and table.known(new) == {"b": 4}


def test_the_table_knows_what_a_plain_model_knows():
    rng = random.Random(11)
    table, model = PrefixTable(), dict[str, set[int]]()
    chains = [block_hashes(prompt(seed % 5, 1) + prompt(seed, rng.randrange(1, 6))) for seed in range(40)]
    for _ in range(600):
        chain, engine = rng.choice(chains), rng.choice("abcd")
        if rng.random() < 0.03:
            table.forget(engine)
            model.pop(engine, None)
        else:
            table.remember(chain, engine)
            model.setdefault(engine, set()).update(chain)
        asked = rng.choice(chains)
        expected = {}
        for name, blocks in model.items():
            count = next((number for number, block in enumerate(asked) if block not in blocks), len(asked))
            if count:
                expected[name] = count
        assert table.known(asked) == expected
