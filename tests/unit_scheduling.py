"""pytest-xdist's `--dist loadfile` with the units and the order of tests/distribution.py. Called by tests/conftest.py."""

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.distribution import unit_of


class UnitScheduling(LoadFileScheduling):
    """Hands out whole units, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False  # by their number of tests, the files with few long ones would come last
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
