"""The step as a whole: what is published, what fails, when the engine sleeps and how it ends."""

import random

import pytest

from engine.executor import DeviceFailure
from engine.plan import Span
from protocol.counters import Counters
from protocol.messages import Close, Detach, Finish, StepOutcome
from protocol.reasons import CloseReason, FinishReason, RejectReason
from tests.fakes import Engine, plain_tokens


def finish_of(engine: Engine, request_id: int, child: int = 0, frontend_id: str = "f") -> Finish:
    (finish,) = engine.finishes(request_id, child, frontend_id)
    assert isinstance(finish, Finish)
    return finish


def test_every_step_is_published_to_every_frontend_without_a_gap() -> None:
    engine = Engine(frontends=("f", "g"))
    engine.step()
    engine.submit(1)
    engine.run_dry()
    engine.step()
    steps = engine.publisher.steps
    assert all(set(step) == {"f", "g"} for step in steps)
    assert [step["g"].step_id for step in steps] == list(range(1, len(steps) + 1))
    assert steps[0]["f"].outcome is steps[-1]["f"].outcome is StepOutcome.EMPTY
    assert steps[0]["f"].engine_id == "0" and steps[0]["f"].epoch == 7
    assert all(step["f"].counters is step["g"].counters for step in steps)


def test_a_step_whose_rows_were_all_aborted_in_flight_is_published_with_its_counts() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=50)
    engine.submit(2, max_tokens=50)
    engine.step(2)
    before = engine.publisher.counters()

    def close_both() -> None:
        engine.close(1)
        engine.close(2, index=-1)

    engine.fake.during = close_both
    engine.step()
    engine.fake.during = lambda: None
    counters = engine.publisher.counters()
    assert engine.publisher.steps[-1]["f"].outputs == ()
    assert engine.publisher.steps[-1]["f"].outcome is StepOutcome.OK
    assert counters.aborted_rounds == 2
    rounds = counters.draft_rounds + counters.plain_rounds
    assert rounds == before.draft_rounds + before.plain_rounds + 2
    assert counters.generation_tokens == before.generation_tokens
    engine.step()
    for request_id in (1, 2):
        output = engine.child_outputs(request_id)[-1]
        assert output.round is not None and output.round.aborted and output.token_ids == ()
        assert finish_of(engine, request_id).reason is FinishReason.ABORT
    load = engine.publisher.snapshots[-1].load
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
    assert engine.publisher.counters().aborted_rounds == 2


def test_gauges_are_zero_in_the_step_that_ends_the_last_request() -> None:
    engine = Engine(prefix_caching=False)
    for request_id in range(5):
        engine.submit(request_id)
    engine.run_dry()
    last = next(step["f"] for step in reversed(engine.publisher.steps) if step["f"].outputs)
    assert any(output.finish is not None for output in last.outputs)
    assert (last.load.running, last.load.waiting, last.load.waiting_tokens, last.load.blocks_used) == (0, 0, 0, 0)


@pytest.mark.parametrize("transient", [True, False])
def test_only_the_guilty_row_of_a_failing_batch_fails(transient: bool) -> None:
    engine = Engine()
    for request_id in range(3):
        engine.submit(request_id, range(10, 14 + request_id), max_tokens=12)
    engine.step(2)
    guilty_row = 1
    failures = 0

    def fail(span: Span) -> Exception | None:
        nonlocal failures
        if span.row != guilty_row or (transient and failures):
            return None
        failures += 1
        return ValueError("index out of range")

    engine.fake.fail_if = fail
    engine.step()
    engine.fake.fail_if = lambda span: None
    assert engine.publisher.steps[-1]["f"].outcome is StepOutcome.OK
    engine.run_dry()
    for request_id in (0, 2) if not transient else (0, 1, 2):
        assert engine.tokens(request_id) == plain_tokens(range(10, 14 + request_id), request_id, 12)
    if not transient:
        finish = finish_of(engine, 1)
        assert finish.reason is FinishReason.ERROR and finish.message is not None
        assert "index out of range" in finish.message
        assert engine.counters.steps_failed == 0


