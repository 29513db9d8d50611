"""One request's outputs: order, gaps, children, ends. No sockets."""

import asyncio

import pytest

from frontend.streams import ALL_CHILDREN, EngineLost, Stream
from protocol.reasons import CloseReason, FinishReason
from tests.wiring import tokens

Sent = list[tuple[int, int, CloseReason, int]]


def stream(n: int = 1, *, awaits_close: bool = False) -> tuple[Stream, Sent]:
    sent: Sent = []
    return Stream(7, n, awaits_close=awaits_close, send_close=lambda *close: sent.append(close)), sent


async def test_children_are_counted_apart():
    one, _ = stream(n=2)
    one.accept(tokens(7, 0, 1, 2))
    one.accept(tokens(7, 0, 5, index=1))
    one.accept(tokens(7, 2, 3, finish=FinishReason.STOP))
    assert one.is_child_done(0) and not one.is_child_done(1) and not one.is_done
    one.accept(tokens(7, 1, 6, index=1, finish=FinishReason.LENGTH))
    assert one.is_done
    assert [(o.index, o.token_ids) for o in await one.next()] == [(0, (1, 2)), (1, (5,)), (0, (3,)), (1, (6,))]
    assert await one.next() == []


@pytest.mark.parametrize("first_index", [0, 1, 3, 9])
async def test_any_gap_or_repetition_fails_the_stream_after_what_arrived(first_index: int):
    one, sent = stream()
    one.accept(tokens(7, 0, 1, 2))
    one.accept(tokens(7, first_index, 9))
    one.accept(tokens(7, 2, 3))
    assert [o.token_ids for o in await one.next()] == [(1, 2)]
    with pytest.raises(EngineLost, match="token 2 expected"):
        await one.next()
    assert sent == [(7, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)] and one.is_done


async def test_an_empty_output_behind_lost_tokens_fails_too():
    one, _ = stream()
    one.accept(tokens(7, 4, finish=FinishReason.STOP))
    with pytest.raises(EngineLost):
        await one.next()


async def test_a_waiting_reader_hears_of_the_loss():
    one, _ = stream()
    waiting = asyncio.create_task(one.next())
    await asyncio.sleep(0)
    one.fail("it died")
    one.fail("and again")
    with pytest.raises(EngineLost, match="it died"):
        await waiting


async def test_nothing_is_sent_for_children_that_are_done_or_lost():
    one, sent = stream()
    one.accept(tokens(7, 0, 1, finish=FinishReason.STOP))
    one.close(0, CloseReason.CLIENT_GONE)
    one.abandon()
    lost, sent_by_lost = stream()
    lost.fail("it died")
    lost.close(0, CloseReason.CLIENT_GONE)
    lost.abandon()
    assert sent == [] and sent_by_lost == []


async def test_a_finished_stream_is_not_failed_by_a_later_loss():
    one, _ = stream()
    one.accept(tokens(7, 0, 1, finish=FinishReason.STOP))
    one.fail("it died")
    assert len(await one.next()) == 1 and await one.next() == []


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_an_end_without_answer_needs_none(reason: FinishReason):
    one, _ = stream(awaits_close=True)
    one.accept(tokens(7, 0, finish=reason))
    assert one.is_done


async def test_an_abandoned_stream_keeps_nothing_and_ends_when_the_engine_answers():
    one, sent = stream(n=2, awaits_close=True)
    one.accept(tokens(7, 0, 1))
    one.abandon()
    one.accept(tokens(7, 1, 2))
    assert sent == [(7, ALL_CHILDREN, CloseReason.CLIENT_GONE, 0)] and not one.is_done
    for index, first in ((0, 2), (1, 0)):
        one.accept(tokens(7, first, index=index, finish=FinishReason.ABORT))
    assert one.is_done and await one.next() == []
