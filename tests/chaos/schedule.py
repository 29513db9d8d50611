"""Harm in a seeded order: who is killed, frozen, sent away or joins, one after another, for as long as asked.

Knows fleets, not requests. Used by the chaos tests and by the soak.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.members import Fleet, Member, wait_until

MAX_FREEZE_S = 2.0  # short of what makes an engine give a frontend up
LONG_FREEZE_S = 6.5  # beyond it


class Schedule:
    """`harm` does one thing to a fleet and waits until what it needs is there again. `done` counts what was done."""

    def __init__(self, fleet: Fleet, seed: int, spared: frozenset[Member] = frozenset()) -> None:
        """`spared` may freeze, and nothing worse."""
        self._spared = spared
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._rng = random.Random(seed)
        self.kinds: dict[str, Callable[[], None]] = {
            "frontend killed": self._kill_frontend,
            "frontend frozen": self._freeze_frontend,
            "frontend left": self._leave,
            "frontend joined and left": self._visit,
            "engine frozen": self._freeze_engine,
        }

    def harm(self, *kinds: str) -> str:
        """One of `kinds`, or of all but the engine's death; returns which."""
        kind = self._rng.choice(kinds or tuple(self.kinds))
        self.kinds[kind]()
        self.done[kind] += 1
        return kind

    def kill_engine(self) -> None:
        """kill -9 and a new one: a new epoch, in which every frontend is attached again."""
        fleet = self._fleet
        known = {member: member.log().count(" attached engine=") for member in fleet.frontends}
        fleet.restart_engine()
        for member, times in known.items():
            wait_until(lambda m=member, t=times: m.log().count(" attached engine=") > t, 40, member.log)
        self.done["engine killed"] += 1

    def _one(self) -> Member:
        return self._rng.choice(self._fleet.able())

    def _mortal(self) -> Member:
        return self._rng.choice([member for member in self._fleet.able() if member not in self._spared])

    def _kill_frontend(self) -> None:
        self._fleet.drop(self._mortal())
        self._fleet.join()

    def _leave(self) -> None:
        """SIGTERM while others ask elsewhere; what it was asked is answered first."""
        member = self._mortal()
        joined = self._fleet.start_frontend()
        self._fleet.wait_attached(joined)
        self._fleet.frontends.remove(member)
        assert member.leave() == 0, member.log()[-2000:]

    def _visit(self) -> None:
        joined = self._fleet.join()[0]
        time.sleep(self._rng.uniform(0.2, 0.6))
        self._fleet.frontends.remove(joined)
        assert joined.leave() == 0, joined.log()[-2000:]

    def _freeze_frontend(self) -> None:
        self._freeze(self._one(), self._rng.uniform(0.2, MAX_FREEZE_S))

    def _freeze_engine(self) -> None:
        self._freeze(self._fleet.engine, self._rng.uniform(0.2, MAX_FREEZE_S))

    def _freeze(self, member: Member, seconds: float) -> None:
        member.freeze()
        time.sleep(seconds)
        member.thaw()
