"""A request can be given to another engine once, and never by who has left it. When it is: test_lost_engines.py."""

import asyncio

import pytest

from frontend.retry import RetriedStream
from frontend.streams import ALL_CHILDREN, EngineLost, Stream
from protocol.reasons import CloseReason
from tests.wiring import tokens

Closes = list[tuple[int, int, CloseReason, int]]
GONE = (7, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)


class Two:
    """A request at engine a, and the stream it gets at engine b when that is asked for."""

    def __init__(self, n: int = 1, *, has_other: bool = True) -> None:
        self.closes: dict[str, Closes] = {"a": [], "b": []}
        self.first = self._stream("a", n)
        self.second = self._stream("b", n)
        self.asked: list[str] = []
        self._has_other = has_other
        self.stream = RetriedStream(self.first, self._again)

    def _stream(self, engine_id: str, n: int) -> Stream:
        closes = self.closes[engine_id]
        return Stream(7, n, awaits_close=False, send_close=lambda *close: closes.append(close), engine_id=engine_id)

    def _again(self, lost_engine_id: str) -> Stream | None:
        self.asked.append(lost_engine_id)
        return self.second if self._has_other else None


async def test_a_loss_is_told_after_what_came_before_it_and_the_request_goes_on_elsewhere_when_that_is_asked_for():
    two = Two()
    two.first.accept(tokens(7, 0, 5))
    two.first.fail("it was killed")
    assert [output.token_ids for output in await two.stream.next()] == [(5,)]
    with pytest.raises(EngineLost, match="it was killed"):
        await two.stream.next()
    assert two.asked == [] and two.stream.engine_id == "a"
    assert two.stream.restart()
    two.second.accept(tokens(7, 0, 8, 9))
    assert [output.token_ids for output in await two.stream.next()] == [(8, 9)]
    assert two.asked == ["a"] and two.stream.engine_id == "b"


async def test_a_request_is_given_to_another_engine_once():
    two = Two()
    two.first.fail("the first was killed")
    assert two.stream.restart()
    two.second.fail("the second was killed")
    assert not two.stream.restart()
    with pytest.raises(EngineLost, match="the second"):
        await two.stream.next()
    assert two.asked == ["a"]


async def test_without_another_engine_the_loss_stays():
    two = Two(has_other=False)
    two.first.fail("it was killed")
    assert not two.stream.restart()
    with pytest.raises(EngineLost, match="it was killed"):
        await two.stream.next()
    assert two.stream.engine_id == "a" and not two.first.restart()


async def test_closes_go_to_the_engine_that_runs_the_request_now():
    two = Two(n=2)
    two.first.fail("it was killed")
    assert two.stream.restart()
    two.stream.close(0, CloseReason.STOP_STRING, kept=1)
    two.stream.abandon()
    assert two.closes == {"a": [], "b": [(7, 0, CloseReason.STOP_STRING, 1), GONE]}


async def test_what_an_engine_still_runs_that_is_left_for_another_is_closed_there_and_not_heard():
    two = Two()
    waiting = asyncio.create_task(two.stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    assert two.stream.restart()
    two.first.accept(tokens(7, 0, 5))
    two.second.accept(tokens(7, 0, 8))
    assert [output.token_ids for output in await two.stream.next()] == [(8,)]
    assert two.closes == {"a": [GONE], "b": []}


async def test_a_request_whose_client_left_is_not_given_to_another_engine():
    two = Two()
    two.stream.abandon()
    two.first.fail("it was killed")
    assert not two.stream.restart()
    assert two.asked == [] and two.closes["a"] == [GONE]
