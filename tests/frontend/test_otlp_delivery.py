"""Retrying by a fake clock: what is tried again, when, for how long, and what is said about it."""

import logging

import pytest

from frontend.otlp_delivery import LOG_EVERY_S, Delivery
from frontend.otlp_transport import FailureReason, Reply

TAKEN = Reply()
AWAY = Reply(FailureReason.UNAVAILABLE, "nobody there", is_retryable=True)
NO = Reply(FailureReason.REFUSED, "HTTP 400")
BUSY = Reply(FailureReason.THROTTLED, "HTTP 429", is_retryable=True, retry_after_s=3.0)


class Script:
    """A transport that plays replies, and the clock that waiting moves."""

    def __init__(self, *replies: Reply | Exception, seconds_each: float = 0.0) -> None:
        self.replies = list(replies)
        self.seconds_each = seconds_each
        self.now_s = 0.0
        self.waits: list[float] = []
        self.timeouts: list[float] = []
        self.on_wait = lambda: None
        self.delivery = Delivery(self, "http://collector", lambda: self.now_s, self.wait, lambda: 0.5)

    def send(self, body: bytes, timeout_s: float) -> Reply:
        self.timeouts.append(timeout_s)
        self.now_s += self.seconds_each
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds
        self.on_wait()

    def close(self) -> None:
        pass

    def failures(self) -> dict[str, int]:
        return {reason.name.lower(): count for reason, count in self.delivery.failures.items() if count}


def test_what_is_taken_is_sent_once():
    script = Script(TAKEN)
    assert script.delivery.send(b"x", 10.0) is TAKEN
    assert (script.timeouts, script.waits, script.failures()) == ([10.0], [], {})


def test_waits_double_until_the_time_is_over():
    script = Script(AWAY)
    assert script.delivery.send(b"x", 10.0) is AWAY
    assert script.waits == [0.5, 1.0, 2.0, 4.0] and script.now_s < 10.0
    assert script.timeouts == [10.0, 9.5, 8.5, 6.5, 2.5], "each attempt has what the others left"
    assert script.failures() == {"unavailable": 5}


def test_back_off_is_spread_by_a_fifth():
    low, high = Script(AWAY, TAKEN), Script(AWAY, TAKEN)
    low.delivery._jitter, high.delivery._jitter = lambda: 0.0, lambda: 1.0
    low.delivery.send(b"x", 10.0)
    high.delivery.send(b"x", 10.0)
    assert (low.waits, high.waits) == ([pytest.approx(0.4)], [pytest.approx(0.6)])


def test_a_refusal_is_final():
    script = Script(NO)
    assert script.delivery.send(b"x", 10.0) is NO
    assert script.waits == [] and script.failures() == {"refused": 1}


def test_the_collectors_own_delay_wins_over_back_off():
    script = Script(BUSY, TAKEN)
    assert script.delivery.send(b"x", 10.0) is TAKEN
    assert script.waits == [3.0] and script.failures() == {"throttled": 1}


def test_a_delay_beyond_the_time_ends_the_request_and_holds_back_the_next():
    script = Script(Reply(FailureReason.THROTTLED, "HTTP 429", is_retryable=True, retry_after_s=30.0), TAKEN)
    assert script.delivery.send(b"x", 10.0).failure is FailureReason.THROTTLED
    script.delivery.hold()
    assert script.waits == [30.0]
    script.delivery.hold()
    assert script.waits == [30.0], "once"


def test_no_collector_can_hold_us_for_longer_than_a_minute():
    script = Script(Reply(FailureReason.THROTTLED, "HTTP 429", is_retryable=True, retry_after_s=1e9))
    script.delivery.send(b"x", 10.0)
    script.delivery.hold()
    assert script.waits == [60.0]


def test_an_attempt_that_took_all_the_time_is_the_last():
    script = Script(AWAY, seconds_each=10.0)
    assert script.delivery.send(b"x", 10.0) is AWAY
    assert script.failures() == {"unavailable": 1}


def test_without_time_nothing_is_sent():
    script = Script(TAKEN)
    assert script.delivery.send(b"x", 0.0).failure is FailureReason.TIMEOUT
    assert script.timeouts == [] and script.failures() == {"timeout": 1}


def test_hurrying_ends_a_wait_with_one_more_attempt():
    script = Script(AWAY)
    script.on_wait = script.delivery.hurry
    assert script.delivery.send(b"x", 10.0) is AWAY
    assert len(script.timeouts) == 2


def test_an_error_nobody_foresaw_costs_one_request():
    script = Script(RuntimeError("a key in here"))
    assert script.delivery.send(b"x", 10.0).failure is FailureReason.INTERNAL
    assert script.failures() == {"internal": 1}


def test_an_outage_is_two_lines_however_many_requests_it_costs(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    script = Script(AWAY)
    for _ in range(5):
        script.delivery.send(b"x", script.now_s + 10.0)
    script.replies = [TAKEN]
    for _ in range(5):
        script.delivery.send(b"x", script.now_s + 10.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "span export fails endpoint=http://collector reason=unavailable detail='nobody there'",
        f"span export works again endpoint=http://collector failed_for_s={script.now_s - 0.5:.1f}",
    ]


def test_a_connection_that_had_gone_stale_is_no_outage(caplog: pytest.LogCaptureFixture):
    script = Script(AWAY, TAKEN)
    script.delivery.send(b"x", 10.0)
    assert caplog.records == [] and script.failures() == {"unavailable": 1}


def test_a_collector_that_comes_and_goes_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture):
    script = Script(TAKEN)
    for _ in range(20):
        for reply in (NO, TAKEN):
            script.replies = [reply]
            script.delivery.send(b"x", script.now_s + 10.0)
    assert len(caplog.records) == 1
    script.now_s += LOG_EVERY_S
    script.replies = [NO]
    script.delivery.send(b"x", script.now_s + 10.0)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2
