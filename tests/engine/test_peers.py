"""An engine notices when what a frontend sent did not arrive exactly once."""

import pytest

from engine.peers import Peer
from protocol.messages import Close, Fence, Ping
from protocol.reasons import CloseReason, DetachReason

CLOSE = Close(1, 0, CloseReason.CLIENT_GONE, 0)


@pytest.mark.parametrize(
    ("arrived", "num_sent", "verdict"),
    [
        ((), 0, None),
        ((Fence(1), CLOSE), 2, None),
        ((Fence(1), Ping(0, 1), CLOSE, Ping(0, 2)), 2, None),
        ((CLOSE,), 2, DetachReason.LOST),
        ((Fence(1), Fence(1)), 1, DetachReason.LOST),
        ((CLOSE,), None, None),
    ],
    ids=["nothing sent", "all there", "signs of life are not counted", "one lost", "one repeated", "not told"],
)
def test_a_ping_tells_whether_everything_before_it_arrived(arrived, num_sent, verdict):
    peer = Peer("a", b"a", heard_ns=0)
    for message in arrived:
        assert peer.heard(message, now_ns=1) is None
    assert peer.heard(Ping(7, num_sent), now_ns=2) is verdict
    assert peer.heard_ns == 2


def test_a_ping_acknowledges_whatever_it_says_of_losses():
    peer = Peer("a", b"a", heard_ns=0)
    for step_id in (1, 2, 3):
        peer.sent(step_id, now_ns=0)
    assert peer.heard(Ping(2, 5), now_ns=1) is DetachReason.LOST
    assert [step_id for step_id, _ in peer.unacknowledged] == [3]
