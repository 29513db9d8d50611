"""A frontend that stops reading costs its own clients their answers, and nobody else anything."""

import random
import time
from pathlib import Path

import pytest

from tests.cases.client import total
from tests.chaos.crowd import (
    Script,
    assert_everybody_was_told,
    assert_laws,
    crowd,
    gone,
    quiet_pages,
    scrape,
    scripts,
)
from tests.chaos.members import Fleet, Member, fleet_in, wait_until
from tests.chaos.relay import relay
from tests.timing import at_most_s

LONG = 2000  # rounds: longer than any test
SEED = 20261130
GAP_S = 1.5  # longest silence a bystander may see on a loaded machine; measured 0.05 s on an idle one


def endless(step_ms: float = 10.0):
    """Requests that never end by themselves."""
    while True:
        yield Script(runs=((582, 827),) * LONG, step_ms=step_ms, streamed=True, leaves_after=None)


def short(seed: int):
    return scripts(random.Random(seed), longest=60, step_ms=10.0)


def running(member: Member, name: str = "vllm:num_requests_running") -> float:
    return total(scrape(member.url, "/metrics/engine"), name)


def when_running(member: Member, count: int) -> None:
    wait_until(lambda: running(member) >= count, 20, lambda: f"{count} requests run, not {running(member)}")


def test_a_frozen_frontend_loses_its_requests_in_time_and_its_neighbours_notice_nothing():
    with fleet_in(2) as fleet:
        frozen, well = fleet.frontends
        before = scrape(well.url, "/metrics/engine")
        with crowd(fleet, endless(), 6, count=6, urls=[frozen.url]) as losing:
            when_running(well, 6)
            with crowd(fleet, short(SEED), 4, urls=[well.url]) as winning:
                when_running(well, 8)
                frozen.freeze()
                took_s = wait_until(
                    lambda: running(well) <= 4 and total(scrape(well.url), "drafthouse:frontends_attached") == 1,
                    5.0,  # what is promised
                    lambda: f"{running(well)} requests still run",
                )
                print(f"aborted {took_s:.2f} s after SIGSTOP")
                frozen.thaw()
                lost = losing.join()
            won = winning.finish()
        assert_cut_off_with_a_reason_on_both_sides(fleet, frozen)
        assert {one.kind for one in lost} == {"told"}
        assert all("the engine at" in reason or "too" in reason for reason in gone(lost)), gone(lost)
        assert {one.kind for one in won} == {"complete"}
        assert len(won) > 10
        at_most_s(max(one.longest_gap_s for one in won), GAP_S, "the longest gap of a bystander")
        after = quiet_pages(fleet)[0]  # the frozen one is attached again: both agree
        assert total(after, "drafthouse:frontends_cut_off_total") == 1
        assert_laws(before, after, lost + won)


def assert_cut_off_with_a_reason_on_both_sides(fleet: Fleet, member: Member) -> None:
    def said() -> bool:
        return "frontend gone" in fleet.engine.log() and "engine lost" in member.log()

    wait_until(said, 10, lambda: fleet.engine.log()[-1000:] + member.log()[-1000:])
    reasons = ("read too slowly", "no sign of life")
    assert any(reason in fleet.engine.log() for reason in reasons), fleet.engine.log()[-1000:]


def test_a_frontend_that_reads_too_slowly_is_paused_then_cut_off_and_told_why(tmp_path: Path):
    with fleet_in(1) as fleet, relay(f"ipc://{tmp_path}/slow.sock", fleet.address, SEED) as wire:
        well, slow = fleet.frontends[0], fleet.join(1, wire.listen)[0]
        before = scrape(well.url, "/metrics/engine")
        with crowd(fleet, endless(), 3, count=3, urls=[slow.url]) as losing:
            when_running(well, 3)
            with crowd(fleet, short(SEED + 1), 4, urls=[well.url]) as winning:
                wire.trickle_s = 0.4  # it hears the engine, so it does not give it up; it falls behind all the same
                wait_until(lambda: running(well, "drafthouse:paused_rows") == 3, 5, "its rows are held back")
                wait_until(lambda: running(well, "drafthouse:frontends_attached") == 1, 15, "it is cut off")
                wire.trickle_s = 0.0
                lost = losing.join()
            won = winning.finish()
        assert {one.kind for one in lost} == {"told"}
        assert all("read too slowly" in reason for reason in gone(lost)), gone(lost)
        assert "read too slowly" in fleet.engine.log()
        assert "read too slowly" in slow.log()
        assert {one.kind for one in won} == {"complete"}
        at_most_s(max(one.longest_gap_s for one in won), GAP_S, "the longest gap of a bystander")
        assert_laws(before, quiet_pages(fleet)[0], lost + won)


@pytest.mark.parametrize("seconds", [1.0, 4.5])
def test_an_engine_that_freezes_is_waited_for_or_given_up_and_used_again(seconds: float):
    """Below ENGINE_SILENT_S nobody loses anything; beyond it everybody is told, and the totals go on where they were."""
    with fleet_in(2) as fleet:
        before = scrape(fleet.frontends[0].url, "/metrics/engine")
        with crowd(fleet, short(SEED + 2), 8) as asking:
            wait_until(lambda: len(asking.results) > 8, 20, "requests are answered")
            fleet.engine.freeze()
            time.sleep(seconds)
            fleet.engine.thaw()
            thawed, seen = time.monotonic(), len(asking.results)
            wait_until(lambda: _completed(asking.results[seen:], thawed), 20, "it is used again")
            results = asking.finish()
        kinds = assert_everybody_was_told(fleet, results)
        assert bool(kinds["told"]) is (seconds > 3), kinds
        after = quiet_pages(fleet)[0]
        assert_laws(before, after, results)
        assert total(after, "drafthouse:engine_epoch_start_time_seconds") == total(
            before, "drafthouse:engine_epoch_start_time_seconds"
        )


def _completed(results: list, since: float) -> bool:
    return sum(one.kind == "complete" and one.started > since for one in results) > 8
