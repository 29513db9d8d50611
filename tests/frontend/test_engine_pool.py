"""Several engines behind one frontend: real sockets on the engines' side, names resolved by the test."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from frontend import engine_client, engine_pool
from frontend.attachment import FenceResult
from frontend.engine_addresses import Names, is_name, resolve_by_system
from frontend.engine_pool import EnginePool, PoolSettings
from frontend.joint_limits import together
from frontend.metrics import FrontendMetrics
from frontend.streams import EngineLost
from protocol.endpoints import split_addresses
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.wiring import CAPACITY, EPOCH, IDLE, HandEngine, hand_engine, hello, step, tokens

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
PROMPT = tuple(range(200))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "REFUSED_RETRY_S", 0.05)
    monkeypatch.setattr(engine_pool, "RESOLVE_INTERVAL_S", 0.02)


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"


@asynccontextmanager
async def pool_over(*addresses: str, **options: object) -> AsyncIterator[EnginePool]:
    resolve = options.pop("resolve", resolve_by_system)
    metrics = FrontendMetrics(1000)
    pool = EnginePool(PoolSettings(addresses, **options), metrics, resolve)  # type: ignore[arg-type]
    pool.page = lambda: metrics.render(pool.views(), "", "all")[0].decode()  # type: ignore[attr-defined]
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def soon(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


def ready_ids(pool: EnginePool) -> list[str | None]:
    return [status.engine_id for status in pool.statuses if status.reason is None]


def tell_load(engine: HandEngine, **changes: object) -> None:
    """A step with this load; the engine's heartbeats repeat it."""
    engine.step_id += 1
    snapshot = msgspec.structs.replace(step(engine.step_id), load=msgspec.structs.replace(IDLE, **changes))
    engine.wire.send(dict.fromkeys(engine.wire.frontends(), snapshot), snapshot)


async def arrival(engine: HandEngine) -> tuple[str, Submit]:
    [(frontend_id, message)] = await asyncio.to_thread(engine.receive)
    assert isinstance(message, Submit)
    return frontend_id, message


async def test_requests_go_in_turns_and_their_answers_come_back_by_themselves(addresses):
    with hand_engine(addresses[0], engine_id="0") as a, hand_engine(addresses[1], engine_id="1") as b:
        async with pool_over(*addresses) as pool:
            await soon(lambda: ready_ids(pool) == ["0", "1"])
            streams = [pool.submit([1, 2, 3], GREEDY) for _ in range(2)]
            assert sorted(stream.engine_id for stream in streams) == ["0", "1"]
            for stream in streams:
                engine, token = (a, 5) if stream.engine_id == "0" else (b, 6)
                me, message = await arrival(engine)
                engine.publish({me: (tokens(message.request_id, 0, token),)})
                assert [output.token_ids for output in await stream.next()] == [(token,)]


async def test_what_is_on_its_way_counts_until_the_engine_has_seen_it(addresses):
    with hand_engine(addresses[0], engine_id="0") as a, hand_engine(addresses[1], engine_id="1"):
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            burst = [pool.submit([1], GREEDY, n=n).engine_id for n in (3, 1, 1, 1)]
            assert burst.count(burst[0]) == 1, "three children there weigh as much as three requests here"
            before = pool._engines["0"].candidate().sequences
            assert before > 0
            for _ in range(engine_pool.STEPS_UNTIL_SEEN):
                a.publish()
            await soon(lambda: pool._engines["0"].candidate().sequences == 0)


async def test_a_lost_engines_request_runs_at_the_other_with_the_time_that_is_left(addresses):
    with hand_engine(addresses[1], engine_id="1") as b, hand_engine(addresses[0], engine_id="0") as a:
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            home = pool.submit(PROMPT, GREEDY, remaining_ns=10_000_000_000)
            lost, kept = (a, b) if home.engine_id == "0" else (b, a)
            lost_id = home.engine_id
            await arrival(lost)
            waiting = asyncio.create_task(home.next())
            await asyncio.to_thread(lost.wire.close)
            with pytest.raises(EngineLost):
                await waiting
            assert home.restart() and home.engine_id != lost_id
            me, message = await arrival(kept)
            assert message.prompt_token_ids == PROMPT
            assert message.remaining_ns is not None and 0 < message.remaining_ns < 10_000_000_000
            kept.publish({me: (tokens(message.request_id, 0, 7),)})
            assert [output.token_ids for output in await home.next()] == [(7,)]
            assert not home.restart()
            for engine_id in ("0", "1"):
                for family in ("requests_retried", "retried_tokens"):
                    assert f'drafthouse:{family}_total{{engine="{engine_id}"}} 0\n' in pool.page(), (
                        "there from the start"
                    )


