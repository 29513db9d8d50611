"""The encrypted wire: who gets in, who does not, what each side says about it, and that nothing goes over it in the clear."""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import zmq
from zmq.utils import z85

from engine.door import BATCH, LOG_INTERVAL_S, Door, is_known
from engine.wire import Wire
from frontend.engine_client import EngineClient
from protocol.curve_keys import ClientKeys, ServerKeys
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.timing import at_most_s
from tests.wiring import HandEngine, hello


def pair() -> tuple[bytes, bytes]:
    """(public, secret)"""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


SERVER, KNOWN, STRANGER = pair(), pair(), pair()
ENGINE_KEYS = ServerKeys(SERVER[1], frozenset({KNOWN[0]}))
GOOD = ClientKeys(KNOWN[1], SERVER[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def engine(port: int, keys: ServerKeys | None = ENGINE_KEYS) -> Iterator[HandEngine]:
    greeting = hello()
    wire = Wire(f"tcp://127.0.0.1:{port}", greeting, keys=keys)
    wire.start()
    try:
        yield HandEngine(wire, greeting.epoch)
    finally:
        wire.close()


@asynccontextmanager
async def client(port: int, keys: ClientKeys | None) -> AsyncIterator[EngineClient]:
    made = EngineClient(f"tcp://127.0.0.1:{port}", lambda message: None, curve=keys)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_right_keys_attach_and_carry_a_request():
    port = free_port()
    with engine(port) as far:
        async with client(port, GOOD) as near:
            await asyncio.wait_for(near.wait_ready(), 10)
            near.submit([1, 2, 3], SamplingParams(max_tokens=4))
            [(_, message)] = await asyncio.to_thread(far.receive)
            assert isinstance(message, Submit) and message.prompt_token_ids == (1, 2, 3)
        assert far.wire.refused_messages == 0


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (ClientKeys(STRANGER[1], SERVER[0]), "it does not accept this frontend's CURVE key"),
        (ClientKeys(KNOWN[1], STRANGER[0]), "the CURVE keys do not fit"),
        (None, "only one side uses CURVE"),
    ],
    ids=["a key that is not allowed", "another server's key", "no key"],
)
async def test_wrong_keys_are_refused_counted_and_explained(keys, reason, caplog):
    port = free_port()
    with caplog.at_level(logging.DEBUG), engine(port) as far:
        async with client(port, keys) as near:
            await until(lambda: reason in (near.down_reason or ""))
            await until(lambda: far.wire.refused_messages > 0)
            assert near.hello is None and far.wire.frontends() == []
    for _, secret in (SERVER, KNOWN, STRANGER):
        assert secret.hex() not in caplog.text and z85.encode(secret).decode() not in caplog.text


async def test_keys_against_an_engine_without_them_do_not_fall_back_to_the_clear():
    port = free_port()
    with engine(port, keys=None) as far:
        async with client(port, GOOD) as near:
            await until(lambda: "only one side uses CURVE" in (near.down_reason or ""))
            assert far.wire.frontends() == [] and far.wire.refused_messages > 0


async def test_a_frontend_whose_key_becomes_known_attaches_by_itself():
    port = free_port()
    async with client(port, ClientKeys(STRANGER[1], SERVER[0])) as near:
        with engine(port):
            await until(lambda: "does not accept" in (near.down_reason or ""))
        with engine(port, ServerKeys(SERVER[1], frozenset({KNOWN[0], STRANGER[0]}))):
            await asyncio.wait_for(near.wait_ready(), 10)


async def test_a_refused_frontend_costs_one_line_of_the_log_not_one_a_second(caplog):
    port = free_port()
    with caplog.at_level(logging.INFO), engine(port) as far:
        async with client(port, ClientKeys(STRANGER[1], SERVER[0])):
            await until(lambda: far.wire.refused_messages >= 3)
    assert sum("engine lost" in record.message for record in caplog.records) == 1
    assert sum("connection refused" in record.message for record in caplog.records) == 1


async def test_strangers_that_knock_all_the_time_delay_nobody_who_is_attached():
    port = free_port()
    with engine(port) as far:
        async with client(port, GOOD) as near:
            await asyncio.wait_for(near.wait_ready(), 10)
            with knocking(port):
                await until(lambda: far.wire.refused_messages > 50)
                for _ in range(20):
                    assert (await near.fence()).snapshot is not None
            assert near.ready


