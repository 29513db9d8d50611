"""Keeping processes alive and ending them in order: restarts, back-off, giving up, hurrying. Fake processes, a fake clock."""

import asyncio
import signal

import pytest

from deploy.supervisor import MAX_BACK_OFF_S, MAX_QUICK_DEATHS, STABLE_S, Program, QuickDeaths, Supervisor


class FakeProcess:
    """Dies when told, or when the test says so. `deaf`: number of SIGTERMs it does not react to."""

    def __init__(self, pid, deaf=0, exit_code=0):
        self.pid, self.deaf, self.exit_code = pid, deaf, exit_code
        self.signals = []
        self._ended = asyncio.get_running_loop().create_future()

    async def wait(self):
        return await asyncio.shield(self._ended)

    def die(self, code):
        if not self._ended.done():
            self._ended.set_result(code)

    def terminate(self):
        self.signals.append("TERM")
        if len(self.signals) > self.deaf:
            self.die(self.exit_code)

    def kill(self):
        self.signals.append("KILL")
        self.die(-signal.SIGKILL)


class Nursery:
    """Programs `engine` (group 1) and `frontend` (group 0) under a supervisor, in a time that the test moves."""

    def __init__(self, stop_timeout_s=600.0):
        self.now_s = 0.0
        self.said = []
        self.slept = []
        self.spawned = {"engine": [], "frontend": []}
        self.refusals = 0
        self.born = {}  # options of processes to come
        programs = [Program("engine", (), {}, 1, stop_timeout_s), Program("frontend", (), {}, 0, stop_timeout_s)]
        self.supervisor = Supervisor(
            programs, self.said.append, spawn=self.spawn, clock=lambda: self.now_s, sleep=self.sleep
        )

    async def spawn(self, program):
        if self.refusals:
            self.refusals -= 1
            raise OSError("no more processes")
        process = FakeProcess(100 + sum(map(len, self.spawned.values())), **self.born)
        self.spawned[program.name].append(process)
        return process

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds

    async def __aenter__(self):
        self.run = asyncio.create_task(self.supervisor.run())
        await self.until(lambda: all(self.spawned.values()) or self.run.done())
        return self

    async def __aexit__(self, *_):
        if not self.run.done():
            self.supervisor.signalled(signal.SIGTERM)
            await self.run

    async def until(self, holds):
        for _ in range(1000):
            if holds():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"it did not come true: {self.said}")

    async def die(self, name, code, after_s=0.0):
        """The newest process of that name dies, having lived so long."""
        count = len(self.spawned[name])
        self.now_s += after_s
        self.spawned[name][-1].die(code)
        await self.until(lambda: len(self.spawned[name]) > count or self.run.done())


async def test_what_dies_is_started_again_and_the_reason_is_said():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        await nursery.die("engine", -signal.SIGKILL)
        assert len(nursery.spawned["engine"]) == 2
        assert nursery.said == ["engine ended with signal SIGKILL; starting it again in 0.2 s (quick death 1 of 6)"]
        assert nursery.supervisor.status() == "engine (pid 102, restarted 1x), frontend (pid 101)"
        await asyncio.wait_for(nursery.supervisor.restarted(), 1)
        assert nursery.spawned["frontend"][0].signals == []


async def test_the_wait_doubles_with_every_quick_death_up_to_the_limit_of_deaths():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        for _ in range(MAX_QUICK_DEATHS):
            await nursery.die("engine", 1, after_s=STABLE_S - 1)
        assert nursery.slept == [0.2, 0.4, 0.8, 1.6, 3.2]
        assert await nursery.run == 1
    assert len(nursery.spawned["engine"]) == MAX_QUICK_DEATHS
    assert nursery.said[-1] == (
        "engine died 6 times in a row within 60 s of its start, at last with exit code 1; stopping everything"
    )
    assert nursery.spawned["frontend"][0].signals == ["TERM"], "the others are not left behind"


async def test_a_stable_life_forgives_the_deaths_before_it():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        for _ in range(3):
            for _ in range(MAX_QUICK_DEATHS - 1):
                await nursery.die("engine", 1)
            await nursery.die("engine", 1, after_s=STABLE_S)
        assert not nursery.run.done()
        assert nursery.slept[5] == nursery.slept[11] == 0.2, "the wait begins anew, too"


async def test_every_program_has_its_own_count():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        for _ in range(MAX_QUICK_DEATHS - 1):
            await nursery.die("engine", 1)
            await nursery.die("frontend", 1)
        assert not nursery.run.done()


def test_the_wait_has_a_limit(monkeypatch):
    monkeypatch.setattr("deploy.supervisor.MAX_QUICK_DEATHS", 100)
    deaths = QuickDeaths()
    waits = [deaths.after(0.0) for _ in range(12)]
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert set(waits[6:]) == {MAX_BACK_OFF_S}


async def test_a_process_that_cannot_be_started_counts_as_dead_and_is_tried_again():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        nursery.refusals = 2
        await nursery.die("engine", 1)
        assert nursery.slept == [0.2, 0.4, 0.8]
        assert nursery.said.count("engine could not be started: no more processes") == 2