async def test_a_request_without_a_seed_draws_at_the_second_engine_what_it_drew_at_the_first(addresses):
    """Drawn anew, what was lost would more often become a short answer: those are rarely lost."""
    with hand_engine(addresses[1], engine_id="1") as b, hand_engine(addresses[0], engine_id="0") as a:
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            drawn = SamplingParams(max_tokens=16)
            homes = [
                pool.submit(PROMPT, sampling) for sampling in (drawn, drawn, SamplingParams(max_tokens=16, seed=5))
            ]
            assert len({home.engine_id for home in homes}) == 1, "the same prompt goes where it went"
            lost, kept = (a, b) if homes[0].engine_id == "0" else (b, a)
            first = [message.sampling for _, message in await asyncio.to_thread(lost.receive, 3)]
            await asyncio.to_thread(lost.wire.close)
            await soon(lambda: len(ready_ids(pool)) == 1)
            assert all(home.restart() for home in homes)
            assert [message.sampling for _, message in await asyncio.to_thread(kept.receive, 3)] == first
            seeds = [sampling.seed for sampling in first]
            assert seeds[2] == 5 and len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)


async def test_stopping_retries_nothing(addresses):
    with hand_engine(addresses[0], engine_id="0"), hand_engine(addresses[1], engine_id="1"):
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            stream = pool.submit([1], GREEDY)
            await pool.stop()
            with pytest.raises(EngineLost, match="shutting down"):
                await stream.next()
            assert not stream.restart()


async def test_a_draining_engine_gets_no_request_and_none_at_all_is_said(addresses):
    with hand_engine(addresses[0], engine_id="0") as a, hand_engine(addresses[1], engine_id="1") as b:
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            tell_load(a, draining=True)
            await soon(lambda: ready_ids(pool) == ["1"])
            assert not pool.is_draining, "one takes requests"
            assert pool.statuses[0].reason == f"engine '0' at {addresses[0]} is shutting down"
            assert {pool.submit([1], GREEDY).engine_id for _ in range(4)} == {"1"}
            tell_load(b, draining=True)
            await soon(lambda: pool.hello is None)
            assert "engine '1'" in (pool.down_reason or "")
            assert pool.is_draining
            with pytest.raises(EngineLost, match="shutting down"):
                pool.submit([1], GREEDY)
            await asyncio.to_thread(a.wire.close)
            await soon(lambda: not pool.is_draining)  # one is gone now, and that is the worse news
            assert pool.hello is None


async def test_a_frontend_without_an_engine_does_not_call_that_draining(addresses):
    async with pool_over(*addresses) as pool:
        assert pool.hello is None and not pool.is_draining


async def test_series_are_per_engine_and_a_lost_one_keeps_its_counters_and_loses_its_gauges(addresses):
    with hand_engine(addresses[1], engine_id="1") as b:
        async with pool_over(*addresses) as pool:
            with hand_engine(addresses[0], engine_id="0") as a:
                await soon(lambda: len(ready_ids(pool)) == 2)
                a.publish(generation_tokens=30)
                b.publish(generation_tokens=4)
                assert not (await pool.fence()).missed
                page = pool.page()
                for engine, count in (("0", 30), ("1", 4)):
                    assert f'vllm:generation_tokens_total{{engine="{engine}",model_name="tiny"}} {count}\n' in page
                    assert f'drafthouse:engine_up{{engine="{engine}"}} 1\n' in page
                assert page.count("# TYPE vllm:generation_tokens_total counter\n") == 1
            await soon(lambda: ready_ids(pool) == ["1"])
            page = pool.page()
            assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 30\n' in page
            assert 'drafthouse:engine_up{engine="0"} 0\n' in page
            assert 'num_requests_running{engine="0"' not in page and 'num_requests_running{engine="1"' in page
            with hand_engine(addresses[0], engine_id="0", epoch=EPOCH + 1):
                await soon(lambda: len(ready_ids(pool)) == 2)
                page = pool.page()
                assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 0\n' in page, "a new epoch"
                assert 'vllm:generation_tokens_total{engine="1",model_name="tiny"} 4\n' in page


