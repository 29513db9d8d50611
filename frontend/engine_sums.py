"""The engines' totals as sums for OTLP: which totals, since when, and who reports them.

Owns the table of names, and the rule of the single writer: of all frontends attached to an engine one reports it, and a series goes
on when another takes over. The rule holds engine by engine: each may have another reporter. Never sends, never names a library. Called by the export thread of `frontend.otlp_metrics`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from frontend.deltas import Heard, LatestSnapshot, ObservedEngine
from protocol.codec import decode_counters
from protocol.counters import Counters
from protocol.messages import Hello

MAX_NAMES = 8  # names of attachments before the present one; only that of the epoch before is ever asked for


@dataclass(frozen=True, slots=True)
class Series:
    """Part of one sum: a field of `Counters`, spread over draft positions when it is a list."""

    field: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SumKind:
    """One sum by its OTLP name."""

    name: str
    unit: str
    help: str
    series: tuple[Series, ...]
    needs_speculator: bool = False


SUMS = (
    SumKind(
        "drafthouse.spec_decode.drafts", "{draft}", "Verified drafts of at least one token.",
        (Series("draft_rounds"),), needs_speculator=True,
    ),
    SumKind(
        "drafthouse.spec_decode.draft_tokens", "{token}", "Draft tokens verified.",
        (Series("draft_tokens"),), needs_speculator=True,
    ),
    SumKind(
        "drafthouse.spec_decode.accepted_tokens", "{token}", "Draft tokens accepted.",
        (Series("accepted_tokens"),), needs_speculator=True,
    ),
    SumKind(
        "drafthouse.spec_decode.accepted_tokens_per_pos", "{token}", "Draft tokens accepted, by position.",
        (Series("accepted_per_pos"),), needs_speculator=True,
    ),
    SumKind(
        "drafthouse.spec_decode.cut_tokens", "{token}", "Tokens of a round behind EOS, a stop token or max_tokens.",
        (Series("cut_tokens"),),
    ),
    SumKind(
        "drafthouse.spec_decode.aborted_rounds", "{round}", "Rounds whose request was closed while they ran.",
        (Series("aborted_rounds"),),
    ),
    SumKind(
        "drafthouse.verify_rounds", "{round}", "Verify rounds: with a draft, or plain decoding.",
        (Series("draft_rounds", (("kind", "draft"),)), Series("plain_rounds", (("kind", "plain"),))),
    ),
    SumKind(
        "drafthouse.generation_tokens", "{token}", "Tokens generated and committed.",
        (Series("generation_tokens"),),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    attributes: dict[str, str | int]
    value: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One epoch's sums from `start_ns` to `end_ns` (unix time)."""

    hello: Hello
    start_ns: int
    end_ns: int
    sums: tuple[tuple[SumKind, tuple[Point, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Accounted:
    """Totals of an epoch that this frontend has reported, or need not report because another did."""

    epoch: int
    reporter: str  # this frontend's name at the engine at that time
    counters: Counters
    at_ns: int

    def is_of(self, heard: Heard) -> bool:
        """Whether the same frontend reports the same epoch still."""
        return (self.epoch, self.reporter) == (heard.hello.epoch, heard.load.reporter)


class EngineReporter:
    """One reader of one engine. `collect` what to export, then say `exported` if it arrived.

    Totals carry the time at which they were heard, so a frontend that was cut off, or whose engine died, may still tell the
    last it knows: behind another's newer totals it is an older point of the same series, not a reset.
    """

    def __init__(self, latest: LatestSnapshot, is_reporter: Callable[[], bool], is_delta: bool) -> None:
        """`is_reporter`: this frontend is attached, and the newest load names it. `is_delta`: increments since the last
        successful export, else totals of the epoch."""
        self._latest = latest
        self._is_reporter = is_reporter
        self._is_delta = is_delta
        self._named: dict[str, Heard] = {}  # by this frontend's names: what was heard when it was first the reporter
        self._accounted: _Accounted | None = None  # None while another frontend reports
        self._closed: int | None = None  # the last epoch that ended and was told to the end
        self._next: tuple[_Accounted | None, int | None] = (None, None)

    def recognise(self) -> None:
        """Learn this frontend's name at the engine, which is new with each attachment, while the engine says it.

        Called with every request too: a frontend may be gone before it exports for the first time. Any thread.
        """
        heard = self._latest.heard
        if heard is None or heard.load.reporter in self._named or not self._is_reporter():
            return
        now = self._latest.heard
        if now is not None and now.load.reporter == heard.load.reporter:  # else the answer was about another load
            self._named = dict(list(self._named.items())[1 - MAX_NAMES :]) | {heard.load.reporter: heard}

    def collect(self) -> list[EngineReport]:
        """What to export now: the engine's epoch, and before it the rest of an epoch that ended since; often nothing."""
        self.recognise()
        heard = self._latest.heard
        self._next = (self._accounted, self._closed)
        if heard is None:
            return []
        reports = self._rest_of_ended(heard.ended)
        before = self._accounted if self._accounted is not None and self._accounted.is_of(heard) else None
        if heard.load.reporter not in self._named:
            self._accounted = self._accounted if reports else None  # another reports from here
        elif before is None or before.at_ns < heard.at_ns:  # else nothing was heard since: the engine is lost
            totals = decode_counters(heard.counters)
            before = before or self._first(heard)
            reports.append(self._report(heard, totals, before))
            self._accounted = self._accounted if len(reports) > 1 else before
            before = _Accounted(heard.hello.epoch, heard.load.reporter, totals, heard.at_ns)
        self._next = (before, self._closed if heard.ended is None else heard.ended.hello.epoch)
        return reports

    def exported(self) -> None:
        """What was collected last has arrived."""
        self._accounted, self._closed = self._next

    def _rest_of_ended(self, ended: Heard | None) -> list[EngineReport]:
        """What an epoch came to that ended while this frontend was its reporter."""
        if ended is None or ended.hello.epoch == self._closed or ended.load.reporter not in self._named:
            return []
        before = self._accounted
        if before is None or not before.is_of(ended):
            before = self._first(ended)
        return [self._report(ended, decode_counters(ended.counters), before)]

    def _first(self, heard: Heard) -> _Accounted:
        """Where increments begin: at Hello, or when this frontend took over. Between the other's last export and then they
        are given up, so that they never add up to more than the totals."""
        hello, reporter = heard.hello, heard.load.reporter
        if hello.load.reporter == reporter:
            return _Accounted(hello.epoch, reporter, decode_counters(hello.counters), heard.hello_at_ns)
        since = self._named[reporter]
        return _Accounted(hello.epoch, reporter, decode_counters(since.counters), since.at_ns)

    def _report(self, heard: Heard, totals: Counters, before: _Accounted) -> EngineReport:
        hello = heard.hello
        if self._is_delta:
            return EngineReport(hello, before.at_ns, heard.at_ns, tuple(_sums(hello, totals.minus(before.counters))))
        end_ns = max(hello.epoch, heard.at_ns)  # two clocks: the epoch's is the engine's
        return EngineReport(hello, hello.epoch, end_ns, tuple(_sums(hello, totals)))


class EngineReporters:
    """The readers of all engines that are known. Two threads may meet a new engine at once; it gets one reader."""

    def __init__(self, engines: Callable[[], Sequence[ObservedEngine]], is_delta: bool) -> None:
        self._engines = engines
        self._is_delta = is_delta
        self._lock = threading.Lock()
        self._reporters: dict[LatestSnapshot, EngineReporter] = {}

    def recognise(self) -> None:
        """As `EngineReporter.recognise`, of all. Any thread."""
        for reporter in self._current():
            reporter.recognise()

    def collect(self) -> list[EngineReport]:
        return [report for reporter in self._current() for report in reporter.collect()]

    def exported(self) -> None:
        """What was collected last has arrived."""
        for reporter in self._reporters.values():
            reporter.exported()

    def _current(self) -> list[EngineReporter]:
        engines = self._engines()
        with self._lock:
            self._reporters = {
                engine.latest: self._reporters.get(engine.latest)
                or EngineReporter(engine.latest, engine.is_reporter, self._is_delta)
                for engine in engines
            }
            return list(self._reporters.values())


def _sums(hello: Hello, counters: Counters) -> Iterator[tuple[SumKind, tuple[Point, ...]]]:
    common: dict[str, str | int] = {"gen_ai.response.model": hello.model_name, "engine": hello.engine_id}
    if hello.synthetic:
        common["synthetic_acceptance"] = hello.synthetic
    for kind in SUMS:
        if kind.needs_speculator and hello.max_draft_len == 0:
            continue
        points: list[Point] = []
        for series in kind.series:
            value = getattr(counters, series.field)
            labels = common | dict(series.labels)
            if isinstance(value, list):
                points += [Point(labels | {"position": position}, item) for position, item in enumerate(value)]
            else:
                points.append(Point(labels, value))
        yield kind, tuple(points)