def test_a_step_whose_only_row_fails_is_a_failed_step_and_is_published() -> None:
    engine = Engine()
    engine.submit(1)
    engine.step(2)
    before = engine.publisher.counters()
    engine.fake.fail_if = lambda span: ValueError("broken")
    engine.step()
    step = engine.publisher.steps[-1]["f"]
    assert step.outcome is StepOutcome.FAILED and step.load.running == 0
    delta = engine.publisher.counters().minus(before)
    assert (delta.steps_failed, delta.steps_ok, delta.draft_rounds, delta.plain_rounds) == (1, 0, 0, 0)
    assert finish_of(engine, 1).reason is FinishReason.ERROR


def test_a_lost_device_ends_every_request_with_the_reason_and_the_engine_with_1() -> None:
    engine = Engine(max_num_seqs=2)
    for request_id in range(4):
        engine.submit(request_id, max_tokens=50, awaits_close=request_id == 0)

    def lose(span: Span) -> Exception | None:
        return DeviceFailure("out of memory") if len(engine.publisher.steps) == 3 else None

    engine.fake.fail_if = lose
    assert engine.core.run() == 1
    for request_id in range(4):
        finish = finish_of(engine, request_id)
        assert finish.reason is FinishReason.ERROR and finish.message == "the engine lost its device: out of memory"
    assert engine.publisher.steps[-1]["f"].outcome is StepOutcome.FAILED
    assert engine.publisher.snapshots[-1].load.running == engine.ledger.num_open == 0


def test_a_device_lost_in_the_retry_is_a_lost_device() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=50)
    errors: list[Exception] = [DeviceFailure("gone"), ValueError("first")]
    engine.fake.fail_if = lambda span: errors.pop() if errors else None
    assert engine.core.run() == 1
    assert finish_of(engine, 1).message == "the engine lost its device: gone"


def test_an_executor_that_cannot_apply_row_changes_ends_the_engine() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=1)
    engine.run_dry()

    def broken(plan: object) -> None:
        raise ValueError("row table corrupt")

    engine.fake._apply = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="row table corrupt"):
        engine.step()


def test_an_idle_engine_waits_without_stepping() -> None:
    engine = Engine()
    calls = 0

    def on_wait() -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            engine.submit(1, max_tokens=3)
            return True
        if calls == 6:
            engine.core.stop()
        return False

    engine.inbox.on_wait = on_wait
    assert engine.core.run() == 0
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 3)
    assert engine.counters.steps_empty <= 2, "no step without a reason; stopping takes one"
    assert engine.inbox.waits == [None] * 6


def test_rows_that_all_belong_to_paused_frontends_do_not_make_the_engine_spin() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=20)
    engine.step(2)
    engine.inbox.paused_frontends = frozenset({"f"})
    calls = 0

    def on_wait() -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            engine.inbox.paused_frontends = frozenset()
            return True
        if calls > 5:
            engine.core.stop()
        return False

    engine.inbox.on_wait = on_wait
    before = len(engine.publisher.steps)
    engine.core.run()
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 20)
    assert engine.counters.steps_empty <= 3 and len(engine.publisher.steps) > before


def test_a_deadline_wakes_a_sleeping_engine() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=20, remaining_ns=2 * 10**9)
    engine.step(2)
    engine.inbox.paused_frontends = frozenset({"f"})

    def on_wait() -> bool:
        timeout_s = engine.inbox.waits[-1]
        if timeout_s is None:
            engine.core.stop()
        else:
            assert 1.0 < timeout_s < 2.0
            engine.clock.advance(timeout_s)
        return False

    engine.inbox.on_wait = on_wait
    assert engine.core.run() == 0
    finish = finish_of(engine, 1)
    assert finish.reason is FinishReason.ABORT and finish.message is not None and "deadline" in finish.message


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=10)
    engine.step()
    engine.core.drain(timeout_s=60)
    assert engine.publisher.has_announced_drain, "frontends are told before the next step"
    engine.submit(2)
    assert engine.core.run() == 0
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 10)
    assert finish_of(engine, 2).rejected is RejectReason.DRAINING


