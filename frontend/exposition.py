"""Metric families as text in Prometheus' classic format.

Owns the spelling that bench clients depend on (reference 2.3): no blank inside braces, one blank before the value, integers in
full, no time stamps, no `_created`. Never decides what is exported. Called by `frontend.metrics`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

CLASSIC_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Exemplar(NamedTuple):
    """One observation behind a sample. Only OpenMetrics can show it; the classic format has no place for it."""

    labels: Mapping[str, str]
    value: float
    timestamp_s: float | None  # unix time


@dataclass(frozen=True, slots=True)
class Sample:
    name: str  # as exposed, with _total, _bucket, _sum or _count
    labels: Mapping[str, str]
    value: float
    exemplar: Exemplar | None = None


@dataclass(frozen=True, slots=True)
class MetricFamily:
    name: str  # without _total
    kind: str  # counter, gauge or histogram
    help: str
    samples: list[Sample] = field(default_factory=list)


def classic_text(families: Iterable[MetricFamily]) -> bytes:
    """The families in order; samples of one family stay together."""
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {family.help.translate(_HELP_ESCAPES)}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines.extend(f"{sample.name}{_labels(sample.labels)} {number(sample.value)}" for sample in family.samples)
    return ("\n".join(lines) + "\n").encode() if lines else b""


def number(value: float) -> str:
    """Integers in full (a rounded total destroys differences), other numbers as their shortest exact form."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)


def histogram_samples(
    name: str, labels: Mapping[str, str], bounds: Iterable[float], counts: Iterable[int], total: float
) -> list[Sample]:
    """Samples of one histogram from counts per bucket (not cumulative, the last one +Inf)."""
    samples: list[Sample] = []
    running = 0
    for bound, count in zip([*bounds, math.inf], counts, strict=True):
        running += count
        samples.append(Sample(f"{name}_bucket", {**labels, "le": bucket_bound(bound)}, running))
    samples.append(Sample(f"{name}_sum", labels, total))
    samples.append(Sample(f"{name}_count", labels, running))
    return samples


def bucket_bound(bound: float) -> str:
    """The value of `le`, written as prometheus_client writes it, so that both scopes look alike."""
    return "+Inf" if math.isinf(bound) else repr(float(bound))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    ordered = sorted(labels.items(), key=lambda item: (_rank(item[0]), item[0]))
    return "{" + ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in ordered) + "}"


def _rank(label: str) -> int:
    return {"engine": 0, "model_name": 1, "le": 3}.get(label, 2)
