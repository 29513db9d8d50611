"""All engines behind this frontend: one client per address, one record per engine, and which of them takes a request.

Owns the clients, what is known of each engine by its id (it outlives the engine and its address), and that an id means one engine.
Never queues, never adds engines up in a metric. Built by `frontend.__main__`; `frontend.server.Engine` is what handlers see.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from frontend.deltas import LatestSnapshot, ObservedEngine
from frontend.engine_addresses import Names, Resolve, is_name, resolve_by_system
from frontend.engine_client import EngineClient
from frontend.engine_families import EngineStatus, EngineView
from frontend.joint_limits import together
from frontend.metrics import FrontendMetrics
from frontend.request_trace import RequestTrace
from frontend.retry import RetriedStream
from frontend.routing import Candidate, Router
from frontend.streams import EngineLost, Stream
from protocol.curve_keys import ClientKeys
from protocol.messages import FromEngine, Hello, ProfileAction, ProfileReply, SimScript
from protocol.sampling import SamplingParams

RESOLVE_INTERVAL_S = 5.0
MAX_KNOWN_ENGINES = 64  # whose series are kept; then those that have been lost for longest go
SEED_BITS = 63  # of a seed that an engine would draw itself
STEPS_UNTIL_SEEN = 2  # the step that runs while a request arrives may end without it, the next one cannot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What every engine must be, and how it is reached."""

    addresses: tuple[str, ...]
    vocabulary_hash: str | None = None
    model_name: str | None = None
    curve: ClientKeys | None = None
    allow_plaintext_tcp: bool = False  # without `curve`, to other machines too


@dataclass(frozen=True, slots=True)
class PoolFence:
    """`missed`: an attached engine was too slow."""

    missed: bool


@dataclass(slots=True)
class _Engine:
    """What is known of one engine id."""

    engine_id: str
    latest: LatestSnapshot
    client: EngineClient  # whose attachment was the last
    on_the_way: deque[tuple[int, Stream]] = field(default_factory=deque)  # (the newest step when it was sent, request)

    @property
    def is_up(self) -> bool:
        hello = self.client.hello
        return hello is not None and hello.engine_id == self.engine_id

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.latest.load.draining

    def is_reporter(self) -> bool:
        """Whether this frontend exports the engine's totals: of all that are attached, one does. Any thread."""
        return self.is_up and self.client.frontend_id == self.latest.load.reporter

    def candidate(self) -> Candidate:
        """Its load as far as this frontend can know."""
        seen = self.latest.step_id - STEPS_UNTIL_SEEN
        while self.on_the_way and (self.on_the_way[0][0] <= seen or self.on_the_way[0][1].is_done):
            self.on_the_way.popleft()
        unseen = sum(stream.n for _, stream in self.on_the_way if not stream.is_done)
        load, hello = self.latest.load, self.latest.hello
        capacity = 1 if hello is None else hello.capacity.max_num_seqs
        return Candidate(self.engine_id, load.running + load.waiting + unseen, capacity)

    def view(self) -> EngineView | None:
        latest = self.latest
        if latest.hello is None:
            return None
        return EngineView(latest.hello, latest.counters, latest.load, latest.step_id, up=self.is_up)


@dataclass(slots=True)
class _Member:
    """One address."""

    client: EngineClient
    engine: _Engine | None = None  # that it led to last