def test_what_outlives_the_drain_is_aborted_with_a_reason() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=150)
    engine.step()
    engine.fake.during = lambda: engine.clock.advance(1)
    engine.core.drain(timeout_s=3)
    assert engine.core.run() == 0
    finish = finish_of(engine, 1)
    assert finish.reason is FinishReason.ABORT and finish.message == "the engine is shutting down"
    assert engine.publisher.snapshots[-1].load.running == 0


def test_a_request_id_used_twice_leaves_the_first_stream_alone() -> None:
    engine = Engine()
    engine.submit(1, max_tokens=10)
    engine.step()
    engine.submit(1, (20, 21), max_tokens=10)
    engine.run_dry()
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 10)
    assert engine.publisher.counters().refused_messages == 1
    engine.submit(1, (20, 21), max_tokens=3)
    engine.step()
    assert engine.counters.refused_messages == 1, "an id is free again once its request has ended"


@pytest.mark.parametrize("seed", range(25))
def test_random_traffic_keeps_every_law(seed: int) -> None:
    """Aborts at random moments, preemption, stops, forks, failures, lost results, gone frontends: laws hold after every
    step (check_laws), blocks add up after every step, streams equal plain decoding, and everything ends at zero."""
    print("seed", seed)
    Traffic(random.Random(seed)).run()


def test_random_traffic_reaches_every_corner() -> None:
    totals = []
    for seed in range(12):
        traffic = Traffic(random.Random(seed))
        traffic.run()
        totals.append(traffic.engine.publisher.counters())
    for name in (
        "num_preemptions",
        "aborted_rounds",
        "cut_tokens",
        "trimmed_tokens",
        "recomputed_tokens",
        "prefix_cache_hits",
        "draft_rounds",
        "plain_rounds",
        "steps_empty",
    ):
        assert sum(getattr(counters, name) > 0 for counters in totals) >= 2, name