async def test_nothing_that_dies_before_all_is_up_is_started_again():
    async with Nursery() as nursery:
        await nursery.die("frontend", 1)
        assert await nursery.run == 1
    assert nursery.said == ["frontend ended with exit code 1 before everything was up; stopping everything"]
    assert nursery.spawned["engine"][0].signals == ["TERM"]


async def test_a_first_process_that_cannot_be_started_is_a_failure():
    nursery = Nursery()
    nursery.refusals = 1
    assert await nursery.supervisor.run() == 1
    assert nursery.said == ["engine could not be started: no more processes"]


@pytest.mark.parametrize("was_up", [False, True])
async def test_options_that_cannot_be_used_end_everything_with_their_code(was_up):
    async with Nursery() as nursery:
        if was_up:
            nursery.supervisor.is_up()
        await nursery.die("engine", 2)
        assert await nursery.run == 2


async def test_a_code_of_a_childs_own_is_not_passed_on():
    """0, 1 and 2 mean something here; 134 or 77 would not."""
    async with Nursery() as nursery:
        await nursery.die("engine", 77)
        assert await nursery.run == 1


# ---- stopping ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stopping_tells_one_group_after_the_other_and_is_a_success(number):
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        [frontend], [engine] = nursery.spawned["frontend"], nursery.spawned["engine"]
        frontend.deaf = 1
        nursery.supervisor.signalled(number)
        await nursery.until(lambda: frontend.signals)
        assert engine.signals == [], "it serves the frontend that drains"
        frontend.die(0)
        assert await nursery.run == 0
        assert engine.signals == ["TERM"]
    assert nursery.said[0].startswith(f"{number.name} received, stopping in order")
    assert "engine (pid 100), frontend (pid 101)" in nursery.said[0]


async def test_a_second_signal_tells_everyone_again_so_that_clients_still_hear_of_it():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        [frontend] = nursery.spawned["frontend"]
        frontend.deaf = 1
        nursery.supervisor.signalled(signal.SIGTERM)
        await nursery.until(lambda: frontend.signals)
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 0
        assert frontend.signals == ["TERM", "TERM"]
    assert "killing" not in " ".join(nursery.said)


async def test_a_third_signal_kills():
    async with Nursery() as nursery:
        [frontend] = nursery.spawned["frontend"]
        frontend.deaf = 99
        for count in (1, 2):
            nursery.supervisor.signalled(signal.SIGTERM)
            await nursery.until(lambda count=count: len(frontend.signals) == count)
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 0, "that is what was asked for"
        assert frontend.signals == ["TERM", "TERM", "KILL"]


async def test_a_process_that_does_not_end_in_time_is_killed_and_that_is_a_failure():
    async with Nursery(stop_timeout_s=0.01) as nursery:
        [frontend] = nursery.spawned["frontend"]
        frontend.deaf = 99
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 1
        assert frontend.signals == ["TERM", "KILL"]
    assert "frontend did not end in time; killing it" in nursery.said


async def test_a_process_that_fails_while_it_stops_makes_the_whole_a_failure():
    async with Nursery() as nursery:
        nursery.spawned["engine"][0].exit_code = 1
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 1
    assert "engine ended with exit code 1" in nursery.said


async def test_a_process_that_was_told_before_it_could_listen_is_no_failure():
    async with Nursery() as nursery:
        nursery.spawned["frontend"][0].exit_code = -signal.SIGTERM
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 0


async def test_an_engine_that_crashes_while_frontends_drain_is_said_and_is_a_failure():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        [frontend], [engine] = nursery.spawned["frontend"], nursery.spawned["engine"]
        frontend.deaf = 1
        nursery.supervisor.signalled(signal.SIGTERM)
        await nursery.until(lambda: frontend.signals)
        engine.die(-signal.SIGSEGV)
        frontend.die(0)
        assert await nursery.run == 1
    assert "engine ended with signal SIGSEGV" in nursery.said
    assert len(nursery.spawned["engine"]) == 1


async def test_a_stop_during_a_wait_for_a_restart_starts_nothing_more():
    nursery = Nursery()
    never = asyncio.Event()

    async def endless(seconds):
        nursery.slept.append(seconds)
        await never.wait()

    nursery.supervisor._sleep = endless
    async with nursery:
        nursery.supervisor.is_up()
        nursery.spawned["engine"][0].die(1)
        await nursery.until(lambda: nursery.slept)
        assert "engine (down)" in nursery.supervisor.status()
        nursery.supervisor.signalled(signal.SIGTERM)
        assert await nursery.run == 0
    assert len(nursery.spawned["engine"]) == 1


async def test_a_signal_without_a_name_is_named_by_its_number():
    async with Nursery() as nursery:
        nursery.supervisor.is_up()
        await nursery.die("engine", -40)
    assert nursery.said[0].startswith("engine ended with signal 40;")