@contextmanager
def knocking(port: int) -> Iterator[None]:
    """Connections with a key that is not allowed, one after the other."""
    stop = threading.Event()

    def knock() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while not stop.is_set():
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, SERVER[0])
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, STRANGER[0])
            dealer.setsockopt(zmq.CURVE_SECRETKEY, STRANGER[1])
            dealer.connect(f"tcp://127.0.0.1:{port}")
            with suppress(zmq.Again):  # turned away before there was anything to send: then a send would wait for ever
                dealer.send(b"x", zmq.DONTWAIT)
            dealer.poll(10)
            dealer.close()
        context.destroy(linger=0)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_what_goes_over_the_wire_is_not_readable():
    """A relay in the middle records every byte; without keys the same relay reads who attaches and to which model."""
    seen = {}
    for name, keys, near_keys in (("plain", None, None), ("curve", ENGINE_KEYS, GOOD)):
        port = free_port()
        with engine(port, keys) as far:
            async with relay(port) as (middle, recorded), client(middle, near_keys) as near:
                await asyncio.wait_for(near.wait_ready(), 10)
                near.submit([1], SamplingParams(max_tokens=4))
                await asyncio.to_thread(far.receive)
                frontend_id = near.frontend_id
                seen[name] = (bytes(recorded), (frontend_id or "").encode())
    plain, plain_id = seen["plain"]
    hidden, hidden_id = seen["curve"]
    assert plain_id in plain and b"tiny" in plain, "the relay would not have seen it anyway"
    assert hidden_id not in hidden and b"tiny" not in hidden


@asynccontextmanager
async def relay(port: int) -> AsyncIterator[tuple[int, bytearray]]:
    recorded = bytearray()
    carrying: list[asyncio.Task[None]] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                recorded.extend(data)
                writer.write(data)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        carrying.append(asyncio.create_task(carry(reader, far_writer)))
        carrying.append(asyncio.create_task(carry(far_reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], recorded
    finally:
        server.close()
        await asyncio.gather(*carrying)


QUESTION = [b"1.0", b"7", b"engine", b"127.0.0.1", b"me", b"CURVE", KNOWN[0]]


@pytest.mark.parametrize(
    "question",
    [
        [],
        QUESTION[:6],
        [*QUESTION, b"more"],
        [b"2.0", *QUESTION[1:]],
        [*QUESTION[:5], b"NULL", KNOWN[0]],
        [*QUESTION[:6], STRANGER[0]],
        [*QUESTION[:6], KNOWN[0][:31]],
        [*QUESTION[:6], b""],
    ],
)
def test_only_a_well_formed_question_about_a_known_key_is_answered_with_yes(question):
    assert is_known(QUESTION, ENGINE_KEYS)
    assert not is_known(question, ENGINE_KEYS)


def test_refusals_are_logged_once_per_interval(caplog):
    clock = [100.0]
    door = Door(ENGINE_KEYS, lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for moment in (100.0, 100.1, 100.0 + LOG_INTERVAL_S / 2, 100.0 + LOG_INTERVAL_S):
            clock[0] = moment
            door._tell([*QUESTION[:6], STRANGER[0]])
    assert len(caplog.records) == 2 and "127.0.0.1" in caplog.text


def test_a_door_without_keys_asks_nobody():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    door = Door(None)
    door.guard(context, router)
    assert len(door.sockets()) == 1 and router.getsockopt(zmq.MECHANISM) == zmq.NULL
    assert door.attend() == []
    router.disable_monitor()
    context.destroy(linger=0)


def test_an_engine_with_keys_closes_as_fast_as_one_without():
    started_s = time.monotonic()
    with engine(free_port()):
        pass
    at_most_s(time.monotonic() - started_s, 5, "opening and closing")


class Storm:
    """A socket with no end of input."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = frames
        self.taken = self.answered = 0

    def getsockopt(self, option: int) -> int:
        return int(zmq.POLLIN)

    def recv_multipart(self, flags: int) -> list[bytes]:
        self.taken += 1
        return list(self.frames)

    def send_multipart(self, frames: list[bytes]) -> None:
        self.answered += 1


def test_a_storm_of_handshakes_takes_one_batch_of_a_turn_and_no_more():
    door = Door(ENGINE_KEYS)
    failed = struct.pack("=hi", int(zmq.Event.HANDSHAKE_FAILED_AUTH), 400)
    judge, monitor = Storm(*QUESTION[:6], STRANGER[0]), Storm(failed, b"tcp://127.0.0.1:1")
    door._judge, door._monitor = judge, monitor  # type: ignore[assignment]
    assert len(door.attend()) == BATCH
    assert (judge.taken, judge.answered, monitor.taken) == (BATCH, BATCH, BATCH)
