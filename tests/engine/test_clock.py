"""Phases are measured from the start of the step, and those that did not run say so."""

from collections.abc import Iterator

import pytest

from engine.clock import HostClock
from protocol.messages import Phase


def fake_time(*times_ns: int) -> HostClock:
    ticks: Iterator[int] = iter(times_ns)
    return HostClock(lambda: next(ticks))


def test_phases_are_relative_to_the_start_and_the_rest_is_zero():
    clock = fake_time(1000, 1010, 1030, 1040, 1100)
    clock.start()
    with clock.phase(Phase.DRAFT):
        pass
    with clock.phase(Phase.ACCEPT):
        pass
    assert clock.read().spans == ((0, 0), (10, 30), (0, 0), (40, 100))
    assert clock.read().on_device is False


def test_start_forgets_the_last_step():
    clock = fake_time(0, 1, 2, 50)
    clock.start()
    with clock.phase(Phase.VERIFY):
        pass
    clock.start()
    assert clock.read().spans == ((0, 0),) * 4


def test_a_phase_that_raises_is_measured_and_its_error_passes():
    clock = fake_time(0, 5, 9)
    clock.start()
    with pytest.raises(RuntimeError, match="boom"), clock.phase(Phase.VERIFY):
        raise RuntimeError("boom")
    assert clock.read().spans[Phase.VERIFY] == (5, 9)


def test_a_phase_entered_twice_spans_both_and_an_instant_one_still_ran():
    clock = fake_time(0, 5, 9, 20, 30, 40, 40)
    clock.start()
    for phase in (Phase.ACCEPT, Phase.ACCEPT, Phase.DRAFT):
        with clock.phase(phase):
            pass
    assert clock.read().spans[Phase.ACCEPT] == (5, 30)
    assert clock.read().spans[Phase.DRAFT] == (40, 41)
