"""What all tests share: OpenMP threads that sleep while they wait, as in the engine (see engine/assembly.py), and who runs what."""

import os
from typing import Any

import pytest

from tests.distribution import sort_long_first

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is first imported


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_long_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """None where another distribution than by file was asked for."""
    from tests.unit_scheduling import UnitScheduling  # whoever asks has pytest-xdist; make oracles has not

    return UnitScheduling(config, log) if config.option.dist == "loadfile" else None
