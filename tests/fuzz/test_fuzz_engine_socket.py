"""A live engine hears nonsense on its socket, attached and not, while a frontend streams: nobody is harmed by it."""

import random
import socket
import time
from contextlib import suppress

import msgspec
import zmq

from protocol.codec import decode_from_engine, encode
from protocol.messages import SCHEMA_VERSION, Attach, Detached, Hello
from tests.cases.client import total
from tests.chaos.crowd import Result, assert_laws, crowd, quiet_pages, scrape, scripts
from tests.chaos.members import fleet_in
from tests.fuzz.messages import PAYLOADS, any_value, spoiled
from tests.timing import at_most_s

SEED = 20261130
SECONDS = 6.0
MAX_GROWTH_BYTES = 64 << 20


class Stranger:
    """A socket that attaches and then says anything. Made anew when the engine throws it out."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, rng: random.Random) -> None:
        self.rng = rng
        self.name = f"stranger-{rng.randrange(2**32)}"
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self.socket.setsockopt(zmq.SNDTIMEO, 2000)
        self.socket.connect(address)
        self.is_attached = False

    def attach(self) -> None:
        self.socket.send(encode(Attach(self.name, SCHEMA_VERSION)))

    def speak(self) -> None:
        rng, valid = self.rng, PAYLOADS["from frontend"]
        kind = rng.randrange(6)
        if kind == 0:
            self.socket.send(rng.randbytes(rng.randrange(200)))
        elif kind == 1:
            self.socket.send_multipart([rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 5))])
        elif kind == 2:
            self.socket.send(encode_any(rng))
        elif kind == 3:
            self.socket.send(rng.choice(PAYLOADS["from engine"]))
        else:
            self.socket.send(spoiled(rng.choice(valid[1:]), rng) if kind == 4 else rng.choice(valid[1:]))

    def listen(self) -> bool:
        """Read what there is; False once the engine said goodbye."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            message = decode_from_engine(self.socket.recv(zmq.NOBLOCK))
            self.is_attached = self.is_attached or isinstance(message, Hello)
            if isinstance(message, Detached):
                return not self.is_attached
        return True


def encode_any(rng: random.Random) -> bytes:
    return msgspec.msgpack.encode([rng.randrange(9), *(any_value(rng) for _ in range(rng.randrange(12)))])


def test_nonsense_on_the_engines_socket_harms_nobody():
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with fleet_in(1) as fleet:
        well = fleet.frontends[0]
        before = scrape(well.url, "/metrics/engine")
        memory = fleet.engine.rss_bytes()
        with crowd(fleet, scripts(random.Random(SEED)), 8) as asking:
            said, thrown_out = talk(fleet.address, rng)
            results = asking.finish()
        print(f"{said} messages, thrown out {thrown_out} times, {len(results)} requests")
        assert said > 1000
        assert thrown_out > 0, "an attached stranger was never cut off: its messages were too tame"
        assert {one.kind for one in results} == {"complete"}
        assert len(results) > 50
        at_most_s(max(one.longest_gap_s for one in results), 1.5, "the longest gap of a bystander")
        after = quiet_pages(fleet)[0]
        assert total(after, "drafthouse:refused_messages_total") > 100
        assert fleet.engine.rss_bytes() - memory < MAX_GROWTH_BYTES
        assert "Traceback" not in fleet.engine.log(), fleet.engine.log()[-3000:]
        strangers = [Result("left", well.url, 0.0, 0.0)]  # the totals hold more than the crowd was given
        assert_laws(before, after, [*results, *strangers])


def talk(address: str, rng: random.Random) -> tuple[int, int]:
    """(messages said, times thrown out) within SECONDS."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    said = thrown_out = 0
    try:
        strangers = [Stranger(context, address, rng) for _ in range(3)]
        for one in strangers[:2]:
            one.attach()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            for index, one in enumerate(strangers):
                one.speak()
                said += 1
                if not one.listen():
                    thrown_out += 1
                    one.socket.close(linger=0)
                    strangers[index] = Stranger(context, address, rng)
                    strangers[index].attach()
            if said % 30 == 0:
                raw_bytes(address, rng)
            time.sleep(0.001)
    finally:
        context.destroy(linger=0)
    return said, thrown_out


def raw_bytes(address: str, rng: random.Random) -> None:
    """A connection that does not speak ZeroMQ."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(2)
        with suppress(OSError):  # the engine may hang up in the middle of it
            one.connect(address.removeprefix("ipc://"))
            one.sendall(rng.randbytes(rng.randrange(300)))
