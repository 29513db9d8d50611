"""Stop rules and token history of one child."""

import random

import pytest

from engine.sequence import STOPPED, ChildKey, Sequence, StopRules
from protocol.messages import Finish
from protocol.reasons import FinishReason
from tests.fakes import submit

EOS, STOP_ID = 2, 36588


def sequence(max_tokens: int = 10, min_tokens: int = 0, eos: frozenset[int] = frozenset({EOS})) -> Sequence:
    rules = StopRules(eos, frozenset({STOP_ID}), min_tokens, max_tokens)
    return Sequence(ChildKey("f", 1, 0), submit(1, (5, 6, 7)), rules, seed=3, arrival=0)


@pytest.mark.parametrize("position", range(6))
def test_eos_inside_an_accepted_run_ends_there(position: int) -> None:
    run = [582] * 6
    run[position] = EOS
    child = sequence()
    kept, finish = child.append(tuple(run))
    assert kept == (582,) * position + (EOS,)
    assert finish == STOPPED and finish.stop_token_id is None
    assert child.token_ids == [5, 6, 7, *kept] and child.num_generated == position + 1


def test_stop_token_wins_over_max_tokens_on_the_same_token() -> None:
    kept, finish = sequence(max_tokens=2).append((582, STOP_ID, 827))
    assert kept == (582, STOP_ID)
    assert finish == Finish(FinishReason.STOP, stop_token_id=STOP_ID)


def test_max_tokens_cuts_the_run() -> None:
    kept, finish = sequence(max_tokens=2).append((1, 3, 4, EOS))
    assert kept == (1, 3) and finish == Finish(FinishReason.LENGTH)


def test_stops_do_not_count_before_min_tokens() -> None:
    child = sequence(min_tokens=3)
    assert child.append((EOS, STOP_ID)) == ((EOS, STOP_ID), None)
    assert child.append((EOS, EOS)) == ((EOS, EOS), STOPPED)
    assert child.num_generated == 4


def test_ignored_eos_is_a_token_like_any_other() -> None:
    assert sequence(eos=frozenset()).append((EOS, 582)) == ((EOS, 582), None)


def test_no_tokens_change_nothing() -> None:
    child = sequence()
    assert child.append(()) == ((), None) and child.num_generated == 0


def test_child_seeds_follow_the_index_and_wrap() -> None:
    rules = StopRules(frozenset(), frozenset(), 0, 4)
    seeds = [Sequence(ChildKey("f", 1, child), submit(1), rules, 2**63 - 1, 0).seed for child in range(3)]
    assert seeds == [2**63 - 1, 0, 1]
    assert Sequence(ChildKey("f", 1, 0), submit(1), rules, -1, 0).seed == 2**63 - 1


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_any_length_end_like_single_tokens(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    tokens = [rng.choice([EOS, STOP_ID, 582, 827, 1296, 1876]) for _ in range(20)]
    max_tokens, min_tokens = rng.randint(1, 15), rng.randint(0, 5)
    one_by_one, in_runs = sequence(max_tokens, min_tokens), sequence(max_tokens, min_tokens)
    expected = next((f for t in tokens if (f := one_by_one.append((t,))[1]) is not None), None)
    finish, start = None, 0
    while finish is None and start < len(tokens):
        end = start + rng.randint(1, 6)
        _, finish = in_runs.append(tuple(tokens[start:end]))
        start = end
    assert finish == expected and in_runs.token_ids == one_by_one.token_ids