async def test_another_engine_of_the_same_id_is_refused_until_the_first_is_gone(addresses, caplog, monkeypatch):
    asked: list[str | None] = []
    conflict = EnginePool._conflict
    monkeypatch.setattr(EnginePool, "_conflict", lambda *given: asked.append(answer := conflict(*given)) or answer)
    async with pool_over(*addresses) as pool:
        with hand_engine(addresses[0], engine_id="0"):
            await soon(lambda: ready_ids(pool) == ["0"])
            with hand_engine(addresses[1], engine_id="0", epoch=EPOCH + 5):
                words = f"--engine-id must be unique: '0' at {addresses[1]} is also at {addresses[0]}"
                await soon(lambda: pool.statuses[1].reason == words)
                await soon(lambda: len(asked) > 5)
                assert caplog.text.count("engine refused") == 1
                assert pool.down_reason is None and [view.hello.epoch for view in pool.views()] == [EPOCH]
        with hand_engine(addresses[1], engine_id="0", epoch=EPOCH + 5):
            await soon(lambda: [view.hello.epoch for view in pool.views() if view.up] == [EPOCH + 5])
        with hand_engine(addresses[0], engine_id="0"):
            await soon(lambda: "had been replaced" in (pool.statuses[0].reason or ""))


async def test_one_engine_through_two_addresses_is_kept_once(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    async with pool_over(f"ipc://{tmp_path}/a", f"ipc://{link}") as pool:
        with hand_engine(f"ipc://{tmp_path}/a", engine_id="0"):
            await soon(lambda: any("which is attached through" in (status.reason or "") for status in pool.statuses))
            assert len(ready_ids(pool)) == 1 and len(pool.views()) == 1


async def test_an_engine_that_does_not_fit_is_left_out_and_the_frontend_goes_on(addresses):
    with hand_engine(addresses[0], engine_id="0"), hand_engine(addresses[1], engine_id="1", vocabulary_hash="other"):
        async with pool_over(*addresses, vocabulary_hash="abc") as pool:
            await soon(lambda: "vocabulary" in (pool.statuses[1].reason or "") and ready_ids(pool) == ["0"])
            assert {pool.submit([1], GREEDY).engine_id for _ in range(3)} == {"0"}
            refused = asyncio.create_task(pool.wait_refused())
            await asyncio.sleep(0)
            assert not refused.done()
            refused.cancel()


async def test_a_single_engine_that_can_never_fit_is_the_end(addresses):
    with hand_engine(addresses[0], vocabulary_hash="other"):
        async with pool_over(addresses[0], vocabulary_hash="abc") as pool:
            assert "vocabulary" in await asyncio.wait_for(pool.wait_refused(), 3)
            assert "drafthouse:requests_retried" not in pool.page()


async def test_a_name_is_followed_and_kept_while_it_cannot_be_resolved(monkeypatch):
    monkeypatch.setattr(engine_client, "check_address", lambda address: address)
    answers: dict[str, list[str] | OSError] = {"engine": ["10.0.0.1", "10.0.0.2"]}
    asked: list[tuple[str, int]] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        answer = answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def known() -> list[str]:
        return [status.address for status in pool.statuses]

    async with pool_over("tcp://engine:5570", resolve=resolve, allow_plaintext_tcp=True) as pool:
        await soon(lambda: known() == ["tcp://10.0.0.1:5570", "tcp://10.0.0.2:5570"])
        answers["engine"] = OSError(-2, "Name or service not known")
        await soon(lambda: len(asked) > 4)
        await soon(lambda: "Name or service not known" in (pool.down_reason or ""))
        assert len(known()) == 2
        answers["engine"] = ["10.0.0.2", "10.0.0.3"]
        await soon(lambda: known() == ["tcp://10.0.0.2:5570", "tcp://10.0.0.3:5570"])
        assert "resolved" not in (pool.down_reason or "")


async def test_resolver_failures_are_logged_once(caplog):
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    names = Names(("tcp://engine:5570",), resolve)
    for _ in range(3):
        await names.refresh()
    assert caplog.text.count("engine name not resolved") == 1 and names.addresses() == ()


async def test_a_name_that_means_another_machine_is_not_connected_to_in_the_clear_unless_that_is_allowed(monkeypatch):
    monkeypatch.setattr(engine_client, "check_address", lambda address: address)
    answer = ["127.0.0.1"]

    async def resolve(host: str, port: int) -> list[str]:
        return list(answer)

    async with pool_over("tcp://localhost:5570", resolve=resolve, allow_plaintext_tcp=False) as pool:
        await soon(lambda: [status.address for status in pool.statuses] == ["tcp://127.0.0.1:5570"])
        answer[:] = ["127.0.0.1", "10.0.0.1"]
        await soon(lambda: "it means 10.0.0.1, another machine" in (pool.down_reason or ""))
        assert "--allow-plaintext-tcp" in (pool.down_reason or "")
        assert [status.address for status in pool.statuses] == ["tcp://127.0.0.1:5570"]
    async with pool_over("tcp://localhost:5570", resolve=resolve, allow_plaintext_tcp=True) as pool:
        await soon(lambda: len(pool.statuses) == 2)


async def test_the_system_resolves_to_one_family():
    assert await resolve_by_system("localhost", 5570) == ["127.0.0.1"]
    assert is_name("tcp://localhost:5570") and not is_name("tcp://127.0.0.1:5570") and not is_name("ipc:///x")
    assert not is_name("tcp://[::1]:5570")


def test_the_option_names_one_or_several_addresses():
    assert split_addresses("ipc:///a, tcp://engine:5570") == ("ipc:///a", "tcp://engine:5570")
    for wrong, words in (
        ("ipc:///a,ipc:///a", "twice"),
        ("ipc:///a,", "no engine address"),
        ("x", "no engine address"),
    ):
        with pytest.raises(ValueError, match=words):
            split_addresses(wrong)


def test_together_engines_have_the_smallest_context_and_the_sum_of_the_places():
    small = msgspec.structs.replace(CAPACITY, max_model_len=512, max_num_seqs=8, block_size=32, num_blocks=10)
    one = together([hello(), hello(engine_id="1", capacity=small)])
    assert (one.engine_id, one.capacity.max_model_len, one.capacity.max_num_seqs) == ("0", 512, 72)
    assert one.capacity.num_blocks * one.capacity.block_size == 64 * 16 + 10 * 32
    assert one.capacity.max_num_queued_requests == 2 * CAPACITY.max_num_queued_requests
    assert together([hello()]) == hello()


async def test_engines_that_were_lost_longest_ago_make_room(addresses, monkeypatch):
    monkeypatch.setattr(engine_pool, "MAX_KNOWN_ENGINES", 2)
    async with pool_over(*addresses) as pool:
        for number in range(4):
            with hand_engine(addresses[0], engine_id=f"e{number}", epoch=EPOCH + number) as engine:
                await soon(lambda number=number: ready_ids(pool) == [f"e{number}"])
                engine.publish(generation_tokens=number + 1)
                await pool.fence()
            await soon(lambda: ready_ids(pool) == [])
        assert [view.hello.engine_id for view in pool.views()] == ["e2", "e3"]
        page = pool.page()
        assert 'engine="e3"' in page and 'engine="e1"' not in page
        assert [engine.engine_id for engine in pool.observed] == ["e2", "e3"]


async def test_a_fence_asks_all_engines_at_once_and_tells_one_miss(addresses):
    async with pool_over(*addresses) as pool:
        asked = asyncio.Barrier(2)

        async def fence(missed: bool) -> FenceResult:
            async with asked:  # goes on only when both were asked
                return FenceResult(None, missed)

        for number, member in enumerate(pool._members.values()):
            member.client.fence = functools.partial(fence, number == 1)
        assert (await asyncio.wait_for(pool.fence(), 5)).missed


async def test_each_engines_reporter_is_its_own(addresses):
    with hand_engine(addresses[0], engine_id="0") as a, hand_engine(addresses[1], engine_id="1") as b:
        async with pool_over(*addresses) as pool:
            await soon(lambda: len(ready_ids(pool)) == 2)
            me = pool._engines["0"].client.frontend_id
            tell_load(a, reporter=me)
            tell_load(b, reporter="another frontend")
            await soon(lambda: all(engine.latest.step_id == 1 for engine in pool.observed))
            reporting = {engine.engine_id for engine in pool.observed if engine.is_reporter()}
            assert reporting == {"0"}
