"""Profiles: one whole file or none, bounded, and nothing of it on an engine that records none."""

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import profiler as profiler_module
from engine.clock import HostClock, PhaseClock
from engine.core import EngineCore
from engine.handover import Mailbox, ProfileLine
from engine.profiler import NO_DIRECTORY, NO_MODEL, NoProfiles, ProfileConflict, ProfileDesk, ProfileError, Profiler
from engine.recorder import ProfiledClock, TorchRecorder
from protocol.messages import Phase, Profile, ProfileAction, ProfileOutcome, ProfileReply
from tests.fakes import Engine as FakeEngine
from tests.fakes import FakeClock, submit
from tests.inprocess import FRONTEND, Drafter, InProcessEngine, Shape
from tests.timing import at_most_s
from tests.tiny import write_tiny_model

START, STOP = ProfileAction.START, ProfileAction.STOP
PHASES = {"observe", "draft", "verify", "accept"}


class FakeRecorder:
    """Windows of one event per step, `event_bytes` long. What is recorded is numbered from 0."""

    def __init__(self, event_bytes: int = 100) -> None:
        self.num_steps = 0
        self.is_recording = False
        self.windows: list[int] = []  # steps of each finished window
        self.base = 1
        self.event_bytes = event_bytes
        self.fail_begin: Exception | None = None
        self.fail_end: Exception | None = None

    def begin(self) -> None:
        assert not self.is_recording
        if self.fail_begin is not None:
            raise self.fail_begin
        self.is_recording, self.num_steps = True, 0

    def end(self, path: Path) -> None:
        assert self.is_recording
        self.is_recording = False
        steps, self.num_steps = self.num_steps, 0
        if self.fail_end is not None:
            raise self.fail_end
        first = sum(self.windows)
        events = [{"name": f"step {first + step}", "pad": "x" * self.event_bytes} for step in range(steps)]
        trace = {"baseTimeNanoseconds": self.base, "traceEvents": events, "displayTimeUnit": "ms"}
        path.write_text(json.dumps(trace, indent=1))
        self.windows.append(steps)


class Bench:
    """A profiler over a fake recorder and fake clocks; `steps` plays steps and the ticks between them."""

    def __init__(self, directory: Path, recorder: FakeRecorder | None = None) -> None:
        self.directory = directory
        self.recorder = recorder or FakeRecorder()
        self.clock = FakeClock()
        self.wall = 1_700_000_000.0
        self.profiler = Profiler(self.recorder, directory, "gpu-3", self.clock, self._wall)

    def _wall(self) -> float:
        self.wall += 0.25
        return self.wall

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.recorder.num_steps += self.recorder.is_recording
            self.profiler.tick()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "profiles")


