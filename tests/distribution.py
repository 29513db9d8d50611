"""Which test files run first and which stay together when several workers run them (`make test`).

Owns the order and the neighbourhoods; never decides what is tested: a name that is wrong here costs time, nothing else. Used
by tests/conftest.py, which hands both to pytest, and by tests/unit_scheduling.py.
"""

from collections.abc import Sequence

import pytest

# Files that start the same servers of the case book (tests/cases/conftest.py), with models behind them: one worker starts
# each of those once, where several would each start their own.
SHARING = frozenset(
    f"tests/cases/test_{name}.py"
    for name in (
        "abort", "abort_subsets", "cache", "chat", "client", "files", "http_bodies", "len", "logp", "loss", "metr",
        "metr_fleet", "samp", "seed_bug", "stop", "valid",
    )
)  # fmt: skip
SHARED = "tests/cases with models"
# What takes a quarter of a minute or more, longest first: begun last, it would run alone while the other workers idle.
LONG = (
    SHARED,
    "tests/engine/test_lossless.py",
    "tests/chaos/test_chaos_schedule.py",
    "tests/gpu/test_gpu_check.py",
    "tests/speculation/test_recipe_options.py",
    "tests/speculation/test_worked_example.py",
    "tests/e2e/test_drain_grace.py",
    "tests/e2e/test_fence.py",
    "tests/e2e/test_overload.py",
    "tests/chaos/test_chaos_frozen.py",
    "tests/cases/test_death.py",
    "tests/cases/test_death_crowds.py",
    "tests/e2e/test_security.py",
    "tests/engine/test_model_embedded.py",
    "tests/e2e/test_several_engines.py",
    "tests/cases/test_trace_load.py",
    "tests/e2e/test_report.py",
    "tests/e2e/test_lifecycle.py",
    "tests/deploy/test_kubernetes_probes.py",
)


def unit_of(node_id: str) -> str:
    """What of a test's neighbourhood runs on one worker: its file, or all files that share servers."""
    path = node_id.partition("::")[0]
    return SHARED if path in SHARING else path


def sort_long_first(items: list[pytest.Item]) -> None:
    """Stable, so that a file's tests keep their order."""
    places = {unit: place for place, unit in enumerate(LONG)}
    items.sort(key=lambda item: places.get(unit_of(item.nodeid), len(LONG)))


def names() -> Sequence[str]:
    """Every file that is named here."""
    return [*SHARING, *LONG[1:]]
