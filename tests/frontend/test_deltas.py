"""Totals survive whatever happens to messages; increments add up to totals."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.deltas import IntervalLog, IntervalLogs, LatestSnapshot, ObservedEngine, SnapshotDelta
from protocol.codec import decode_counters, encode_counters
from protocol.counters import Counters
from protocol.messages import Detached, FenceReply, FromEngine, Heartbeat
from protocol.reasons import DetachReason
from tests.wiring import EPOCH, IDLE, hello, step, totals


def at(step_id: int) -> Counters:
    """The totals an engine has at a step: every field a different multiple of the step."""
    counters = totals(
        steps_ok=step_id, generation_tokens=3 * step_id, draft_rounds=step_id, accepted_tokens=2 * step_id
    )
    counters.accepted_per_pos = [step_id, step_id, 0]
    counters.draft_tokens = 3 * step_id
    counters.step_seconds.counts[0] = step_id
    return counters


def published(step_id: int, kind: int, epoch: int = EPOCH) -> FromEngine:
    raw = encode_counters(at(step_id))
    if kind == 0:
        return step(step_id, epoch=epoch, counters=at(step_id))
    if kind == 1:
        return Heartbeat("0", epoch, step_id, raw, IDLE, 0, 0)
    return FenceReply("0", epoch, 1, step_id, raw, IDLE)


def added(parts: list[Counters]) -> Counters:
    total = totals()
    for part in parts:
        total = total.minus(totals().minus(part))
    return total


deliveries = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.booleans()), max_size=60)


@given(deliveries)
def test_any_subset_and_order_of_messages_gives_the_totals_of_the_newest(messages):
    latest = LatestSnapshot()
    latest.observe(hello())
    delta = SnapshotDelta(latest)
    parts = []
    before = 0
    for step_id, kind, looks in messages:
        latest.observe(published(step_id, kind))
        assert latest.step_id >= before, "a total fell"
        before = latest.step_id
        if looks:
            increments = delta.advance()
            assert increments is not None and increments.generation_tokens >= 0
            parts.append(increments)
    last = delta.advance()
    assert last is not None
    newest = max((step_id for step_id, _, _ in messages), default=0)
    assert latest.counters == (at(newest) if newest else totals())
    assert added([*parts, last]) == latest.counters


@given(deliveries, deliveries)
def test_a_new_epoch_restarts_and_stragglers_of_the_old_one_say_nothing(old, new):
    latest = LatestSnapshot()
    latest.observe(hello())
    delta = SnapshotDelta(latest)
    for step_id, kind, _ in old:
        latest.observe(published(step_id, kind))
    delta.advance()
    latest.observe(hello(epoch=EPOCH - 5))  # a wall clock may have been set back
    for message in [*((*one, EPOCH) for one in old), *((*one, EPOCH - 5) for one in new)]:
        latest.observe(published(message[0], message[1], epoch=message[3]))
    latest.observe(hello())
    newest = max((step_id for step_id, _, _ in new), default=0)
    assert latest.epoch == EPOCH - 5 and latest.step_id == newest
    assert delta.advance() == latest.counters


def test_what_an_ended_epoch_came_to_is_kept_until_the_next_one_ends():
    latest = LatestSnapshot()
    latest.observe(hello())
    assert latest.heard is not None and latest.heard.ended is None
    latest.observe(published(7, 0))
    latest.observe(hello(epoch=EPOCH + 1))
    latest.observe(published(9, 0))  # a straggler
    latest.observe(published(2, 1, epoch=EPOCH + 1))
    ended = latest.heard.ended
    assert ended is not None and ended.hello.epoch == EPOCH
    assert ended.counters == encode_counters(at(7)) and latest.counters == at(2)
    latest.observe(hello(epoch=EPOCH + 2))
    ended = latest.heard.ended
    assert ended is not None and (ended.hello.epoch, ended.counters) == (EPOCH + 1, encode_counters(at(2)))


def test_a_reader_of_another_thread_never_leaves_old_totals_behind(monkeypatch: pytest.MonkeyPatch):
    latest = LatestSnapshot()
    latest.observe(hello())
    latest.observe(published(1, 0))

    def decode_while_a_step_arrives(raw: msgspec.Raw) -> Counters:
        monkeypatch.undo()
        latest.observe(published(2, 0))
        return decode_counters(raw)

    monkeypatch.setattr("frontend.deltas.decode_counters", decode_while_a_step_arrives)
    assert latest.counters == at(1), "what it began to read"
    assert latest.counters == at(2)


def test_the_first_snapshot_counts_from_zero():
    latest = LatestSnapshot()
    delta = SnapshotDelta(latest)
    assert delta.advance() is None
    latest.observe(step(3))
    assert delta.advance() is None, "nothing counts before Hello"
    latest.observe(hello(step_id=9, counters=encode_counters(at(9))))
    assert delta.advance() == at(9)


def test_two_readers_agree_whenever_they_look():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    latest = LatestSnapshot()
    latest.observe(hello())
    readers = [SnapshotDelta(latest) for _ in range(2)]
    parts: list[list[Counters]] = [[], []]
    for step_id in range(1, 50):
        latest.observe(published(step_id, 0))
        for reader, seen in zip(readers, parts, strict=True):
            if choose.random() < 0.3:
                increments = reader.advance()
                assert increments is not None
                seen.append(increments)
    for reader, seen in zip(readers, parts, strict=True):
        last = reader.advance()
        assert last is not None
        seen.append(last)
    assert added(parts[0]) == added(parts[1]) == at(49)


def test_observing_decodes_nothing(monkeypatch: pytest.MonkeyPatch):
    decoded = []
    monkeypatch.setattr("frontend.deltas.decode_counters", lambda raw: decoded.append(raw) or at(1))
    latest = LatestSnapshot()
    latest.observe(hello())
    for step_id in range(1, 100):
        latest.observe(step(step_id))
    assert decoded == []
    assert latest.counters is latest.counters and len(decoded) == 1


def test_load_follows_heartbeats_and_totals_outlive_the_engine():
    latest = LatestSnapshot()
    with pytest.raises(LookupError):
        _ = latest.load
    latest.observe(hello())
    latest.observe(published(4, 0))
    busier = msgspec.structs.replace(IDLE, frontends=2)
    latest.observe(Heartbeat("0", EPOCH, 4, encode_counters(at(4)), busier, 0, 0))
    assert latest.load == busier
    latest.observe(Detached("0", EPOCH, DetachReason.SHUTDOWN))
    assert latest.counters == at(4)


def test_the_interval_log_speaks_only_of_intervals_that_drafted():
    latest = LatestSnapshot()
    latest.observe(hello())
    latest.observe(published(5, 0))
    lines: list[str] = []
    now = [100.0]
    log = IntervalLog(latest, lines.append, lambda: now[0])
    now[0] += 10
    log.tick()
    assert lines == [], "what was before is not logged, and nothing happened since"
    latest.observe(published(15, 0))
    now[0] += 10
    log.tick()
    assert lines == ["speculation accept_rate=0.667 accept_length=3.00 rounds=10 generated_per_s=3.0"]


def test_interval_logs_name_their_engine_and_begin_at_its_hello():
    lines: list[str] = []
    now, known = [100.0], list[ObservedEngine]()
    logs = IntervalLogs(lambda: known, lines.append, lambda: now[0])
    for engine_id, steps in (("0", 10), ("1", 20)):
        latest = LatestSnapshot()
        latest.observe(hello(step_id=5, counters=encode_counters(at(5))))
        latest.observe(published(5 + steps, 0))
        known.append(ObservedEngine(engine_id, latest, lambda: False))
    now[0] += 10
    logs.tick()
    assert [line.partition(" accept_rate")[0] for line in lines] == ["speculation engine=0", "speculation engine=1"]
    assert [line.partition("rounds=")[2] for line in lines] == ["10 generated_per_s=3.0", "20 generated_per_s=6.0"]
    del known[0]
    now[0] += 10
    logs.tick()
    assert len(lines) == 2, "nothing happened since, and an engine that is forgotten is not told"