class Traffic:
    """Random requests against one engine, and what their clients must see."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.engine = Engine(
            max_num_seqs=rng.choice([1, 3, 6]),
            max_num_batched_tokens=rng.choice([6, 16, 40]),
            num_blocks=rng.choice([14, 24, 64]),
            block_size=rng.choice([2, 4]),
            max_draft_len=rng.choice([1, 4, 6]),
            max_model_len=60,
            prefix_caching=rng.random() < 0.7,
            frontends=("f", "g"),
        )
        self.engine.fake.acceptance = rng.choice([0.0, 0.6, 1.0])
        self.engine.fake.eos_every = 40
        self.engine.fake.retract_if = lambda span: rng.random() < 0.02
        self.engine.fake.fail_if = lambda span: ValueError("bad luck") if rng.random() < 0.002 else None
        self.engine.fake.during = self.meddle
        self.requests: dict[int, dict[str, object]] = {}
        self.closed: set[int] = set()
        self.is_open = True
        self.has_detached = False

    def run(self) -> None:
        for _ in range(150):
            if self.rng.random() < 0.3:
                self.submit()
            if self.rng.random() < 0.05:
                self.engine.inbox.paused_frontends = frozenset(self.rng.sample(["f", "g"], self.rng.randint(0, 2)))
            self.meddle()
            self.engine.step()
        self.is_open = False
        self.engine.inbox.paused_frontends = frozenset()
        self.engine.run_dry()
        for request_id in self.requests:
            self.engine.inbox.put(Close(request_id, -1, CloseReason.DELIVERED, 10**6), self.frontend(request_id))
        self.engine.step()
        self.verify()

    def submit(self) -> None:
        request_id = len(self.requests) + 1
        prompt = tuple(self.rng.choices(range(10, 13), k=self.rng.randint(1, 25)))
        options: dict[str, object] = {
            "n": self.rng.choice([1, 1, 1, 3]),
            "max_tokens": self.rng.randint(1, 30),
            "priority": self.rng.choice([0, 0, 1]),
            "awaits_close": self.rng.random() < 0.3,
            "trace_level": self.rng.choice([0, 0, 3]),
        }
        self.requests[request_id] = {"prompt": prompt, **options}
        self.engine.submit(request_id, prompt, frontend_id=self.frontend(request_id), **options)

    def meddle(self) -> None:
        """Between steps and, as `during`, while one runs."""
        if not self.is_open or not self.requests or self.rng.random() > 0.1:
            return
        request_id = self.rng.choice(sorted(self.requests))
        if self.rng.random() < 0.03:
            self.engine.inbox.put(Detach(), "g")
            self.has_detached = True
            self.closed.update(r for r in self.requests if self.frontend(r) == "g")
            return
        reason = self.rng.choice([CloseReason.CLIENT_GONE, CloseReason.STOP_STRING])
        close = Close(request_id, self.rng.choice([-1, 0, 0, 2]), reason, self.rng.randint(0, 5))
        self.engine.inbox.put(close, self.frontend(request_id))
        self.closed.add(request_id)

    @staticmethod
    def frontend(request_id: int) -> str:
        return "fg"[request_id % 2]

    def verify(self) -> None:
        engine = self.engine
        load, num_open = engine.publisher.snapshots[-1].load, engine.ledger.num_open
        assert (load.running, load.waiting, load.waiting_tokens, load.blocks_used, num_open) == (0, 0, 0, 0, 0)
        totals = engine.publisher.counters()
        totals.check()
        if not self.has_detached:
            self.verify_totals(totals)
        for request_id, request in self.requests.items():
            for child in range(int(str(request["n"]))):
                self.verify_child(request_id, child, request)

    def verify_totals(self, totals: Counters) -> None:
        """What went over the wire adds up to what was counted."""
        outputs = [output for frontend_id in "fg" for output in self.engine.publisher.outputs(frontend_id)]
        rounds = [output.round for output in outputs if output.round is not None]
        assert len([r for r in rounds if r.drafted]) == totals.draft_rounds
        assert len([r for r in rounds if not r.drafted]) == totals.plain_rounds
        assert sum(r.drafted for r in rounds) == totals.draft_tokens
        assert sum(r.accepted for r in rounds) == totals.accepted_tokens
        assert sum(r.non_draft for r in rounds) == totals.non_draft_tokens
        assert sum(r.cut for r in rounds) == totals.cut_tokens
        assert sum(r.aborted for r in rounds) == totals.aborted_rounds
        assert sum(len(output.token_ids) for output in outputs) == totals.generation_tokens
        assert sum(o.prompt.num_tokens for o in outputs if o.prompt) == totals.prompt_tokens
        assert sum(o.prompt.num_cached_tokens for o in outputs if o.prompt) == totals.prompt_tokens_cached

    def verify_child(self, request_id: int, child: int, request: dict[str, object]) -> None:
        tokens = self.engine.tokens(request_id, child, self.frontend(request_id))
        prompt = request["prompt"]
        assert isinstance(prompt, tuple)
        limit = min(int(str(request["max_tokens"])), self.engine.scheduler._settings.max_len - len(prompt))
        expected = plain_tokens(prompt, request_id + child, limit, self.engine.fake.eos_every)
        assert tokens == expected[: len(tokens)]
        finishes = self.engine.finishes(request_id, child, self.frontend(request_id))
        errors = [f for f in finishes if isinstance(f, Finish) and f.reason is FinishReason.ERROR]
        if request_id not in self.closed:
            assert finishes
            assert tokens == expected or errors
