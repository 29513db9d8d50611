"""The engine's totals as sums for OTLP: which totals, since when, and who reports them.

Owns the table of names, and the rule of the single writer: of all frontends attached to an engine one reports it, and a series goes
on when another takes over. Never sends, never names a library. Called by the export thread of `frontend.otlp_metrics`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from frontend.deltas import Heard, LatestSnapshot
from protocol.codec import decode_counters
from protocol.counters import Counters
from protocol.messages import Hello


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

    `is_reporter` must be true only while this frontend is attached and the engine's load names it: a frontend that has lost
    its engine holds old totals, and while another reports newer ones, exporting them would look like a reset.
    """

    def __init__(
        self, latest: LatestSnapshot, is_reporter: Callable[[], bool], is_delta: bool, now_ns: Callable[[], int]
    ) -> None:
        """`now_ns` is unix time. `is_delta`: increments since the last successful export, else totals of the epoch."""
        self._latest = latest
        self._is_reporter = is_reporter
        self._is_delta = is_delta
        self._now_ns = now_ns
        self._accounted: _Accounted | None = None  # None while another frontend reports
        self._next: _Accounted | None = None

    def collect(self) -> list[EngineReport]:
        """What to export now: the engine's epoch, and before it the rest of an epoch that ended since; often nothing."""
        heard, now_ns = self._latest.heard, self._now_ns()
        self._next = self._accounted
        if heard is None:
            return []
        rest = self._rest_of_ended(heard, now_ns)
        if not self._is_reporter():
            if self._accounted is not None and not self._accounted.is_of(heard):
                self._next = None  # another reports; who has only lost its engine keeps its position
                self._accounted = self._accounted if rest else None
            return rest
        totals = decode_counters(heard.counters)
        before = self._accounted
        if before is None or not before.is_of(heard):
            before = _first(heard, totals, now_ns)
            if not rest:
                self._accounted = before
        self._next = _Accounted(heard.hello.epoch, heard.load.reporter, totals, now_ns)
        return [*rest, self._report(heard.hello, totals, before, now_ns)]

    def exported(self) -> None:
        """What was collected last has arrived."""
        self._accounted = self._next

    def _rest_of_ended(self, heard: Heard, now_ns: int) -> list[EngineReport]:
        """What an epoch came to that ended while this frontend was its reporter.

        Totals only if it was the only frontend: if it was cut off before the engine died, another has reported later ones,
        and an older total behind them would look like a reset.
        """
        ended, before = heard.ended, self._accounted
        if before is None or ended is None:
            return []
        if (before.epoch, before.reporter) != (ended.hello.epoch, ended.load.reporter):
            return []
        if not self._is_delta and ended.load.frontends > 1:
            return []
        return [self._report(ended.hello, decode_counters(ended.counters), before, now_ns)]

    def _report(self, hello: Hello, totals: Counters, before: _Accounted, now_ns: int) -> EngineReport:
        if self._is_delta:
            return EngineReport(hello, before.at_ns, now_ns, tuple(_sums(hello, totals.minus(before.counters))))
        return EngineReport(hello, hello.epoch, now_ns, tuple(_sums(hello, totals)))


def _first(heard: Heard, totals: Counters, now_ns: int) -> _Accounted:
    """Where increments begin: at Hello for whoever has reported since then; else now, for what came before was another's.

    So that increments never add up to more than the totals, those between the other's last export and now are given up.
    """
    hello = heard.hello
    if hello.load.reporter == heard.load.reporter:
        return _Accounted(hello.epoch, heard.load.reporter, decode_counters(hello.counters), hello.wall_ns)
    return _Accounted(hello.epoch, heard.load.reporter, totals, now_ns)


def _sums(hello: Hello, counters: Counters) -> Iterator[tuple[SumKind, tuple[Point, ...]]]:
    common: dict[str, str | int] = {"gen_ai.response.model": hello.model_name, "engine": hello.engine_id}
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