@dataclass(frozen=True, slots=True)
class _Request:
    """All that it takes to submit a request, also a second time."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    n: int
    awaits_close: bool
    sim: SimScript | None
    priority: int
    trace: RequestTrace | None
    deadline_ns: int | None  # on time.monotonic_ns
    prediction_token_ids: Sequence[int]
    scope: str

    def submit(self, client: EngineClient) -> Stream:
        """Raises `EngineLost`."""
        remaining_ns = None if self.deadline_ns is None else max(0, self.deadline_ns - time.monotonic_ns())
        return client.submit(
            self.prompt_token_ids,
            self.sampling,
            self.n,
            awaits_close=self.awaits_close,
            sim=self.sim,
            remaining_ns=remaining_ns,
            priority=self.priority,
            trace=self.trace,
            prediction_token_ids=self.prediction_token_ids,
            scope=self.scope,
        )


class EnginePool:
    """Everything belongs to the event loop's thread, except reading `observed`."""

    def __init__(self, settings: PoolSettings, metrics: FrontendMetrics, resolve: Resolve = resolve_by_system) -> None:
        self._settings = settings
        self._metrics = metrics
        stay_here = settings.curve is None and not settings.allow_plaintext_tcp
        self._names = Names(tuple(filter(is_name, settings.addresses)), resolve, stay_here)
        self._fixed = tuple(address for address in settings.addresses if not is_name(address))
        self._is_alone = len(settings.addresses) == 1 and not self._names.names
        self._members: dict[str, _Member] = {}  # by address
        self._engines: dict[str, _Engine] = {}  # by id, in the order of getting known
        self.observed: tuple[ObservedEngine, ...] = ()  # of the known engines; replaced as one object
        self._router = Router()
        self._following: asyncio.Task[None] | None = None
        self._is_stopping = False
        if not self._is_alone:
            metrics.several_engines()

    # ---- life ----

    async def start(self) -> None:
        """Begin to attach to all of them, in the background; returns at once."""
        for address in self._fixed:
            await self._add(address)
        if self._names.names:
            self._following = asyncio.create_task(self._follow_names(), name="engine names")

    async def stop(self) -> None:
        """Detach from all and close. Open streams raise `EngineLost`."""
        self._is_stopping = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await asyncio.gather(*(member.client.stop() for member in self._members.values()))

    async def wait_refused(self) -> str:
        """Wait until no engine can ever be served; returns the sentence that says why.

        Only the engine at a single fixed address can prove that: elsewhere another may come.
        """
        if not self._is_alone:
            await asyncio.Event().wait()
        [member] = self._members.values()
        return await member.client.wait_refused()

    async def _add(self, address: str) -> None:
        def observe(message: FromEngine) -> None:
            self._observe(member, message)

        def admit(hello: Hello) -> str | None:
            return self._conflict(member, hello)

        client = EngineClient(
            address,
            observe,
            expected_vocabulary_hash=self._settings.vocabulary_hash,
            expected_model_name=self._settings.model_name,
            curve=self._settings.curve,
            admit=admit,
            gives_up=self._is_alone,
        )
        member = self._members[address] = _Member(client)
        await client.start()

    async def _follow_names(self) -> None:
        while True:
            await self._names.refresh()
            named = self._names.addresses()
            for address in named:
                if address not in self._members:
                    logger.info("engine address found address=%s", address)
                    await self._add(address)
            for address, member in list(self._members.items()):
                # An engine that left its name but still answers is ending in its own time.
                if address not in named and address not in self._fixed and not member.client.ready:
                    logger.info("engine address gone address=%s", address)
                    del self._members[address]
                    await member.client.stop()
            await asyncio.sleep(RESOLVE_INTERVAL_S)

    # ---- what handlers ask ----

    @property
    def hello(self) -> Hello | None:
        """What the engines that take requests are together; None while none does."""
        found = [member.client.hello for member in self._members.values() if _takes_requests(member)]
        hellos = [hello for hello in found if hello is not None]
        return together(hellos) if hellos else None

    @property
    def is_draining(self) -> bool:
        """Whether none takes requests only because all of them, each of them attached, finish their last."""
        members = self._members.values()
        return bool(members) and all(member.client.ready and not _takes_requests(member) for member in members)

    @property
    def down_reason(self) -> str | None:
        """Why no engine takes requests; None when one does."""
        reasons = [status.reason for status in self.statuses]
        if None in reasons:
            return None
        reasons += [f"{name} cannot be resolved: {why}" for name, why in self._names.failures.items()]
        told = list(dict.fromkeys(reason for reason in reasons if reason))
        return "; ".join(told) if told else f"waiting for an engine at {', '.join(self._settings.addresses)}"

    @property
    def statuses(self) -> list[EngineStatus]:
        """One per address, in the order of getting known."""
        return [_status(address, member) for address, member in self._members.items()]

    def views(self) -> list[EngineView]:
        """The newest of every engine that was ever heard of, by id."""
        known = sorted(self._engines.values(), key=lambda engine: (len(engine.engine_id), engine.engine_id))
        return [view for engine in known if (view := engine.view()) is not None]

    async def fence(self) -> PoolFence:
        """Hear from all attached engines at once, within the time of one fence."""
        results = await asyncio.gather(*(member.client.fence() for member in self._members.values()))
        return PoolFence(any(result.missed for result in results))

    async def profile(self, action: ProfileAction, timeout_s: float, engine_id: str | None = None) -> ProfileReply:
        """The answer of one engine, the only one by default. Raises `EngineLost`, TimeoutError."""
        for engine in self._engines.values():
            if engine.is_up and engine_id in (None, engine.engine_id):
                return await engine.client.profile(action, timeout_s)
        raise EngineLost(self.down_reason or f"no engine {engine_id!r} is attached")

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        n: int = 1,
        *,
        awaits_close: bool = False,
        sim: SimScript | None = None,
        remaining_ns: int | None = None,
        priority: int = 0,
        trace: RequestTrace | None = None,
        prediction_token_ids: Sequence[int] = (),
        scope: str = "",
    ) -> Stream | RetriedStream:
        """Send one request to the engine that suits it best. Raises `EngineLost` when none takes it."""
        deadline_ns = None if remaining_ns is None else time.monotonic_ns() + remaining_ns
        if not self._is_alone and sampling.seed is None:
            # A second attempt draws what the first drew: anew, it would favour short answers, which engines rarely lose.
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(SEED_BITS))
        request = _Request(
            prompt_token_ids, sampling, n, awaits_close, sim, priority, trace, deadline_ns, prediction_token_ids, scope
        )
        if self._is_alone:
            [member] = self._members.values()
            return request.submit(member.client)
        return RetriedStream(self._submit(request, avoided=None), partial(self._again, request))

    # ---- choosing ----

    def _submit(self, request: _Request, avoided: str | None) -> Stream:
        takers = {
            engine.engine_id: engine
            for engine in self._engines.values()
            if engine.takes_requests and engine.engine_id != avoided
        }
        if not takers:
            raise EngineLost(self.down_reason or "no other engine takes requests")
        route = self._router.route(request.prompt_token_ids, [engine.candidate() for engine in takers.values()])
        refusals: list[EngineLost] = []
        for engine in (takers[engine_id] for engine_id in route.engine_ids):
            try:
                stream = request.submit(engine.client)
            except EngineLost as refused:  # its socket takes no more
                refusals.append(refused)
                continue
            self._router.sent(route, engine.engine_id)
            engine.on_the_way.append((engine.latest.step_id, stream))
            return stream
        raise refusals[0]

    def _again(self, request: _Request, lost_engine_id: str) -> Stream | None:
        if self._is_stopping:
            return None
        with contextlib.suppress(EngineLost):
            return self._submit(request, avoided=lost_engine_id)
        return None

    # ---- who is who ----

    def _observe(self, member: _Member, message: FromEngine) -> None:
        if isinstance(message, Hello):
            member.engine = self._met(member, message)
        if member.engine is not None:
            member.engine.latest.observe(message)

    def _met(self, member: _Member, hello: Hello) -> _Engine:
        """The record of the engine that said Hello, for the first time or again."""
        engine = self._engines.get(hello.engine_id)
        if engine is None:
            self._make_room()
            engine = self._engines[hello.engine_id] = _Engine(hello.engine_id, LatestSnapshot(), member.client)
            self._renew_observed()
        if engine.latest.epoch != hello.epoch:
            self._router.forget(hello.engine_id)
        engine.client = member.client
        engine.on_the_way.clear()
        self._metrics.attach(hello.engine_id, hello.model_name)
        return engine

    def _make_room(self) -> None:
        while len(self._engines) >= MAX_KNOWN_ENGINES:
            down = [engine for engine in self._engines.values() if not engine.is_up]
            if not down:
                return
            oldest = min(down, key=lambda engine: 0 if engine.latest.heard is None else engine.latest.heard.at_ns)
            del self._engines[oldest.engine_id]
            self._router.forget(oldest.engine_id)
            self._metrics.forget(oldest.engine_id)
            self._renew_observed()
            for member in self._members.values():
                member.engine = None if member.engine is oldest else member.engine

    def _renew_observed(self) -> None:
        self.observed = tuple(
            ObservedEngine(engine.engine_id, engine.latest, engine.is_reporter) for engine in self._engines.values()
        )

    def _conflict(self, member: _Member, hello: Hello) -> str | None:
        """Why the engine must not be used beside the others: its id already means one."""
        known = self._engines.get(hello.engine_id)
        if known is None:
            return None
        here, there = member.client.address, known.client.address
        if known.is_up and known.client is not member.client:
            if known.latest.epoch == hello.epoch:
                return f"{here} leads to engine {hello.engine_id!r}, which is attached through {there}"
            return f"--engine-id must be unique: {hello.engine_id!r} at {here} is also at {there}"
        if known.latest.is_past(hello.epoch):
            return f"--engine-id must be unique: {hello.engine_id!r} at {here} had been replaced by one at {there}"
        return None


def _takes_requests(member: _Member) -> bool:
    return member.engine is not None and member.engine.client is member.client and member.engine.takes_requests


def _status(address: str, member: _Member) -> EngineStatus:
    engine_id = None if member.engine is None else member.engine.engine_id
    reason = member.client.down_reason
    if reason is None and not _takes_requests(member):
        reason = f"engine {engine_id!r} at {address} is shutting down"
    return EngineStatus(engine_id, address, reason)
