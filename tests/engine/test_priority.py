"""What `priority` decides: who waits in front of whom, and who gives up its blocks. It never takes a row from who runs."""

from engine.sequence import Sequence
from protocol.messages import EventKind
from tests.fakes import Engine, plain_tokens


def victims_of(engine: Engine) -> list[int]:
    """Requests in the order in which they are preempted from now on."""
    victims: list[int] = []
    retracted = engine.ledger.retracted

    def watch(sequence: Sequence) -> None:
        victims.append(sequence.key.request_id)
        retracted(sequence)

    engine.ledger.retracted = watch  # type: ignore[method-assign]
    return victims


def first_tokens(engine: Engine) -> list[int]:
    """Requests in the order in which their prompts were done."""
    return [output.request_id for output in engine.publisher.outputs() if output.prompt is not None]


def test_a_more_urgent_request_overtakes_the_queue_even_when_it_comes_last() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(0, max_tokens=10)
    engine.step()
    for request_id, priority in ((1, 3), (2, 0), (3, -7), (4, 0), (5, -7)):
        engine.submit(request_id, priority=priority, max_tokens=2)
        engine.step()
    engine.run_dry()
    assert first_tokens(engine) == [0, 3, 5, 2, 4, 1]


def test_urgent_requests_never_take_a_row_from_who_runs() -> None:
    engine = Engine(max_num_seqs=2, num_blocks=200)
    for request_id in (1, 2):
        engine.submit(request_id, priority=9, max_tokens=60)
    engine.step()
    for request_id in range(10, 30):
        engine.submit(request_id, priority=-9, max_tokens=4)
        engine.step()
        assert {sequence.key.request_id for sequence in engine.scheduler.rows.values()} <= {1, 2} or engine.finishes(1)
    engine.run_dry()
    assert engine.counters.num_preemptions == 0
    for request_id in (1, 2):
        assert engine.tokens(request_id) == plain_tokens((10, 11, 12), request_id, 60)


def test_an_urgent_request_that_finds_no_blocks_waits_for_them() -> None:
    engine = Engine(num_blocks=10, block_size=4, max_num_seqs=4, prefix_caching=False)
    engine.submit(1, range(10, 34), priority=5, max_tokens=8)
    engine.step()
    engine.submit(2, range(40, 60), priority=-5, max_tokens=2)
    engine.step(2)
    assert engine.publisher.snapshots[-1].load.waiting == 1 and engine.counters.num_preemptions == 0
    engine.run_dry()
    assert engine.counters.num_preemptions == 0
    assert engine.tokens(1) == plain_tokens(range(10, 34), 1, 8)
    assert engine.tokens(2) == plain_tokens(range(40, 60), 2, 2)


def test_the_least_urgent_is_preempted_first_and_comes_back_to_its_place() -> None:
    engine = Engine(num_blocks=12, block_size=4, max_num_seqs=3, prefix_caching=False)
    for request_id, priority in ((1, 7), (2, 0), (3, 3)):
        engine.submit(request_id, range(10, 18), priority=priority, max_tokens=24)
    victims = victims_of(engine)
    engine.step()
    engine.submit(4, priority=7, max_tokens=2)
    engine.run_dry()
    assert victims[0] == 1, "the first to come, but of the lowest priority"
    assert 2 not in victims, "the most urgent never pays for the others"
    assert first_tokens(engine)[-1] == 4, "a preempted request is in front of those that came after it"
    for request_id in (1, 2, 3):
        assert engine.tokens(request_id) == plain_tokens(range(10, 18), request_id, 24)


def test_the_least_urgent_gives_up_its_own_row_rather_than_a_more_urgent_one() -> None:
    """The row that needs a block is itself the last in order: it leaves, whoever holds more."""
    engine = Engine(num_blocks=9, block_size=4, max_num_seqs=2, max_draft_len=0, prefix_caching=False)
    engine.submit(1, range(10, 26), priority=0, max_tokens=16)
    engine.submit(2, range(10, 22), priority=1, max_tokens=20)
    victims = victims_of(engine)
    engine.run_dry()
    assert set(victims) == {2}
    assert engine.tokens(1) == plain_tokens(range(10, 26), 1, 16)
    assert engine.tokens(2) == plain_tokens(range(10, 22), 2, 20)


def test_a_traced_request_says_when_its_priority_cost_it_its_row() -> None:
    engine = Engine(num_blocks=12, block_size=4, max_num_seqs=2, prefix_caching=False)
    engine.submit(1, range(10, 18), priority=1, max_tokens=24, trace_level=1)
    engine.submit(2, range(10, 18), priority=0, max_tokens=30)
    engine.run_dry()
    kinds = [event.kind for output in engine.child_outputs(1) for event in output.events]
    assert kinds.count(EventKind.RETRACTED) == engine.counters.num_preemptions > 0
