"""The engines' snapshots as metric families: the engine scope of /metrics, equal on every frontend.

Owns the walk over `frontend.families`. Never counts anything itself. Called by `frontend.metrics` with the newest snapshots.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from frontend.exposition import MetricFamily, Sample, histogram_samples
from frontend.families import CACHE_INFO_LABELS, COUNTER_SERIES, ENGINE_INFO_LABELS, FAMILIES, LOAD_SERIES, Series
from protocol.counters import Counters, Histogram, bounds_of
from protocol.messages import Hello, Load


@dataclass(frozen=True, slots=True)
class EngineView:
    """The newest a frontend knows of an engine. `load` is stale when not `up`."""

    hello: Hello
    counters: Counters
    load: Load
    step_id: int
    up: bool


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine's address. `reason`: why a request cannot go there now; None when it can."""

    engine_id: str | None  # None until an engine was attached there
    address: str
    reason: str | None


def engine_families(views: Iterable[EngineView]) -> list[MetricFamily]:
    """All families of the engine scope, in the table's order, with one series per engine: engines are never added up."""
    found: dict[str, list[Sample]] = {}
    for view in views:
        for name, samples in _engine_samples(view).items():
            if view.hello.max_draft_len > 0 or not FAMILIES[name].needs_speculator:
                found.setdefault(name, []).extend(samples)
    return [
        MetricFamily(name, family.kind, family.help, found[name]) for name, family in FAMILIES.items() if name in found
    ]


def _engine_samples(view: EngineView) -> dict[str, list[Sample]]:
    """By family. Gauges only while the engine is up."""
    common = {"engine": view.hello.engine_id, "model_name": view.hello.model_name}
    found: dict[str, list[Sample]] = {}
    for name, labels, value in _counter_values(view):
        found.setdefault(name, []).extend(_samples(name, {**common, **labels}, value))
    found["drafthouse:engine_up"] = [Sample("drafthouse:engine_up", {"engine": view.hello.engine_id}, int(view.up))]
    epoch_s = view.hello.epoch / 1e9
    found["drafthouse:engine_epoch_start_time_seconds"] = [
        Sample("drafthouse:engine_epoch_start_time_seconds", common, epoch_s)
    ]
    if view.up:
        for sample in _gauges(view, common):
            found.setdefault(sample.name, []).append(sample)
    return found


def _counter_values(
    view: EngineView,
) -> Iterator[tuple[str, dict[str, str], int | tuple[Histogram, tuple[float, ...]]]]:
    phase_clock = "device" if view.hello.device.startswith("cuda") else "host"
    for field, all_series in COUNTER_SERIES.items():
        value = getattr(view.counters, field)
        for series in all_series:
            labels = {name: fixed or phase_clock for name, fixed in series.labels}
            if isinstance(value, Histogram):
                yield series.family, labels, (value, bounds_of(field))
            elif isinstance(value, list):
                for label, item in zip(_spread(series, value, view.hello), value, strict=True):
                    yield series.family, {**labels, series.per or "": label}, item
            else:
                yield series.family, labels, value


def _spread(series: Series, values: list[int], hello: Hello) -> list[str]:
    if series.per == "position":
        return [str(position) for position in range(len(values))]
    return list(hello.sources)


def _samples(name: str, labels: Mapping[str, str], value: int | tuple[Histogram, tuple[float, ...]]) -> list[Sample]:
    if isinstance(value, tuple):
        histogram, bounds = value
        return histogram_samples(name, labels, bounds, histogram.counts, histogram.total)
    return [Sample(f"{name}_total", labels, value)]


def _gauges(view: EngineView, common: Mapping[str, str]) -> Iterator[Sample]:
    hello, load = view.hello, view.load
    for field, all_series in LOAD_SERIES.items():
        for series in all_series:
            yield Sample(series.family, common, int(getattr(load, field)))
    usage = load.blocks_used / load.blocks_total if load.blocks_total else 0.0
    yield Sample("vllm:kv_cache_usage_perc", common, usage)
    yield Sample("drafthouse:engine_step", common, view.step_id)
    info = {label: _label_value(getattr(hello, label)) for label in ENGINE_INFO_LABELS}
    yield Sample("drafthouse:engine_info", {**common, **info}, 1)
    cache = {label: _label_value(getattr(hello.capacity, field)) for field, label in CACHE_INFO_LABELS.items()}
    yield Sample("vllm:cache_config_info", {"engine": hello.engine_id, **cache}, 1)


def _label_value(value: object) -> str:
    """As vLLM prints it (True, 16); a blank becomes an underscore, because metric readers split lines at blanks."""
    return "_".join(str(value).split())
