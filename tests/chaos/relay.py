"""A wire that loses, repeats, delays and swaps messages: a relay between frontends and an engine, driven by a seed.

Speaks ZeroMQ frames only and never reads them. Towards the engine each frontend keeps its own DEALER under its own
identity, so that the engine cannot tell the relay from the frontends.
"""

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

IDLE_S = 4.0  # a frontend pings every second; one that is gone takes its connection to the engine along


@dataclass(frozen=True)
class Faults:
    """Chances per message, 0 to 1, and delays in seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    swap: float = 0.0
    delay_s: float = 0.0  # at most; order is kept


CALM = Faults()


class Relay:
    """Start and stop by `relay`. `up` (to the engine) and `down` (to frontends) may be replaced at any time."""

    def __init__(self, listen: str, engine: str, seed: int) -> None:
        self.listen, self.up, self.down = listen, CALM, CALM
        self.trickle_s = 0.0  # when set: one message down per so many seconds, the rest waits
        self.done: Counter[str] = Counter()  # faults injected, by name
        self.is_over = threading.Event()
        self._engine = engine
        self._rng = random.Random(seed)
        self._links: dict[bytes, zmq.Socket[bytes]] = {}
        self._heard: dict[bytes, float] = {}
        self._held: list[tuple[float, int, bool, bytes, bytes]] = []  # due, number, goes up, identity, payload
        self._last_due: dict[tuple[bool, bytes], float] = {}
        self._numbers = itertools.count()
        self._trickled = 0.0
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_over.set()
        self._thread.join(10)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        context = zmq.Context()
        try:
            front = context.socket(zmq.ROUTER)
            front.bind(self.listen)
            while not self.is_over.is_set():
                self._turn(context, front)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self._failure = error
        finally:
            context.destroy(linger=0)

    def _turn(self, context: "zmq.Context[zmq.Socket[bytes]]", front: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        for source in (front, *self._links.values()):
            poller.register(source, zmq.POLLIN)
        poller.poll(2 if self._held else 20)
        while front.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            identity, payload = front.recv_multipart(zmq.NOBLOCK)
            self._heard[identity] = time.monotonic()
            if identity not in self._links:
                self._links[identity] = self._link(context, identity)
            self._take(self.up, True, identity, payload)
        for identity, link in self._links.items():
            while link.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._take(self.down, False, identity, link.recv(zmq.NOBLOCK))
        self._deliver(front)
        self._unlink()

    def _link(self, context: "zmq.Context[zmq.Socket[bytes]]", identity: bytes) -> "zmq.Socket[bytes]":
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.IDENTITY, identity)
        link.connect(self._engine)
        return link

    def _take(self, faults: Faults, goes_up: bool, identity: bytes, payload: bytes) -> None:
        """Hold one message until it is due; or forget it, or hold it twice."""
        now, rng = time.monotonic(), self._rng
        if rng.random() < faults.drop:
            self.done["dropped"] += 1
            return
        due = max(now + rng.random() * faults.delay_s, self._last_due.get((goes_up, identity), 0.0))
        self._last_due[goes_up, identity] = due
        if faults.delay_s:
            self.done["delayed"] += 1
        if rng.random() < faults.swap:
            self.done["swapped"] += 1
            due += 0.02  # behind what comes within this time
        heapq.heappush(self._held, (due, next(self._numbers), goes_up, identity, payload))
        if rng.random() < faults.repeat:
            self.done["repeated"] += 1
            heapq.heappush(self._held, (due, next(self._numbers), goes_up, identity, payload))

    def _deliver(self, front: "zmq.Socket[bytes]") -> None:
        now, waiting = time.monotonic(), []
        while self._held and self._held[0][0] <= now:
            held = heapq.heappop(self._held)
            _, _, goes_up, identity, payload = held
            if goes_up:
                if identity in self._links:
                    self._links[identity].send(payload, zmq.NOBLOCK)
            elif self.trickle_s and now - self._trickled < self.trickle_s:
                waiting.append(held)
            else:
                self._trickled = now
                front.send_multipart((identity, payload), zmq.NOBLOCK)
        for held in waiting:
            heapq.heappush(self._held, held)

    def _unlink(self) -> None:
        """The engine must see a frontend go whose connection to the relay is gone."""
        now = time.monotonic()
        for identity in [one for one, heard in self._heard.items() if now - heard > IDLE_S]:
            self._links.pop(identity).close(linger=200)
            del self._heard[identity]


@contextmanager
def relay(listen: str, engine: str, seed: int) -> Iterator[Relay]:
    """A calm relay that listens at `listen` for the block."""
    one = Relay(listen, engine, seed)
    one.start()
    try:
        yield one
    finally:
        one.stop()
