"""How long a request may wait for its first row, and that deadlines and waits end exactly whom they should."""

import pytest

from engine.config import EngineConfig
from protocol.messages import Finish
from protocol.options import OptionsError, parse
from protocol.reasons import FinishReason, RejectReason
from tests.fakes import Engine, plain_tokens

SECOND = 10**9


def only_finish(engine: Engine, request_id: int, child: int = 0) -> Finish:
    (finish,) = engine.finishes(request_id, child)
    assert isinstance(finish, Finish)
    return finish


def test_who_waited_too_long_is_refused_with_the_time_and_who_runs_goes_on() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout_ns=SECOND)
    engine.submit(1, max_tokens=100)
    engine.submit(2)
    engine.step(2)
    engine.clock.advance(0.5)
    engine.submit(3)
    engine.step()
    assert not engine.finishes(2)
    engine.clock.advance(0.6)
    engine.step()
    finish = only_finish(engine, 2)
    assert (finish.reason, finish.rejected) == (FinishReason.ERROR, RejectReason.QUEUE_TIMEOUT)
    assert finish.message is not None and "waited 1 s" in finish.message
    assert not engine.finishes(3), "it has waited 0.6 s"
    assert finish.rejected.is_overload
    assert not engine.finishes(1)
    engine.clock.advance(0.5)
    engine.step()
    assert only_finish(engine, 3).rejected is RejectReason.QUEUE_TIMEOUT
    engine.run_dry()
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 100)
    load = engine.publisher.snapshots[-1].load
    assert (load.waiting, load.waiting_tokens, load.blocks_used) == (0, 0, 0)


def test_without_the_option_nobody_is_tired_of_waiting() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(1, max_tokens=30)
    engine.submit(2)
    engine.step()
    engine.clock.advance(10**6)
    engine.run_dry()
    assert engine.tokens(2) == plain_tokens((10, 11, 12), 2, 8)
    assert engine.scheduler.next_deadline_ns is None


def test_a_preempted_request_may_wait_as_long_as_it_takes() -> None:
    engine = Engine(num_blocks=12, block_size=4, prefix_caching=False, queue_timeout_ns=SECOND)
    for request_id in range(4):
        engine.submit(request_id, range(10, 15), max_tokens=28)
    while engine.counters.num_preemptions == 0:
        engine.step()
    engine.clock.advance(5)
    engine.run_dry()
    for request_id in range(4):
        assert engine.tokens(request_id) == plain_tokens(range(10, 15), request_id, 28)


def test_children_of_a_request_that_runs_are_not_refused_for_waiting() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout_ns=SECOND)
    engine.submit(5, n=3, max_tokens=6)
    engine.step()
    assert engine.publisher.snapshots[-1].load.waiting == 2
    engine.clock.advance(3)
    engine.run_dry()
    for child in range(3):
        assert engine.tokens(5, child) == plain_tokens((10, 11, 12), 5 + child, 6)


@pytest.mark.parametrize("deadline", [True, False], ids=["deadline", "queue time-out"])
def test_all_children_of_a_request_that_never_ran_are_refused_alike(deadline: bool) -> None:
    engine = Engine(max_num_seqs=1, queue_timeout_ns=None if deadline else SECOND)
    engine.submit(1, max_tokens=100)
    engine.submit(5, n=3, remaining_ns=SECOND if deadline else None)
    engine.step()
    engine.clock.advance(2)
    engine.step()
    reason = RejectReason.EXPIRED if deadline else RejectReason.QUEUE_TIMEOUT
    assert [only_finish(engine, 5, child).rejected for child in range(3)] == [reason] * 3
    assert engine.ledger.num_open == 1


def test_a_deadline_that_passes_together_with_the_wait_is_the_reason() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout_ns=SECOND)
    engine.submit(1, max_tokens=100)
    engine.submit(2, remaining_ns=SECOND)
    engine.step()
    engine.clock.advance(2)
    engine.step()
    assert only_finish(engine, 2).rejected is RejectReason.EXPIRED


def test_an_engine_whose_rows_stand_still_wakes_up_to_refuse() -> None:
    engine = Engine(frontends=("f", "g"), max_num_seqs=1, queue_timeout_ns=SECOND)
    engine.inbox.paused_frontends = frozenset({"g"})
    engine.submit(1, frontend_id="g")
    engine.step()
    slept_until_ns = engine.scheduler.next_deadline_ns
    assert slept_until_ns is not None and 0 < slept_until_ns - engine.clock.now <= SECOND
    engine.clock.advance(1.1)
    engine.step()
    (finish,) = engine.finishes(1, frontend_id="g")
    assert isinstance(finish, Finish) and finish.rejected is RejectReason.QUEUE_TIMEOUT
    assert engine.scheduler.next_deadline_ns is None


def test_the_engine_sleeps_until_whatever_comes_first_and_not_for_who_runs() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout_ns=5 * SECOND)
    engine.submit(1, max_tokens=100)
    engine.step()
    assert engine.scheduler.next_deadline_ns is None, "it runs, and nobody waits"
    engine.submit(2, remaining_ns=SECOND)
    engine.step()
    first_ns = engine.scheduler.next_deadline_ns
    assert first_ns is not None and first_ns - engine.clock.now < SECOND
    engine.close(2)
    engine.submit(3, remaining_ns=60 * SECOND)
    engine.step()
    first_ns = engine.scheduler.next_deadline_ns
    assert first_ns is not None and first_ns - engine.clock.now < 5 * SECOND


def test_a_deadline_counts_from_the_arrival_whatever_the_engines_clock_shows() -> None:
    """The frontend's clock is another machine's: only what is left of the time is on the wire."""
    for offset_s in (0, 10**9):
        engine = Engine()
        engine.clock.advance(offset_s)
        engine.submit(1, max_tokens=150, remaining_ns=SECOND)
        engine.step(2)
        engine.clock.advance(0.9)
        engine.step()
        assert not engine.finishes(1)
        engine.clock.advance(0.2)
        engine.step()
        assert only_finish(engine, 1).reason is FinishReason.ABORT


def test_deadlines_of_requests_that_ended_cost_nothing_and_end_nobody() -> None:
    engine = Engine(max_num_seqs=4)
    for request_id in range(50):
        engine.submit(request_id, max_tokens=2, remaining_ns=3600 * SECOND)
        engine.run_dry()
    assert engine.scheduler.next_deadline_ns is None
    engine.submit(100, max_tokens=4, remaining_ns=2 * 3600 * SECOND)
    engine.step()
    engine.clock.advance(3601)
    engine.run_dry()
    assert engine.tokens(100) == plain_tokens((10, 11, 12), 100, 4)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "86401", "soon"])
def test_a_queue_timeout_that_means_nothing_is_refused_by_name(value: str) -> None:
    with pytest.raises(OptionsError, match="--queue-timeout-s"):
        parse(EngineConfig, ("--queue-timeout-s", value), {}, program="engine")


def test_the_queue_timeout_is_off_unless_asked_for() -> None:
    assert parse(EngineConfig, (), {}, program="engine").queue_timeout_s is None
    assert parse(EngineConfig, ("--queue-timeout-s", "2.5"), {}, program="engine").queue_timeout_s == 2.5
