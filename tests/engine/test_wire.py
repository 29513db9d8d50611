"""The engine's end of the wire against raw sockets: what is refused, who is cut off, and that nothing kills it."""

import random
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.heartbeats import ANCHOR_NS, HEARTBEAT_NS
from engine.peers import SILENT_NS, Peer
from engine.sequence import Gone
from engine.wire import Wire, WireFailure
from protocol.codec import MAX_MESSAGE_BYTES, decode_from_engine, encode
from protocol.endpoints import MAX_FRONTENDS, MAX_UNACKNOWLEDGED_STEPS
from protocol.messages import (
    SCHEMA_VERSION,
    Attach,
    Close,
    Detach,
    Detached,
    Fence,
    FenceReply,
    FromEngine,
    Heartbeat,
    Hello,
    Ping,
    StepOutput,
    Submit,
)
from protocol.reasons import CloseReason, DetachReason
from protocol.sampling import SamplingParams
from tests.wiring import IDLE, HandEngine, hand_engine, hello, tokens
from tests.wiring import step as step_of


class Dealer:
    """A frontend's socket, without a frontend."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message: object) -> None:
        self.socket.send(message if isinstance(message, bytes) else encode(message))  # type: ignore[arg-type]

    def receive(self, timeout_s: float = 3.0) -> FromEngine:
        assert self.socket.poll(int(timeout_s * 1000)), "nothing came"
        return decode_from_engine(self.socket.recv())

    def expect(self, kind: type, timeout_s: float = 3.0) -> FromEngine:
        """The next message that is no heartbeat."""
        while isinstance(message := self.receive(timeout_s), Heartbeat) and kind is not Heartbeat:
            pass
        assert isinstance(message, kind), message
        return message

    def attach(self) -> Hello:
        self.send(Attach(self.name, SCHEMA_VERSION))
        message = self.expect(Hello)
        assert isinstance(message, Hello)
        return message


@contextmanager
def dealers(address: str, *names: str) -> Iterator[list[Dealer]]:
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        yield [Dealer(context, address, name) for name in names]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


def submit(request_id: int = 1) -> Submit:
    return Submit(request_id, (1, 2), SamplingParams(max_tokens=4), 1, None, 0, 0, False, None)


def soon(condition: object, timeout_s: float = 3.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def test_messages_reach_the_step_thread_in_order(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        sent = [submit(1), Close(1, 0, CloseReason.CLIENT_GONE, 0), submit(2), Detach()]
        for message in sent:
            one.send(message)
        assert engine.receive(4) == [("a", message) for message in sent]
        soon(lambda: engine.wire.frontends() == [])


def test_closes_can_be_peeked_and_are_still_drained(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        one.send(Close(7, 2, CloseReason.STOP_STRING, 3))
        soon(lambda: engine.wire.peek_closes() == {("a", 7, 2)})
        assert engine.wire.peek_closes() == {("a", 7, 2)}
        assert engine.wire.drain() == [("a", Close(7, 2, CloseReason.STOP_STRING, 3))]
        assert engine.wire.peek_closes() == set() and engine.wire.drain() == []


def test_every_frontend_gets_its_own_outputs_of_every_step(address: str):
    with hand_engine(address) as engine, dealers(address, "a", "b") as [one, two]:
        one.attach()
        two.attach()
        engine.publish({"a": (tokens(1, 0, 5),)})
        engine.publish()
        for dealer, ids in ((one, [(5,)]), (two, [])):
            first, second = dealer.expect(StepOutput), dealer.expect(StepOutput)
            assert isinstance(first, StepOutput) and isinstance(second, StepOutput)
            assert (first.step_id, second.step_id) == (1, 2)
            assert [output.token_ids for output in first.outputs] == ids and second.outputs == ()


def test_a_frontend_that_attaches_between_steps_sees_no_gap(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                engine.publish()

        stepping = threading.Thread(target=run)
        stepping.start()
        try:
            expected = one.attach().step_id + 1
            for _ in range(200):
                step = one.expect(StepOutput)
                assert isinstance(step, StepOutput) and step.step_id == expected
                one.send(Ping(step.step_id))
                expected += 1
        finally:
            stop.set()
            stepping.join()


def test_fences_and_heartbeats_go_on_while_the_step_thread_is_busy(address: str):
    with (
        hand_engine(address) as engine,
        dealers(address, "a") as [one],
    ):  # the step thread is this test: it does nothing
        engine.publish(generation_tokens=3)
        one.attach()
        one.send(Fence(42))
        reply = one.expect(FenceReply)
        assert isinstance(reply, FenceReply) and (reply.nonce, reply.step_id) == (42, 1)
        beat = one.expect(Heartbeat)
        assert isinstance(beat, Heartbeat) and beat.step_id == 1 and beat.load.frontends == 1


def test_a_message_before_attach_is_answered_detached_and_counted(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        for message in (submit(), Ping(0), Fence(1), Detach(), Close(1, 0, CloseReason.CLIENT_GONE, 0)):
            one.send(message)
            answer = one.expect(Detached)
            assert isinstance(answer, Detached) and answer.reason is DetachReason.UNKNOWN
        assert engine.wire.refused_messages == 5 and engine.wire.drain() == []


@pytest.mark.parametrize(
    ("attach", "reason"),
    [
        (Attach("a", SCHEMA_VERSION + 1), DetachReason.SCHEMA),
        (Attach("somebody else", SCHEMA_VERSION), DetachReason.UNKNOWN),
        (Attach("", SCHEMA_VERSION), DetachReason.UNKNOWN),
    ],
)
def test_an_attach_that_does_not_fit_is_refused_with_the_reason(address: str, attach: Attach, reason: DetachReason):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.send(attach)
        answer = one.expect(Detached)
        assert isinstance(answer, Detached) and answer.reason is reason
        assert engine.wire.frontends() == [] and engine.wire.refused_messages == 1


def test_attaching_twice_ends_the_attachment(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        one.send(Attach("a", SCHEMA_VERSION))
        answer = one.expect(Detached)
        assert isinstance(answer, Detached) and answer.reason is DetachReason.DUPLICATE
        [(name, message)] = engine.receive()
        assert name == "a" and isinstance(message, Gone)
        assert one.attach().engine_id == "0", "and it can begin anew"


def test_a_second_socket_under_the_same_name_does_not_harm_the_first(address: str):
    with hand_engine(address) as engine, dealers(address, "a", "a") as [one, two]:
        one.attach()
        two.send(Attach("a", SCHEMA_VERSION))
        engine.publish({"a": (tokens(1, 0, 5),)})
        assert isinstance(one.expect(StepOutput), StepOutput)
        assert not two.socket.poll(100)


def test_no_more_frontends_than_it_can_serve(address: str):
    names = [f"f{number}" for number in range(MAX_FRONTENDS + 1)]
    with hand_engine(address) as engine, dealers(address, *names) as attached:
        for dealer in attached[:-1]:
            dealer.attach()
        attached[-1].send(Attach(attached[-1].name, SCHEMA_VERSION))
        answer = attached[-1].expect(Detached)
        assert isinstance(answer, Detached) and answer.reason is DetachReason.FULL
        assert len(engine.wire.frontends()) == MAX_FRONTENDS


def test_malformed_messages_are_counted_and_never_fatal(address: str):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    valid = [encode(message) for message in (Attach("a", 1), submit(), Ping(3), Fence(4), Detach())]
    with hand_engine(address) as engine, dealers(address, "a", "b") as [one, two]:
        two.attach()
        num_sent = 0
        for _ in range(500):
            payload = bytearray(choose.choice(valid))
            for _ in range(choose.randint(1, 4)):
                payload[choose.randrange(len(payload))] = choose.randrange(256)
            one.send(bytes(payload[: choose.randint(0, len(payload))]))
            num_sent += 1
        one.socket.send_multipart([b"two", b"frames"])
        one.send(b"\x95\x02" + b"\x91" * 10_000)
        two.send(Fence(1))
        two.expect(FenceReply, timeout_s=10)
        soon(lambda: engine.wire.refused_messages > num_sent // 2)


def test_an_oversized_message_is_refused_and_its_sender_lives(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        one.send(b"\0" * (MAX_MESSAGE_BYTES + 1))
        one.send(Fence(1))
        one.expect(FenceReply, timeout_s=10)
        assert engine.wire.refused_messages == 1


def test_a_connection_that_speaks_something_else_is_harmless():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, b"\0" * 4096, b"\x16\x03\x01" + b"x" * 500):
            with socket.create_connection(("127.0.0.1", port)) as foreign:
                foreign.sendall(noise)
        one.attach()
        soon(lambda: engine.wire.refused_messages > 0)


def test_refusals_of_an_idle_engine_ask_for_a_step_so_that_they_are_published(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        engine.wire.wait(0)
        one.send(b"nonsense")
        assert engine.wire.wait(3.0), "a step is wanted"
        assert engine.wire.refused_messages == 1


def test_a_frontend_that_vanishes_is_noticed_at_the_next_message(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        one.socket.close()
        [(name, message)] = engine.receive()
        assert name == "a" and isinstance(message, Gone) and "closed" in message.reason
        assert engine.wire.frontends_cut_off == 0, "it left by itself"


def test_rows_of_a_frontend_that_does_not_acknowledge_pause_until_it_does(address: str):
    with hand_engine(address) as engine, dealers(address, "a", "b") as [one, two]:
        one.attach()
        two.attach()
        for _ in range(MAX_UNACKNOWLEDGED_STEPS + 1):
            engine.publish()
            step = two.expect(StepOutput)
            assert isinstance(step, StepOutput)
            two.send(Ping(step.step_id))
        soon(lambda: engine.wire.paused() == {"a"})
        while engine.wire.wait(0):
            engine.wire.drain()
        one.send(Ping(5))
        assert engine.wire.wait(3.0), "the step thread is woken when a frontend may go on"
        assert engine.wire.paused() == frozenset()


class Clock:
    """Monotonic ns that a test may move."""

    def __init__(self) -> None:
        self.offset_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.offset_ns


def test_frontends_hear_the_engines_clocks_every_ten_seconds_of_constant_load(address: str):
    now_ns = [0]
    wire = Wire(address, hello(), lambda: now_ns[0])
    wire.start()
    try:
        with dealers(address, "a") as [one]:
            one.attach()
            engine = HandEngine(wire, hello().epoch)
            while now_ns[0] + HEARTBEAT_NS < ANCHOR_NS:
                now_ns[0] += HEARTBEAT_NS - 1  # never silent for long enough
                engine.publish()
                one.send(Ping(engine.step_id - 1))
                one.send(Fence(engine.step_id))  # its answer shows that the Ping was heard
                assert {type(one.receive()), type(one.receive())} == {StepOutput, FenceReply}, "no heartbeat yet"
            now_ns[0] = ANCHOR_NS
            engine.publish()
            beat = one.receive()
            if isinstance(beat, StepOutput):
                beat = one.receive()
            assert isinstance(beat, Heartbeat)
            assert beat.monotonic_ns == now_ns[0] and abs(time.time_ns() - beat.wall_ns) < 10**10
    finally:
        wire.close()


def test_a_drain_is_told_at_once_to_all_and_again_after_a_step_that_had_begun_before(address: str):
    wire = Wire(address, hello(), lambda: 0)  # time stands still: no heartbeat is ever due for another reason
    wire.start()
    try:
        with dealers(address, "a", "b", "c") as [one, two, late]:
            one.attach()
            two.attach()
            engine = HandEngine(wire, hello().epoch)
            wire.announce_drain()
            for dealer in (one, two):
                beat = dealer.receive()
                assert isinstance(beat, Heartbeat) and beat.load.draining and beat.step_id == 0
            assert late.attach().load.draining
            engine.publish()  # its load is of before
            step, beat = one.receive(), one.receive()
            assert isinstance(step, StepOutput) and not step.load.draining
            assert isinstance(beat, Heartbeat) and beat.load.draining and beat.step_id == 1
            knowing = msgspec.structs.replace(IDLE, draining=True)
            snapshot = msgspec.structs.replace(step_of(2), load=knowing)
            wire.send(dict.fromkeys(wire.frontends(), snapshot), snapshot)
            one.send(Fence(1))
            step, reply = one.receive(), one.receive()
            assert isinstance(step, StepOutput) and step.load.draining
            assert isinstance(reply, FenceReply) and reply.load.draining, "nothing is said twice"
    finally:
        wire.close()


def test_the_reporter_is_the_longest_attached_frontend(address: str):
    with hand_engine(address) as engine, dealers(address, "b", "a", "c") as [one, two, three]:
        assert one.attach().load.reporter == "b"
        assert two.attach().load.reporter == "b"
        one.send(Detach())
        soon(lambda: engine.wire.frontends() == ["a"])
        assert three.attach().load.reporter == "a"
        three.send(Fence(1))
        reply, beat = three.expect(FenceReply), three.expect(Heartbeat)
        assert isinstance(reply, FenceReply) and reply.load.reporter == "a"
        assert isinstance(beat, Heartbeat) and beat.load.reporter == "a"
        two.send(Detach())
        one.send(Attach("b", SCHEMA_VERSION))
        again = one.expect(Hello)
        assert isinstance(again, Hello) and again.load.reporter == "c", "who comes back is the newest"


@pytest.mark.parametrize("has_unacknowledged", [False, True], ids=["silent", "behind"])
def test_a_frontend_is_cut_off_after_its_time(address: str, has_unacknowledged: bool):
    clock = Clock()
    wire = Wire(address, hello(), clock)
    wire.start()
    try:
        with dealers(address, "a") as [one]:
            one.attach()
            if has_unacknowledged:
                HandEngine(wire, hello().epoch).publish()
                one.expect(StepOutput)
            clock.offset_ns += SILENT_NS + 1
            answer = one.expect(Detached)
            reason = DetachReason.BEHIND if has_unacknowledged else DetachReason.SILENT
            assert isinstance(answer, Detached) and answer.reason is reason
            soon(lambda: wire.frontends_cut_off == 1 and wire.frontends() == [])
            assert wire.paused() == frozenset()
            assert [type(message) for _, message in wire.drain()] == [Gone]
    finally:
        wire.close()


def test_closing_sends_what_was_published_and_says_goodbye(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        one.attach()
        for _ in range(10):
            engine.publish()
        engine.wire.close()
        steps = [one.expect(StepOutput) for _ in range(10)]
        assert [step.step_id for step in steps if isinstance(step, StepOutput)] == list(range(1, 11))
        goodbye = one.expect(Detached)
        assert isinstance(goodbye, Detached) and goodbye.reason is DetachReason.SHUTDOWN
    assert not Path(address.removeprefix("ipc://")).exists(), "no socket file is left"


def test_the_socket_file_is_private(address: str):
    with hand_engine(address):
        mode = Path(address.removeprefix("ipc://")).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_an_address_in_use_is_refused_and_its_owner_lives(address: str):
    with hand_engine(address), dealers(address, "a") as [one]:
        with pytest.raises(WireFailure, match="another engine listens"):
            Wire(address, hello()).start()
        assert one.attach().engine_id == "0"


def test_addresses_that_cannot_be_had_are_refused_with_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address, words in (
            (f"ipc://{tmp_path}/none/engine", "does not exist"),
            (f"ipc://{tmp_path}/file", "no socket"),
            (f"tcp://127.0.0.1:{taken.getsockname()[1]}", "Address already in use"),
        ):
            with pytest.raises(WireFailure, match=words):
                Wire(address, hello()).start()
    assert (tmp_path / "file").read_text() == "x"


def test_a_socket_file_left_by_a_killed_engine_is_taken_over(address: str):
    left = socket.socket(socket.AF_UNIX)
    left.bind(address.removeprefix("ipc://"))
    left.close()
    with hand_engine(address), dealers(address, "a") as [one]:
        assert one.attach().engine_id == "0"


def test_waiting_ends_by_wake_and_by_time_and_returns_whether_there_is_work(address: str):
    with hand_engine(address) as engine:
        while engine.wire.wait(0):
            engine.wire.drain()
        started = time.monotonic()
        assert engine.wire.wait(0.05) is False and 0.04 < time.monotonic() - started < 2
        threading.Timer(0.05, engine.wire.wake).start()
        assert engine.wire.wait(5.0) is False and time.monotonic() - started < 3


def test_waiting_for_a_time_centuries_ahead_ends_when_something_arrives(address: str):
    with hand_engine(address) as engine:
        while engine.wire.wait(0):
            engine.wire.drain()
        threading.Timer(0.05, engine.wire.wake).start()
        assert engine.wire.wait(2**62 / 1e9) is False


def test_a_failing_io_thread_fails_the_step_thread(address: str, monkeypatch: pytest.MonkeyPatch):
    with hand_engine(address) as engine:
        monkeypatch.setattr(engine.wire._switchboard, "_keep_time", lambda check_silence: 1 / 0)
        with pytest.raises(WireFailure, match="ZeroDivisionError"):
            while True:
                engine.wire.wait(3.0)


def test_arithmetic_of_one_peer():
    peer = Peer("a", b"a", heard_ns=0)
    for step_id in range(1, MAX_UNACKNOWLEDGED_STEPS + 1):
        peer.sent(step_id, now_ns=step_id)
    assert not peer.is_behind
    peer.sent(100, now_ns=100)
    assert peer.is_behind
    peer.acknowledged(1)
    assert not peer.is_behind and len(peer.unacknowledged) == MAX_UNACKNOWLEDGED_STEPS
    peer.heard_ns = SILENT_NS
    assert peer.verdict(SILENT_NS + 2) is None
    assert peer.verdict(SILENT_NS + 3) is DetachReason.BEHIND
    peer.acknowledged(100)
    assert peer.verdict(SILENT_NS + 3) is None
    assert peer.verdict(2 * SILENT_NS + 1) is DetachReason.SILENT


def test_hello_shows_the_newest_totals(address: str):
    with hand_engine(address) as engine, dealers(address, "a") as [one]:
        for _ in range(3):
            engine.publish(generation_tokens=9)
        told = one.attach()
        assert told.step_id == 3 and msgspec.msgpack.decode(told.counters)[0] == 3
        assert told.load.frontends == 1
