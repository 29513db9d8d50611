"""Whatever the wire loses, repeats, delays or swaps: an answer is whole and right, or its client is told; totals stay true."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.crowd import assert_everybody_was_told, assert_laws, crowd, gone, quiet_pages, scrape, scripts
from tests.chaos.members import Fleet, fleet_in, wait_until
from tests.chaos.relay import CALM, Faults, relay

SEED = 20261130
FAULTS_WANTED = 8

# name -> (to the frontends, to the engine, whether anybody may notice)
WIRES = {
    "repeated below": (Faults(repeat=0.2), CALM, False),
    "repeated above": (CALM, Faults(repeat=0.05), True),
    "delayed": (Faults(delay_s=0.05), Faults(delay_s=0.05), False),
    "lost below": (Faults(drop=0.03), CALM, True),
    "swapped below": (Faults(swap=0.03), CALM, True),
    "lost above": (CALM, Faults(drop=0.05), True),
    "everything": (Faults(0.005, 0.05, 0.005, 0.03), Faults(0.005, 0.05, 0.0, 0.03), True),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_in(1) as one:
        yield one


@pytest.mark.parametrize("name", WIRES)
def test_a_bad_wire_never_makes_an_answer_short_or_wrong(fleet: Fleet, name: str, tmp_path: Path):
    down, up, may_notice = WIRES[name]
    print(f"seed {SEED}")
    with relay(f"ipc://{tmp_path}/wire.sock", fleet.address, SEED) as wire:
        well, behind = fleet.frontends[0], fleet.join(1, wire.listen)[0]
        before = scrape(well.url, "/metrics/engine")
        rng = random.Random(SEED)
        with crowd(fleet, scripts(rng, leaving=0.2), 12) as asking:
            wire.down, wire.up = down, up
            wait_until(lambda: sum(wire.done.values()) >= FAULTS_WANTED, 20, lambda: f"faults {dict(wire.done)}")
            wait_until(lambda: len(asking.results) >= 100, 30, lambda: f"{len(asking.results)} requests")
            wire.down = wire.up = CALM
            results = asking.finish()
        kinds = assert_everybody_was_told(fleet, results)
        print(dict(wire.done), dict(kinds), gone(results))
        assert kinds["complete"] > 10, kinds
        if not may_notice:
            assert set(kinds) <= {"complete", "left"}, kinds
        assert_laws(before, quiet_pages(fleet)[0], results)
        fleet.drop(behind)
