"""The file of --alive-file says that the step loop turns, and only that."""

import logging
import os
from pathlib import Path

import pytest

from engine.alive_file import INTERVAL_S, AliveFile, Touching
from engine.core import NoErrands

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 7 * SECOND

    def __call__(self) -> int:
        return self.ns


class Counting(NoErrands):
    def __init__(self) -> None:
        self.runs = 0

    def run(self) -> None:
        self.runs += 1


def age(path: Path) -> None:
    """Make it old, so that the next touch shows."""
    os.utime(path, (1, 1))


def is_fresh(path: Path) -> bool:
    return path.exists() and path.stat().st_mtime > 1


def test_the_first_turn_makes_the_file_and_later_ones_touch_it_in_intervals(tmp_path: Path):
    path, clock = tmp_path / "alive", Clock()
    errands = Touching(AliveFile(str(path)), NoErrands(), clock)
    assert not path.exists()  # not before the loop turns
    errands.run()
    assert path.exists()
    age(path)
    clock.ns += int(INTERVAL_S * SECOND) - 1
    errands.run()
    assert not is_fresh(path)
    clock.ns += 1
    errands.run()
    assert is_fresh(path)


def test_an_idle_loop_is_woken_in_time_and_the_other_errands_keep_theirs(tmp_path: Path):
    clock, inner = Clock(), Counting()
    errands = Touching(AliveFile(str(tmp_path / "alive")), inner, clock)
    errands.run()
    assert inner.runs == 1
    assert errands.deadline_ns == clock.ns + int(INTERVAL_S * SECOND)
    inner.deadline_ns = clock.ns + 3
    assert errands.deadline_ns == clock.ns + 3


def test_what_an_earlier_life_left_does_not_vouch_for_this_one(tmp_path: Path):
    path = tmp_path / "alive"
    path.touch()
    AliveFile(str(path))
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--alive-file .*/none/alive cannot be written: No such file or directory"):
        AliveFile(str(tmp_path / "none" / "alive"))


def test_a_file_that_can_no_longer_be_written_fails_no_step_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    directory = tmp_path / "run"
    directory.mkdir()
    file = AliveFile(str(directory / "alive"))
    directory.rmdir()
    with caplog.at_level(logging.WARNING, logger="engine.alive_file"):
        file.touch()
        file.touch()
        file.remove()
    assert [record.message.split()[0] for record in caplog.records] == ["alive_file_not_written"]
