"""`make soak`: a fleet under load and harm for some minutes, and a report of what was lost (nothing) and what grew.

Storms and calms take turns. In a storm clients leave, processes die and freeze, and a wire loses messages; afterwards nothing
may be left behind and the laws of counting must hold. In a calm every answer must be whole, and the sums over the answers must
equal the engine's totals to the token, through whichever frontend they are read. Exit code 1 when a law breaks.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.crowd import Result, assert_everybody_was_told, assert_laws, crowd, quiet_pages, scripts
from tests.chaos.members import Fleet, fleet_in
from tests.chaos.relay import CALM, Faults, Relay, relay
from tests.chaos.schedule import Schedule
from tests.soak.memory import Memory

STORM_S, CALM_S = 25.0, 8.0
BAD_WIRE = Faults(drop=0.0005, repeat=0.001, swap=0.0005, delay_s=0.01)
WIDTH = 24
# Soon full: an index of cached prefixes that still fills looks like a leak (0.9 KB per request with a large cache, 0 without).
KV_CACHE_TOKENS = 32_768
MAX_GROWTH_MB = 64.0  # of one process behind its warm-up
ENGINE_MAY_DIE_UNTIL = 0.3  # of the time; later its memory is watched


@dataclass
class Tally:
    """What the report says."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_storms: int = 0
    num_calms: int = 0
    lost: int = 0
    wrong_totals: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=None, help="of requests and harm; default: a new one, printed")
    parser.add_argument(
        "--frontends", type=int, default=3, help="frontends that share the engine (default 3, at least 2)"
    )
    options = parser.parse_args()
    if options.frontends < 2 or not 0 < options.minutes <= 24 * 60:
        parser.error("at least 2 frontends, and between 0 and 1440 minutes")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(
        f"soak: {options.minutes:g} minutes, {options.frontends} frontends and one behind a bad wire, seed {seed}",
        flush=True,
    )
    tally, memory = Tally(), Memory()
    try:
        with fleet_in(options.frontends, "--kv-cache-tokens", str(KV_CACHE_TOKENS), "--max-model-len", "8192") as fleet:
            soak(fleet, seed, options.minutes * 60, tally, memory)
    except Exception:  # noqa: BLE001  # whatever ends a soak is a line of its report
        tally.problems.append(traceback.format_exc())
    finally:
        memory.stop()
    report(tally, memory)
    return 1 if tally.problems else 0


def soak(fleet: Fleet, seed: int, seconds: float, tally: Tally, memory: Memory) -> None:
    """Until the time is up or a law breaks. Problems are noted in `tally`."""
    address = f"ipc://{fleet.directory}/wire.sock"
    with relay(address, fleet.address, seed) as wire:
        spared = frozenset((fleet.frontends[0], *fleet.join(1, address)))
        schedule = Schedule(fleet, seed, spared)
        memory.start(lambda: [fleet.engine, *fleet.frontends])
        started, rng = time.monotonic(), random.Random(seed)
        totals = quiet_pages(fleet)[0]
        while (passed := time.monotonic() - started) < seconds and not tally.problems:
            kills_engine = tally.num_storms % 3 == 2 and passed < seconds * ENGINE_MAY_DIE_UNTIL
            totals = storm(fleet, wire, schedule, rng, kills_engine, totals, tally)
            if not tally.problems:
                totals = calm(fleet, rng, totals, tally)
            say(started, tally)
        tally.faults.update(schedule.done + wire.done)


def storm(
    fleet: Fleet, wire: Relay, schedule: Schedule, rng: random.Random, kills_engine: bool,
    before: dict[str, float], tally: Tally,
) -> dict[str, float]:  # fmt: skip
    """Load and harm; then nothing may be left behind. Returns the totals after it."""
    with crowd(fleet, scripts(rng, leaving=0.25), WIDTH) as asking:
        wire.up = wire.down = BAD_WIRE
        until = time.monotonic() + STORM_S
        while time.monotonic() < until:
            schedule.harm()
            time.sleep(0.5)
        if kills_engine:
            schedule.kill_engine()
        wire.up = wire.down = CALM
        results = asking.finish()
    tally.num_storms += 1
    judge(fleet, results, tally)
    try:
        after = quiet_pages(fleet, within_s=20.0)[0]
        # A new engine has counted only what came after its predecessor's death; of that the clients' sums say little.
        assert_laws({} if kills_engine else before, after, None if kills_engine else results)
    except AssertionError as broken:
        tally.wrong_totals += 1
        tally.problems.append(f"after storm {tally.num_storms}: {broken}")
        return before
    return after


def calm(fleet: Fleet, rng: random.Random, before: dict[str, float], tally: Tally) -> dict[str, float]:
    """Load and no harm: every answer whole, every total exact."""
    with crowd(fleet, scripts(rng), WIDTH) as asking:
        time.sleep(CALM_S)
        results = asking.finish()
    tally.num_calms += 1
    judge(fleet, results, tally)
    incomplete = [one for one in results if one.kind != "complete"]
    if incomplete:
        tally.problems.append(f"in calm {tally.num_calms}: {incomplete[:3]}")
    try:
        after = quiet_pages(fleet)[0]
        assert_laws(before, after, results)
    except AssertionError as broken:
        tally.wrong_totals += 1
        tally.problems.append(f"after calm {tally.num_calms}: {broken}")
        return before
    return after


def judge(fleet: Fleet, results: list[Result], tally: Tally) -> None:
    """Count how requests ended; a wrong or forgotten one is a problem."""
    tally.kinds.update(one.kind for one in results)
    try:
        assert_everybody_was_told(fleet, results)
    except AssertionError as lost:
        tally.lost += sum(one.kind == "wrong" for one in results) or 1
        tally.problems.append(f"lost: {lost}")


def say(started: float, tally: Tally) -> None:
    minutes = (time.monotonic() - started) / 60
    print(f"  {minutes:5.1f} min  {sum(tally.kinds.values()):7d} requests  {len(tally.problems)} problems", flush=True)


def report(tally: Tally, memory: Memory) -> None:
    for series in memory.series():
        if series.growth_mb > MAX_GROWTH_MB:
            tally.problems.append(f"{series.name} grew by {series.growth_mb:.1f} MB")
    print("\nrequests")
    for kind, count in sorted(tally.kinds.items(), key=lambda item: -item[1]):
        print(f"  {kind:28s} {count:8d}  {_MEANINGS[kind]}")
    print("faults injected")
    for fault, count in sorted(tally.faults.items()):
        print(f"  {fault:28s} {count:8d}")
    print(f"lost                           {tally.lost:8d}")
    print(f"wrong totals                   {tally.wrong_totals:8d}  checked after {tally.num_storms} storms, "
          f"{tally.num_calms} calms (exact)")  # fmt: skip
    print("resident memory (slope: least squares over samples every 1 s, without the first 20 s of each process)")
    for series in memory.series():
        print(
            f"  {series.name:28s} {series.last_mb:8.1f} MB  {series.slope_mb_per_h:+8.1f} MB/h over "
            f"{series.seconds:.0f} s, growth {series.growth_mb:+.1f} MB"
        )
    for problem in tally.problems:
        print(f"PROBLEM: {problem}")
    print("result: " + (f"{len(tally.problems)} problems" if tally.problems else "every law held"))


_MEANINGS = {
    "complete": "every token as known in advance",
    "told": "ended by an error event",
    "refused": "answered 503",
    "left": "the client went away",
    "broken": "cut off because its frontend was ended",
    "wrong": "wrong, short, or never answered",
}

if __name__ == "__main__":
    sys.exit(main())
