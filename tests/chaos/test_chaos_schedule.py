"""Processes killed, frozen, leaving and joining in a seeded order, under load: nobody is forgotten and nothing is left behind."""

import random
import time

from tests.cases.client import total
from tests.chaos.crowd import assert_everybody_was_told, assert_laws, crowd, quiet_pages, scrape, scripts
from tests.chaos.members import Fleet, Member, fleet_in, wait_until
from tests.chaos.schedule import Schedule

SEED = 20261130
MAX_GROWTH_BYTES = 40 << 20  # of one process over a test; measured: see the soak's report for the slope


def resident(fleet: Fleet) -> dict[Member, int]:
    return {member: member.rss_bytes() for member in (fleet.engine, *fleet.frontends)}


def assert_flat(before: dict[Member, int], fleet: Fleet) -> None:
    """Of every process that lived through all of it."""
    grown = {m.role: now - before[m] for m, now in resident(fleet).items() if m in before}
    assert all(growth < MAX_GROWTH_BYTES for growth in grown.values()), grown


def warm_up(fleet: Fleet, count: int = 200) -> None:
    with crowd(fleet, scripts(random.Random(SEED + 1)), 32, count=count) as asking:
        results = asking.join()
    assert {one.kind for one in results} == {"complete"}


def test_frontends_may_die_freeze_leave_and_join_at_any_time():
    print(f"seed {SEED}")
    with fleet_in(3) as fleet:
        warm_up(fleet)
        before, memory = quiet_pages(fleet)[0], resident(fleet)
        schedule = Schedule(fleet, SEED)
        with crowd(fleet, scripts(random.Random(SEED), leaving=0.3), 24) as asking:
            for kind in random.Random(SEED).sample(list(schedule.kinds), len(schedule.kinds)):
                schedule.harm(kind)
                seen = len(asking.results)
                wait_until(lambda s=seen: len(asking.results) > s + 20, 20, "requests are answered between two harms")
            results = asking.finish()
        kinds = assert_everybody_was_told(fleet, results)
        print(dict(schedule.done), dict(kinds))
        assert kinds["complete"] > 100
        after = quiet_pages(fleet)[0]
        assert_laws(before, after, results)
        assert after.keys() == before.keys(), "no series is left of a frontend that came and went"
        assert_flat(memory, fleet)


def test_a_killed_engine_costs_an_error_and_its_successor_counts_from_zero():
    with fleet_in(2) as fleet:
        warm_up(fleet)
        with crowd(fleet, scripts(random.Random(SEED), leaving=0.3), 16) as asking:
            wait_until(lambda: len(asking.results) > 50, 20, "requests are answered")
            Schedule(fleet, SEED).kill_engine()
            results = asking.finish()
        kinds = assert_everybody_was_told(fleet, results)
        assert kinds["told"] + kinds["refused"] > 0, kinds
        quiet = quiet_pages(fleet)
        epoch = total(quiet[0], "drafthouse:engine_epoch_start_time_seconds")
        assert epoch > time.time() - 120
        assert_laws({}, quiet[0], [one for one in results if one.started > fleet.engine.started])
        before = quiet[0]
        with crowd(fleet, scripts(random.Random(SEED + 2)), 16, count=60) as again:
            assert {one.kind for one in again.join()} == {"complete"}
        assert_laws(before, quiet_pages(fleet)[0], again.results)


def test_500_clients_of_whom_half_disconnect_leave_nothing_behind():
    print(f"seed {SEED}")
    with fleet_in(3) as fleet:
        warm_up(fleet, count=300)
        before, memory = quiet_pages(fleet)[0], resident(fleet)
        rng = random.Random(SEED)
        with crowd(fleet, scripts(rng, leaving=0.65, step_ms=1.0), 500, count=500) as asking:
            results = asking.join()
        kinds = assert_everybody_was_told(fleet, results)
        print(dict(kinds))
        assert len(results) == 500
        assert kinds["left"] >= 200, "about half: who wants to leave late may have its whole answer first"
        assert kinds["left"] + kinds["complete"] == 500, kinds
        assert_laws(before, quiet_pages(fleet)[0], results)
        assert_flat(memory, fleet)
        assert "Traceback" not in "".join(member.log() for member in fleet.everybody)
        scraped = scrape(fleet.frontends[0].url)
        assert total(scraped, "drafthouse:fence_timeouts_total") == 0


def test_one_of_two_engines_may_die_under_load_and_come_back():
    """What nobody has seen goes on at the other engine, streams that had begun are told; and then both count to the token."""
    print(f"seed {SEED}")
    with fleet_in(2, num_engines=2) as fleet:
        warm_up(fleet)
        with crowd(fleet, scripts(random.Random(SEED), leaving=0.2), 16) as asking:
            wait_until(lambda: len(asking.results) > 50, 20, "requests are answered")
            Schedule(fleet, SEED).kill_engine()
            results = asking.finish()
        kinds = assert_everybody_was_told(fleet, results)
        print(dict(kinds))
        assert kinds["complete"] > 50
        assert kinds["refused"] == 0, "the other engine took what was asked meanwhile, and what was not streamed"
        before = quiet_pages(fleet)[0]
        with crowd(fleet, scripts(random.Random(SEED + 2)), 16, count=100) as again:
            assert {one.kind for one in again.join()} == {"complete"}
        after = quiet_pages(fleet)[0]
        assert_laws(before, after, again.results)
        prompts = [
            series for series, value in after.items() if series.startswith("vllm:prompt_tokens_total") and value > 0
        ]
        assert len(prompts) == 2, "both engines worked"
