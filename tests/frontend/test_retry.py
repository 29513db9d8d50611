"""A request whose engine is lost runs once more elsewhere, unless somebody has seen a token of it."""

import asyncio

import pytest

from frontend.retry import RetriedStream
from frontend.streams import ALL_CHILDREN, EngineLost, Stream
from protocol.messages import Finish, SequenceOutput
from protocol.reasons import CloseReason, FinishReason, RejectReason
from tests.wiring import tokens

Closes = list[tuple[int, int, CloseReason, int]]


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


def rejected(reason: RejectReason) -> SequenceOutput:
    return SequenceOutput(7, 0, 0, (), None, None, None, (), Finish(FinishReason.ERROR, message="no", rejected=reason))


async def test_before_the_first_token_a_loss_is_not_noticed():
    two = Two()
    waiting = asyncio.create_task(two.stream.next())
    await asyncio.sleep(0)
    two.first.fail("it was killed")
    two.second.accept(tokens(7, 0, 5, 6))
    assert [output.token_ids for output in await waiting] == [(5, 6)]
    assert two.asked == ["a"] and two.stream.engine_id == "b"


async def test_after_the_first_token_a_loss_is_an_error():
    two = Two()
    two.first.accept(tokens(7, 0, 5))
    await two.stream.next()
    two.first.fail("it was killed")
    with pytest.raises(EngineLost, match="it was killed"):
        await two.stream.next()
    assert two.asked == [] and two.stream.engine_id == "a"


async def test_an_output_without_tokens_does_not_bind_the_request_to_its_engine():
    two = Two()
    two.first.accept(tokens(7, 0))
    assert [output.token_ids for output in await two.stream.next()] == [()]
    two.first.fail("it was killed")
    two.second.accept(tokens(7, 0, 5))
    assert [output.token_ids for output in await two.stream.next()] == [(5,)]


async def test_a_request_is_given_to_another_engine_once():
    two = Two()
    two.first.fail("the first was killed")
    two.second.fail("the second was killed")
    with pytest.raises(EngineLost, match="the second"):
        await two.stream.next()
    assert two.asked == ["a"]


async def test_without_another_engine_the_loss_is_told():
    two = Two(has_other=False)
    two.first.fail("it was killed")
    with pytest.raises(EngineLost, match="it was killed"):
        await two.stream.next()
    assert two.stream.engine_id == "a"


async def test_a_draining_engine_that_turns_it_away_is_no_answer():
    two = Two()
    two.first.accept(rejected(RejectReason.DRAINING))
    two.second.accept(tokens(7, 0, 5))
    assert [output.token_ids for output in await two.stream.next()] == [(5,)]
    full = Two()
    full.first.accept(rejected(RejectReason.QUEUE_FULL))
    assert (await full.stream.next())[0].finish is not None and full.asked == []


async def test_closes_go_to_the_engine_that_runs_the_request_now():
    two = Two(n=2)
    two.first.fail("it was killed")
    two.second.accept(tokens(7, 0, 5))
    await two.stream.next()
    two.stream.close(0, CloseReason.STOP_STRING, kept=1)
    two.stream.abandon()
    assert two.closes == {
        "a": [],
        "b": [(7, 0, CloseReason.STOP_STRING, 1), (7, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)],
    }


async def test_a_request_whose_client_left_is_not_given_to_another_engine():
    two = Two()
    two.stream.abandon()
    two.first.fail("it was killed")
    with pytest.raises(EngineLost):
        await two.stream.next()
    assert two.asked == [] and two.closes["a"] == [(7, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)]
