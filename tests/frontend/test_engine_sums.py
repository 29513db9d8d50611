"""The engine's sums: totals that go on whoever reports them, and increments that never count a token twice."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.deltas import LatestSnapshot, ObservedEngine
from frontend.engine_sums import SUMS, EngineReport, EngineReporter, EngineReporters
from protocol.codec import encode_counters
from protocol.counters import Counters
from tests.wiring import EPOCH, IDLE, hello, step, totals

SECOND = 1_000_000_000


def at(step_id: int) -> Counters:
    counters = totals(
        generation_tokens=4 * step_id, draft_rounds=step_id, plain_rounds=2 * step_id, draft_tokens=3 * step_id,
        accepted_tokens=2 * step_id, cut_tokens=5 * step_id, aborted_rounds=6 * step_id,
    )  # fmt: skip
    counters.accepted_per_pos = [step_id, step_id, 0]
    return counters


class Frontend:
    """One frontend's view of an engine, at times the test sets."""

    def __init__(self, name: str, is_delta: bool = False) -> None:
        self.name = name
        self.is_attached = True
        self.now_ns = EPOCH
        self.latest = LatestSnapshot(lambda: self.now_ns)
        self.reporter = EngineReporter(self.latest, self.is_reporter, is_delta)

    def is_reporter(self) -> bool:
        return self.is_attached and self.latest.load.reporter == self.name

    def hears(self, step_id: int, reporter: str, epoch: int = EPOCH) -> None:
        """A second later than before."""
        load = msgspec.structs.replace(IDLE, reporter=reporter)
        self.now_ns = max(self.now_ns, epoch) + SECOND
        encoded = encode_counters(at(step_id))
        if self.latest.epoch != epoch:
            self.latest.observe(hello(epoch=epoch, step_id=step_id, load=load, counters=encoded))
        message = step(step_id, epoch=epoch, counters=at(step_id))
        self.latest.observe(msgspec.structs.replace(message, load=load))

    def exports(self, arrives: bool = True) -> list[EngineReport]:
        reports = self.reporter.collect()
        if arrives:
            self.reporter.exported()
        return reports


def values(report: EngineReport) -> dict[str, int]:
    """By name and labels that are not of every point."""
    found = {}
    for kind, points in report.sums:
        for point in points:
            labels = [str(v) for k, v in point.attributes.items() if k not in ("engine", "gen_ai.response.model")]
            found[".".join([kind.name.removeprefix("drafthouse."), *labels])] = point.value
    return found


def generated(reports: list[EngineReport]) -> int:
    return sum(values(report)["generation_tokens"] for report in reports)


def test_every_sum_is_the_engines_total():
    frontend = Frontend("a")
    assert frontend.exports() == [], "nothing is known before a Hello"
    frontend.hears(10, "a")
    [report] = frontend.exports()
    assert values(report) == {
        "spec_decode.drafts": 10,
        "spec_decode.draft_tokens": 30,
        "spec_decode.accepted_tokens": 20,
        "spec_decode.accepted_tokens_per_pos.0": 10,
        "spec_decode.accepted_tokens_per_pos.1": 10,
        "spec_decode.accepted_tokens_per_pos.2": 0,
        "spec_decode.cut_tokens": 50,
        "spec_decode.aborted_rounds": 60,
        "verify_rounds.draft": 10,
        "verify_rounds.plain": 20,
        "generation_tokens": 40,
    }
    assert (report.start_ns, report.end_ns) == (EPOCH, frontend.now_ns)
    for kind, points in report.sums:
        assert kind.unit in ("{token}", "{draft}", "{round}")
        for point in points:
            assert (point.attributes["engine"], point.attributes["gen_ai.response.model"]) == ("0", "tiny")


def test_the_four_families_of_drafts_are_absent_without_a_drafter():
    frontend = Frontend("a")
    load = msgspec.structs.replace(IDLE, reporter="a")
    plain = Counters.zero(0, 0)
    frontend.latest.observe(hello(max_draft_len=0, sources=(), counters=encode_counters(plain), load=load))
    [report] = frontend.exports()
    absent = {kind.name for kind in SUMS if kind.needs_speculator}
    assert len(absent) == 4 and {kind.name for kind, _ in report.sums} == {kind.name for kind in SUMS} - absent