def names(path: Path | None) -> list[str]:
    assert path is not None
    return [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


# ---- the profiler ----


def test_the_file_holds_every_step_once_in_order_and_is_the_only_file(bench: Bench):
    bench.profiler.start()
    assert all(name.startswith(".") for name in bench.files())  # nothing that looks whole
    bench.steps(200)
    note = bench.profiler.stop()
    assert note.num_steps == 200 and names(note.path) == [f"step {number}" for number in range(200)]
    assert len(bench.recorder.windows) > 2
    assert bench.files() == [note.path.name]  # type: ignore[union-attr]
    header = json.loads(gzip.decompress(note.path.read_bytes()))  # type: ignore[union-attr]
    assert header["displayTimeUnit"] == "ms" and header["baseTimeNanoseconds"] == 1


def test_the_file_is_named_after_engine_and_time(bench: Bench):
    bench.profiler.start()
    path = bench.profiler.stop().path
    assert path is not None and path.is_absolute()
    assert path.name == "drafthouse-gpu-3-20231114T221320.250Z.json.gz"


def test_a_profile_of_an_idle_engine_is_whole_and_says_that_it_holds_no_step(bench: Bench):
    bench.profiler.start()
    note = bench.profiler.stop()
    assert note.num_steps == 0 and note.message == "0 steps recorded" and names(note.path) == []


def test_the_first_window_is_one_step_and_the_others_are_as_long_as_they_may(tmp_path: Path):
    bench = Bench(tmp_path, FakeRecorder(event_bytes=profiler_module.WINDOW_BYTES // 3 - 100))
    bench.profiler.start()
    bench.steps(8)
    bench.profiler.stop()
    assert bench.recorder.windows == [1, 3, 3, 1]


def test_a_step_larger_than_a_window_is_a_window_of_its_own(tmp_path: Path):
    bench = Bench(tmp_path, FakeRecorder(event_bytes=2 * profiler_module.WINDOW_BYTES))
    bench.profiler.start()
    bench.steps(3)
    assert bench.recorder.windows == [1, 1, 1]
    bench.profiler.close()


def test_starting_twice_and_stopping_without_a_profile_are_conflicts(bench: Bench):
    with pytest.raises(ProfileConflict, match="POST /start_profile"):
        bench.profiler.stop()
    bench.profiler.start()
    bench.steps(1)
    with pytest.raises(ProfileConflict, match="POST /stop_profile"):
        bench.profiler.start()
    assert bench.profiler.stop().num_steps == 1  # the refused start did not disturb it
    with pytest.raises(ProfileConflict, match="POST /start_profile"):
        bench.profiler.stop()


def test_a_forgotten_profile_ends_by_itself_even_if_nothing_runs(bench: Bench):
    bench.profiler.start()
    deadline_ns = bench.profiler.deadline_ns
    assert deadline_ns is not None and deadline_ns - bench.clock.now <= profiler_module.MAX_PROFILE_S * 1e9
    bench.steps(5)
    bench.clock.advance(profiler_module.MAX_PROFILE_S - 1)
    bench.profiler.tick()
    assert bench.recorder.is_recording
    bench.clock.advance(1)
    bench.profiler.tick()
    assert not bench.recorder.is_recording and bench.profiler.deadline_ns is None
    note = bench.profiler.stop()  # whoever comes to stop it gets its file, once
    assert note.num_steps == 5 and "ended by itself after 60 s" in note.message
    assert names(note.path) == [f"step {number}" for number in range(5)]
    with pytest.raises(ProfileConflict):
        bench.profiler.stop()


def test_a_large_profile_ends_by_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiler_module, "MAX_TRACE_BYTES", 20_000)
    bench.profiler.start()
    bench.steps(1000)
    assert not bench.recorder.is_recording
    note = bench.profiler.stop()
    assert 20_000 // 150 <= note.num_steps <= 20_000 // 100 + profiler_module.MAX_WINDOW_STEPS
    assert "ended by itself at" in note.message and len(names(note.path)) == note.num_steps


def test_a_new_profile_may_begin_after_one_that_ended_by_itself(bench: Bench):
    bench.profiler.start()
    bench.clock.advance(61)
    bench.profiler.tick()
    bench.profiler.start()
    bench.steps(2)
    note = bench.profiler.stop()
    assert note.num_steps == 2 and "by itself" not in note.message and len(bench.files()) == 2


def test_a_profiler_that_cannot_start_leaves_nothing_and_may_be_tried_again(bench: Bench):
    bench.recorder.fail_begin = RuntimeError("CUPTI is in use")
    with pytest.raises(ProfileError, match="CUPTI is in use"):
        bench.profiler.start()
    assert bench.files() == []
    bench.recorder.fail_begin = None
    bench.profiler.start()
    assert bench.profiler.stop().path is not None


def test_a_profiler_that_cannot_stop_leaves_nothing_and_may_be_tried_again(bench: Bench):
    bench.profiler.start()
    bench.recorder.fail_end = OSError(28, "No space left on device")
    with pytest.raises(ProfileError, match="No space left on device") as failure:
        bench.profiler.stop()
    assert failure.value.outcome is ProfileOutcome.FAILED and bench.files() == []
    bench.recorder.fail_end = None
    bench.profiler.start()
    assert bench.profiler.stop().path is not None


def test_a_failure_between_steps_harms_nobody_and_is_told_to_who_comes_to_stop(bench: Bench):
    bench.profiler.start()
    bench.recorder.fail_end = RuntimeError("lost the trace")
    bench.steps(3)
    assert bench.files() == [] and bench.profiler.deadline_ns is None
    with pytest.raises(ProfileError, match="lost the trace"):
        bench.profiler.stop()
    with pytest.raises(ProfileConflict):
        bench.profiler.stop()


def test_windows_that_do_not_share_a_clock_are_not_mixed(bench: Bench):
    bench.profiler.start()
    bench.steps(1)
    bench.recorder.base = 2
    with pytest.raises(ProfileError, match="time base"):
        bench.profiler.stop()
    assert bench.files() == []


def test_an_engine_that_ends_keeps_what_was_recorded(bench: Bench):
    bench.profiler.start()
    bench.steps(3)
    bench.profiler.close()
    (name,) = bench.files()
    assert len(names(bench.directory / name)) == 3
    bench.profiler.close()  # nothing more to keep
    assert bench.files() == [name]


def test_an_engine_that_ends_and_cannot_keep_it_ends_all_the_same(bench: Bench):
    bench.profiler.start()
    bench.recorder.fail_end = RuntimeError("the device is gone")
    bench.profiler.close()
    assert bench.files() == []


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--profile-dir .*file.* cannot be written to"):
        Profiler(FakeRecorder(), tmp_path / "file" / "profiles", "0")


def test_a_directory_that_vanished_is_a_failure_not_the_end_of_the_engine(bench: Bench):
    bench.directory.rmdir()
    with pytest.raises(ProfileError, match="cannot be written to: No such file"):
        bench.profiler.start()
    assert not bench.recorder.is_recording


def test_what_a_killed_engine_left_unfinished_is_removed_and_nothing_else(tmp_path: Path):
    old, young = tmp_path / ".drafthouse-gpu-3-a.json.gz.part", tmp_path / ".drafthouse-gpu-3-b.json.gz.part"
    whole, foreign = tmp_path / "drafthouse-gpu-3-c.json.gz", tmp_path / ".drafthouse-other-d.json.gz.part"
    for path in (old, young, whole, foreign):
        path.write_text("")
        os.utime(path, (1_600_000_000, 1_600_000_000))
    os.utime(young, (1_700_000_000, 1_700_000_000))
    Bench(tmp_path)
    assert {path for path in (old, young, whole, foreign) if path.exists()} == {young, whole, foreign}


# ---- the conversation ----


def replies(line: ProfileLine) -> list[ProfileReply]:
    return [reply for _, reply in line.take_answers()]


def test_every_question_is_answered_with_its_nonce_to_its_frontend(bench: Bench):
    rings: list[None] = []
    line = ProfileLine(lambda: rings.append(None))
    desk = ProfileDesk(line, bench.profiler, "gpu-3", epoch=7)
    for number, (frontend_id, action) in enumerate((("a", START), ("b", START), ("b", STOP), ("a", STOP))):
        line.ask(frontend_id, Profile(number, action))
    desk.run()
    answers = line.take_answers()
    assert [(frontend_id, reply.nonce, reply.outcome) for frontend_id, reply in answers] == [
        ("a", 0, ProfileOutcome.DONE),
        ("b", 1, ProfileOutcome.CONFLICT),
        ("b", 2, ProfileOutcome.DONE),
        ("a", 3, ProfileOutcome.CONFLICT),
    ]
    assert {(reply.engine_id, reply.epoch) for _, reply in answers} == {("gpu-3", 7)}
    assert [reply.path is not None for _, reply in answers] == [False, False, True, False]
    assert len(rings) == 4


@pytest.mark.parametrize("reason", [NO_DIRECTORY, NO_MODEL])
def test_an_engine_that_never_profiles_says_why(reason: str):
    line = ProfileLine(lambda: None)
    desk = ProfileDesk(line, NoProfiles(reason), "0", epoch=7)
    line.ask("a", Profile(1, START))
    line.ask("a", Profile(2, STOP))
    desk.run()
    desk.close()
    assert [(reply.outcome, reply.message) for reply in replies(line)] == [(ProfileOutcome.REFUSED, reason)] * 2
    assert "--profile-dir" in NO_DIRECTORY and "--executor sim" in NO_MODEL


def test_a_question_wakes_an_idle_step_thread_without_giving_it_a_step():
    line = ProfileLine(lambda: None)
    mailbox = Mailbox(line)
    mailbox.put("a", Profile(1, START))
    began = time.monotonic()
    assert mailbox.wait(10.0) is False
    at_most_s(time.monotonic() - began, 5.0, "waking")  # rung, not slept through
    assert mailbox.drain() == [] and line.take_questions() == [("a", Profile(1, START))]
    mailbox.close()


class CountedErrands:
    """Notes how often it was run between how many steps."""

    def __init__(self, core: EngineCore, deadline_ns: int | None = None) -> None:
        self.core = core
        self.deadline_ns = deadline_ns
        self.steps_seen: list[int] = []

    def run(self) -> None:
        self.steps_seen.append(self.core.ledger.counters.steps_ok)


def test_errands_are_run_before_every_step_and_between_two_of_a_running_request():
    engine = FakeEngine()
    engine.submit(1, max_tokens=9)
    errands = CountedErrands(engine.core)
    waits = iter((True, False))  # for the request; then there is nothing left

    def on_wait() -> bool:
        if not (has_arrived := next(waits)):
            engine.core.stop()
        return has_arrived

    engine.inbox.on_wait = on_wait
    assert engine.core.run(errands) == 0
    assert engine.counters.steps_ok > 2
    assert set(errands.steps_seen) == set(range(engine.counters.steps_ok + 1))


def test_an_idle_engine_sleeps_no_longer_than_to_the_deadline_of_its_errands():
    engine = FakeEngine()
    errands = CountedErrands(engine.core, engine.clock.now + 3_000_000_000)

    def on_wait() -> bool:
        engine.core.stop()
        return False

    engine.inbox.on_wait = on_wait
    engine.core.run(errands)
    (timeout_s,) = engine.inbox.waits
    assert timeout_s is not None and 2.9 < timeout_s <= 3.0
    assert engine.counters.steps_ok == 0  # waking up for an errand is no reason to step


# ---- the recorder ----


def test_a_profiled_clock_measures_what_the_plain_one_does_and_names_the_phases():
    ranges: list[str] = []

    @contextmanager
    def named_range(name: str):
        ranges.append(f"+{name}")
        yield
        ranges.append(f"-{name}")

    times = iter((0, 5, 9, 20, 30))
    clock = ProfiledClock(HostClock(lambda: next(times)), named_range)
    clock.start()
    for phase in (Phase.DRAFT, Phase.VERIFY):
        with clock.phase(phase):
            pass
    assert clock.read().spans == ((0, 0), (5, 9), (20, 30), (0, 0))
    assert ranges == ["+draft", "-draft", "+verify", "-verify"] and clock.num_steps == 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InProcessEngine:
    return InProcessEngine(
        write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=5), Shape(), Drafter("ngram", "ngram")
    )


def run(engine: InProcessEngine, request_id: int, after_step: Callable[[], None]) -> None:
    engine.inbox.put(submit(request_id, [10, 11, 12, 10, 11, 12], max_tokens=12, ignore_eos=True), FRONTEND)
    while engine.is_busy:
        engine._core.step()
        after_step()


def test_a_profile_of_a_model_names_the_phases_over_its_operations_and_leaves_the_plain_clock(
    engine: InProcessEngine, tmp_path: Path
):
    executor = engine.executor._inner
    plain = executor.clock
    profiler = Profiler(TorchRecorder(executor, on_cuda=False), tmp_path, "0")
    assert executor.clock is plain
    profiler.start()
    clocks: list[PhaseClock] = []

    def after_step() -> None:
        clocks.append(executor.clock)
        profiler.tick()

    run(engine, 1, after_step)
    note = profiler.stop()
    assert {type(clock) for clock in clocks} == {ProfiledClock} and executor.clock is plain
    assert 1 < note.num_steps <= len(clocks) and note.path is not None
    events = json.loads(gzip.decompress(note.path.read_bytes()))["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    assert {event["name"] for event in ranges} == PHASES
    verifies = [event for event in ranges if event["name"] == "verify"]
    assert len(verifies) == note.num_steps  # over all windows, on one time line
    assert [event["ts"] for event in verifies] == sorted(event["ts"] for event in verifies)
    for verify in verifies:
        assert any(
            event["name"] == "aten::mm" and verify["ts"] <= event["ts"] <= verify["ts"] + verify["dur"]
            for event in operations
        )


def test_without_a_profile_torch_records_nothing_and_the_clock_is_the_plain_one(engine: InProcessEngine):
    recorded: list[bool] = []
    run(engine, 2, lambda: recorded.append(torch.autograd.profiler._is_profiler_enabled))
    assert recorded and not any(recorded)
    assert type(engine.executor._inner.clock) is HostClock


def broken() -> None:
    raise RuntimeError("cannot save")


def test_a_recorder_that_cannot_save_leaves_the_plain_clock(
    engine: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    executor = engine.executor._inner
    plain = executor.clock
    recorder = TorchRecorder(executor, on_cuda=False)
    recorder.begin()
    assert executor.clock is not plain
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: broken())
    with pytest.raises(RuntimeError, match="cannot save"):
        recorder.end(tmp_path / "trace.json")
    assert executor.clock is plain and not torch.autograd.profiler._is_profiler_enabled
