"""The frontend's end against the engine's real end, over ipc in a temporary directory."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient, EngineLost
from protocol.messages import Close, Detach, Heartbeat, Hello, StepOutput, Submit
from protocol.reasons import CloseReason, FinishReason
from protocol.sampling import SamplingParams
from tests.timing import at_most_s
from tests.wiring import EPOCH, HandEngine, hand_engine, step, tokens

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@asynccontextmanager
async def attached(address: str, **expected: str) -> AsyncIterator[tuple[EngineClient, list[object]]]:
    seen: list[object] = []
    client = EngineClient(address, seen.append, **expected)
    await client.start()
    try:
        yield client, seen
    finally:
        await client.stop()


async def soon(condition: object, timeout_s: float = 3.0) -> None:
    """Wait until `condition()` holds; the event loop stays free."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


async def submit(client: EngineClient, engine: HandEngine, **options: object):
    stream = client.submit([1, 2, 3], GREEDY, **options)  # type: ignore[arg-type]
    [(frontend_id, message)] = await asyncio.to_thread(engine.receive)
    assert isinstance(message, Submit) and message.request_id == stream.request_id
    return stream, frontend_id


async def test_attach_tells_the_truth_before_any_step(address):
    with hand_engine(address) as engine:
        engine.publish(generation_tokens=7)
        async with attached(address) as (client, seen):
            hello = await asyncio.wait_for(client.wait_ready(), 3)
            assert client.ready and client.down_reason is None
            assert hello.step_id == 1 and isinstance(seen[0], Hello)


async def test_tokens_arrive_in_order_after_their_totals(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, seen):
            await client.wait_ready()
            stream, me = await submit(client, engine)
            engine.publish({me: (tokens(stream.request_id, 0, 5, 6),)})
            first = await asyncio.wait_for(stream.next(), 3)
            assert [output.token_ids for output in first] == [(5, 6)]
            assert isinstance(seen[-1], StepOutput) and seen[-1].step_id == 1
            engine.publish({me: (tokens(stream.request_id, 2, 7),)})
            engine.publish({me: (tokens(stream.request_id, 3, 8, finish=FinishReason.STOP),)})
            await soon(lambda: stream.is_done)
            rest = await stream.next()
            assert [output.token_ids for output in rest] == [(7,), (8,)], "a reader that is behind gets steps merged"
            assert await stream.next() == [] and client.num_open_streams == 0