def test_only_the_reporter_reports_and_the_next_one_goes_on_with_the_series():
    first, second = Frontend("a"), Frontend("b")
    for frontend in (first, second):
        frontend.hears(1, "a")
    assert len(first.exports()) == 1 and second.exports() == []
    first.is_attached = False
    second.hears(5, "a")
    assert second.exports() == [] and first.exports() == [], "it has told all it knows"
    second.hears(6, "b")
    [report] = second.exports()
    assert report.start_ns == EPOCH and report.hello.epoch == EPOCH, "the same series"
    assert values(report)["generation_tokens"] == 24


def test_increments_begin_at_hello_and_a_failed_export_is_made_up_for():
    frontend = Frontend("a", is_delta=True)
    frontend.hears(3, "a")  # what was before its Hello, another may have exported
    [nothing] = frontend.exports()
    assert generated([nothing]) == 0 and nothing.start_ns == nothing.end_ns == frontend.now_ns
    frontend.hears(4, "a")
    [lost] = frontend.exports(arrives=False)
    frontend.hears(6, "a")
    [both] = frontend.exports()
    assert (generated([lost]), generated([both])) == (4, 12)
    assert both.start_ns == nothing.end_ns == lost.start_ns and both.end_ns == frontend.now_ns
    assert values(both)["spec_decode.accepted_tokens_per_pos.1"] == 3
    assert frontend.exports() == [], "nothing was heard since"
    frontend.hears(6, "a")  # a heartbeat
    [idle] = frontend.exports()
    assert generated([idle]) == 0 and idle.start_ns == both.end_ns


def test_a_first_export_that_fails_loses_nothing():
    frontend = Frontend("a", is_delta=True)
    frontend.hears(0, "a")
    frontend.hears(3, "a")
    frontend.exports(arrives=False)
    frontend.hears(4, "a")
    assert generated(frontend.exports()) == 16


def test_a_frontend_that_is_gone_before_its_first_export_tells_what_it_knows():
    for is_delta in (False, True):
        frontend = Frontend("a", is_delta)
        frontend.hears(0, "a")
        frontend.hears(5, "a")
        frontend.reporter.recognise()  # it served a request
        frontend.hears(6, "a")
        frontend.is_attached = False  # it said goodbye to its engine, then exports for the last time
        [report] = frontend.exports()
        assert (generated([report]), report.end_ns) == (24, frontend.now_ns)


@pytest.mark.parametrize(("is_delta", "rest"), [(True, 16), (False, 36)], ids=["delta", "cumulative"])
def test_what_an_engine_did_before_it_died_is_exported_when_it_is_back(is_delta: bool, rest: int):
    frontend = Frontend("a", is_delta)
    frontend.hears(0, "a")
    frontend.hears(5, "a")
    assert generated(frontend.exports()) == 20
    frontend.hears(9, "a")
    died_ns, frontend.name = frontend.now_ns, "a again"
    frontend.hears(2, "a again", epoch=EPOCH + 100 * SECOND)
    for arrives in (False, True):
        ended, now = frontend.exports(arrives)
        assert (ended.hello.epoch, generated([ended]), ended.end_ns) == (EPOCH, rest, died_ns)
        assert (now.hello.epoch, generated([now])) == (EPOCH + 100 * SECOND, 0 if is_delta else 8)
    frontend.hears(3, "a again", epoch=EPOCH + 100 * SECOND)
    [only] = frontend.exports()
    assert generated([only]) == (4 if is_delta else 12), "once"


def test_or_while_it_is_away():
    frontend = Frontend("a", is_delta=True)
    frontend.hears(0, "a")
    frontend.hears(9, "a")
    frontend.reporter.recognise()
    frontend.is_attached = False
    assert generated(frontend.exports()) == 36
    frontend.is_attached, frontend.name = True, "a again"
    frontend.hears(2, "a again", epoch=EPOCH + 100 * SECOND)
    assert generated(frontend.exports()) == 0