async def test_every_batch_is_acknowledged(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            for _ in range(40):
                engine.publish()
            await soon(lambda: all(not p.unacknowledged for p in engine.wire._switchboard._peers.values()))


async def test_a_gap_in_a_stream_fails_it_and_closes_it_in_the_engine(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            stream, me = await submit(client, engine)
            engine.publish({me: (tokens(stream.request_id, 0, 5),)})
            engine.publish({me: (tokens(stream.request_id, 3, 9),)})
            await soon(lambda: stream.is_done)
            assert [output.token_ids for output in await stream.next()] == [(5,)]
            with pytest.raises(EngineLost, match="token 1 expected, token 3"):
                await stream.next()
            [(_, message)] = await asyncio.to_thread(engine.receive)
            assert message == Close(stream.request_id, -1, CloseReason.CLIENT_GONE, 0)


async def test_a_lost_step_fails_the_attachment_and_the_client_attaches_again(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            stream, me = await submit(client, engine)
            engine.wire.send({me: step(5)}, step(5))
            with pytest.raises(EngineLost, match="step 1 expected, step 5"):
                await asyncio.wait_for(stream.next(), 3)
            await soon(lambda: client.ready and client.hello is not None and client.hello.step_id == 5)
            arrivals = await asyncio.to_thread(engine.receive)
            assert isinstance(arrivals[0][1], Detach), "the engine is told that nobody listens to the old streams"


async def test_stop_string_close_is_answered_before_the_child_is_done(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            stream, me = await submit(client, engine, awaits_close=True)
            engine.publish({me: (tokens(stream.request_id, 0, 5, 6),)})
            await stream.next()
            stream.close(0, CloseReason.STOP_STRING, kept=1)
            [(_, message)] = await asyncio.to_thread(engine.receive)
            assert message == Close(stream.request_id, 0, CloseReason.STOP_STRING, 1)
            assert not stream.is_done
            engine.publish({me: (tokens(stream.request_id, 2, finish=FinishReason.STOP),)})
            assert (await stream.next())[0].finish is not None and stream.is_done


@pytest.mark.parametrize("closes_first", [False, True], ids=["finish seen first", "finish and Close cross"])
async def test_a_natural_end_with_awaits_close_is_done_after_the_answer(address, closes_first):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            stream, me = await submit(client, engine, awaits_close=True)
            if closes_first:
                stream.close(0, CloseReason.STOP_STRING, kept=1)
            engine.publish({me: (tokens(stream.request_id, 0, 5, 2, finish=FinishReason.STOP),)})
            await stream.next()
            assert not stream.is_done
            if not closes_first:
                stream.close(0, CloseReason.DELIVERED, kept=2)
            engine.publish({me: (tokens(stream.request_id, 2, finish=FinishReason.STOP),)})
            await stream.next()
            assert stream.is_done and await stream.next() == []


async def test_abandon_closes_all_children_and_forgets_when_answered(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, _):
            await client.wait_ready()
            stream, me = await submit(client, engine, n=2)
            stream.abandon()
            stream.abandon()
            [(_, message)] = await asyncio.to_thread(engine.receive)
            assert message == Close(stream.request_id, -1, CloseReason.CLIENT_GONE, 0)
            assert client.num_open_streams == 1
            engine.publish(
                {me: tuple(tokens(stream.request_id, 0, index=i, finish=FinishReason.ABORT) for i in (0, 1))}
            )
            await soon(lambda: client.num_open_streams == 0)


async def test_fence_returns_the_newest_snapshot(address):
    with hand_engine(address) as engine:
        async with attached(address) as (client, seen):
            await client.wait_ready()
            engine.publish()
            result = await client.fence()
            assert not result.missed and result.snapshot is not None and result.snapshot.step_id == 1
            assert result.snapshot in seen


async def test_many_fences_at_once_all_return(address):
    with hand_engine(address):
        async with attached(address) as (client, _):
            await client.wait_ready()
            results = await asyncio.gather(*(client.fence() for _ in range(50)))
            assert not any(result.missed for result in results)


async def test_an_idle_engine_shows_signs_of_life(address):
    with hand_engine(address):
        async with attached(address) as (client, seen):
            await client.wait_ready()
            await soon(lambda: any(isinstance(message, Heartbeat) for message in seen))


async def test_shutdown_reaches_every_stream_with_its_reason(address):
    async with attached(address) as (client, _):
        with hand_engine(address) as engine:
            await client.wait_ready()
            stream, _ = await submit(client, engine)
            waiting = asyncio.create_task(stream.next())
            await asyncio.to_thread(engine.wire.close)
            with pytest.raises(EngineLost, match="shutting down"):
                await asyncio.wait_for(waiting, 3)
            await soon(lambda: not client.ready)
            assert "shutting down" in (client.down_reason or "")
            with pytest.raises(EngineLost):
                client.submit([1], GREEDY)
        assert await client.fence() == await client.fence(), "a fence without an engine is answered at once"


async def test_a_restarted_engine_is_found_again_as_a_new_epoch(address):
    async with attached(address) as (client, seen):
        for epoch in (EPOCH, EPOCH + 1):
            with hand_engine(address, epoch=epoch):
                await soon(lambda epoch=epoch: client.hello is not None and client.hello.epoch == epoch)
            await soon(lambda: not client.ready)
        assert [message.epoch for message in seen if isinstance(message, Hello)] == [EPOCH, EPOCH + 1]


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({"vocabulary_hash": "other"}, {"expected_vocabulary_hash": "abc"}, "vocabulary"),
        ({"model_name": "a"}, {"expected_model_name": "b"}, "--served-model-name must agree"),
        ({"schema": 99}, {}, "wire schema 99"),
    ],
)
async def test_an_engine_that_can_never_fit_is_refused_for_good(address, changes, expected, words):
    with hand_engine(address, **changes) as engine:
        async with attached(address, **expected) as (client, seen):
            sentence = await asyncio.wait_for(client.wait_refused(), 3)
            assert words in sentence and not client.ready and words in (client.down_reason or "")
            assert not any(isinstance(message, Hello) for message in seen)
            await soon(lambda: engine.wire.frontends() == [])


def test_what_is_no_address_is_refused_by_name():
    with pytest.raises(ValueError, match="names several addresses"):
        EngineClient("tcp://127.0.0.1:1,tcp://127.0.0.1:2", print)
    with pytest.raises(ValueError, match="no engine address"):
        EngineClient("http://127.0.0.1:1", print)


SLEEPING_ENGINE = """
    import sys, time
    from tests.wiring import hand_engine
    with hand_engine(sys.argv[1]):
        time.sleep(60)
"""


async def test_a_killed_engine_is_noticed_well_under_a_second(address):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLEEPING_ENGINE), address], cwd=Path.cwd())
    try:
        async with attached(address) as (client, _):
            await asyncio.wait_for(client.wait_ready(), 20)
            stream = client.submit([1], GREEDY)
            os.kill(process.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(EngineLost):
                await asyncio.wait_for(stream.next(), 5)
            at_most_s(time.monotonic() - killed_at, 0.5, "noticing")
            assert not client.ready
    finally:
        process.kill()
        process.wait()