class World:
    """An engine and two frontends; whoever is attached hears every step, and the longest attached reports."""

    def __init__(self, is_delta: bool) -> None:
        self.is_delta = is_delta
        self.frontends = [Frontend("0", is_delta), Frontend("1", is_delta)]
        self.attached: list[Frontend] = []
        self.epoch, self.step_id, self.names = EPOCH, 0, 2
        self.totals: dict[int, int] = {}
        self.arrived: list[EngineReport] = []
        self.clock_ns = EPOCH
        for frontend in self.frontends:
            self.attach(frontend)

    def happen(self, what: str, who: int) -> None:
        frontend = self.frontends[who]
        self.clock_ns += 2 * SECOND
        if what == "step":
            self.step_id += 1
            self.tell()
        elif what in ("export", "fail"):
            reports = frontend.exports(arrives=what == "export")
            if what == "export":
                self.arrived += reports
        elif what == "leave" and frontend in self.attached:
            frontend.is_attached = False
            self.attached.remove(frontend)
            self.tell()  # it was cut off, and lives on with what it knew
        elif what == "kill":
            self.happen("leave", who)
            self.frontends[who] = Frontend("", self.is_delta)
        elif what == "return" and frontend not in self.attached:
            self.attach(frontend)
        elif what == "restart":
            for one in self.attached:
                one.is_attached = False
            left, self.attached = self.attached, []
            self.epoch, self.step_id = self.clock_ns, 0
            for one in left[::-1] if who else left:
                self.attach(one)

    def attach(self, frontend: Frontend) -> None:
        self.names += 1
        frontend.name, frontend.is_attached = str(self.names), True
        self.attached.append(frontend)
        self.tell()

    def tell(self) -> None:
        self.totals[self.epoch] = 4 * self.step_id
        for frontend in self.attached:
            frontend.now_ns = self.clock_ns
            frontend.hears(self.step_id, self.attached[0].name, self.epoch)


def test_increments_another_has_reported_meanwhile_are_not_reported_again():
    world = World(is_delta=True)
    first_leaves_and_returns_alone = [
        ("step", 0), ("export", 0), ("leave", 0), ("step", 0), ("export", 1), ("step", 0), ("export", 1), ("leave", 1),
        ("return", 0), ("step", 0), ("export", 0), ("step", 0), ("export", 0),
    ]  # fmt: skip
    for what, who in first_leaves_and_returns_alone:
        world.happen(what, who)
    assert [generated([report]) for report in world.arrived] == [4, 0, 4, 0, 4]


WHAT = st.sampled_from(["step", "step", "export", "export", "export", "fail", "leave", "kill", "return", "restart"])
EVENTS = st.lists(st.tuples(WHAT, st.booleans()), min_size=15, max_size=60)  # long enough for somebody to take over


@given(EVENTS)
def test_increments_never_add_up_to_more_than_the_totals(events):
    world = World(is_delta=True)
    for what, who in events:
        world.happen(what, int(who))
    for epoch, total in world.totals.items():
        assert generated([report for report in world.arrived if report.hello.epoch == epoch]) <= total
    assert all(number >= 0 for report in world.arrived for number in values(report).values())
    assert all(report.start_ns <= report.end_ns for report in world.arrived)


@given(EVENTS)
def test_totals_that_arrive_never_fall_and_never_run_ahead(events):
    world = World(is_delta=False)
    for what, who in events:
        world.happen(what, int(who))
    for epoch, total in world.totals.items():
        in_time = sorted(world.arrived, key=lambda report: report.end_ns)  # as a backend orders points
        series = [generated([report]) for report in in_time if report.hello.epoch == epoch]
        assert series == sorted(series) and all(number <= total for number in series)


@given(st.lists(st.tuples(st.sampled_from(["step", "export", "fail"]), st.just(False))))
def test_increments_of_one_reporter_add_up_to_the_totals_exactly(events):
    world = World(is_delta=True)
    for what, who in [*events, ("export", False)]:
        world.happen(what, int(who))
    assert generated(world.arrived) == world.totals[EPOCH]
    for before, after in itertools.pairwise(world.arrived):  # an export before anything new was heard has no point
        assert before.end_ns == after.start_ns, "without a gap"


def test_each_engine_is_reported_by_its_own_reporter():
    frontends = [Frontend("me"), Frontend("me")]
    known: list[ObservedEngine] = []
    reporters = EngineReporters(lambda: tuple(known), is_delta=True)
    assert reporters.collect() == []
    frontends[0].hears(1, "me")
    frontends[0].hears(2, "me")
    known.append(ObservedEngine("0", frontends[0].latest, frontends[0].is_reporter))
    assert [generated([report]) for report in reporters.collect()] == [4]
    reporters.exported()
    frontends[0].hears(4, "me")
    frontends[1].hears(5, "another")
    known.append(ObservedEngine("1", frontends[1].latest, frontends[1].is_reporter))
    assert [generated([report]) for report in reporters.collect()] == [8], "what another reports is not ours"
    reporters.exported()
    frontends[1].hears(6, "me")
    reporters.recognise()
    frontends[1].hears(7, "me")
    assert [generated([report]) for report in reporters.collect()] == [4], "from where this frontend took over"
