"""Deadlines of requests: the header, what the engine is told, and what a client gets that is too late."""

import asyncio
import json
import types
from dataclasses import replace

import pytest
from aiohttp import ClientConnectionError
from aiohttp.test_utils import TestClient, TestServer

from frontend import completions, deadlines
from frontend.app import build_app
from frontend.deadlines import HEADER, MAX_TIMEOUT_S, Deadline, deadline_of
from frontend.errors import ApiError
from protocol.messages import Finish
from protocol.reasons import FinishReason, RejectReason
from tests.frontend.fakes_client import FakeEngineClient, hello, server_over

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ABORTED = Finish(FinishReason.ABORT, message="the request's deadline passed before it was finished")
NEVER_RAN = Finish(FinishReason.ERROR, message="the deadline passed", rejected=RejectReason.EXPIRED)
TIRED = Finish(FinishReason.ERROR, message="the request waited 2 s", rejected=RejectReason.QUEUE_TIMEOUT)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class TimedEngine(FakeEngineClient):
    """Remembers how much time every request was said to have left."""

    def __init__(self):
        super().__init__(hello())
        self.autoplay = False
        self.remaining_ns = []

    def submit(self, *arguments, remaining_ns=None, **options):
        self.remaining_ns.append(remaining_ns)
        return super().submit(*arguments, **options)

    async def given(self):
        while not self.submitted:
            await asyncio.sleep(0)
        return self.submitted[-1]


class Api:
    def __init__(self, http, engine, server):
        self.http, self.engine, self.server = http, engine, server

    async def post(self, path=COMPLETIONS, timeout="10", **body):
        """(status, parsed answer or events, headers). `timeout`: the header; None sends none."""
        headers = {} if timeout is None else {HEADER: timeout}
        prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        response = await self.http.post(path, json={**prompt, **body}, headers=headers)
        text = await response.text()
        if response.headers["Content-Type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            return response.status, [json.loads(event) for event in events], response.headers
        return response.status, json.loads(text), response.headers

    def asking(self, **options):
        return asyncio.create_task(self.post(**options))

    async def count(self, name, **labels):
        page = await (await self.http.get("/metrics")).text()
        found = [line for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{")]
        wanted = [line for line in found if all(f'{label}="{value}"' in line for label, value in labels.items())]
        return sum(float(line.split(" ")[-1]) for line in wanted)


@pytest.fixture
def clock(monkeypatch):
    """Time stands still for deadlines until a test moves it."""
    hand = Clock()

    def by_hand(headers, default_s, began_s):
        deadline = deadline_of(headers, default_s, began_s)
        return None if deadline is None else replace(deadline, began_s=0.0, clock=hand)

    monkeypatch.setattr(completions, "deadline_of", by_hand)
    return hand


@pytest.fixture
async def api():
    async for made in serving():
        yield made


async def serving(**options):
    engine = TimedEngine()
    server = server_over(engine, **options)
    async with TestClient(TestServer(build_app(server))) as http:
        yield Api(http, engine, server)


# ---- the header ----


@pytest.mark.parametrize(("text", "seconds"), [("1", 1.0), ("0.25", 0.25), (" 86400 ", 86_400.0), ("007.50", 7.5)])
def test_the_header_is_a_decimal_number_of_seconds(text, seconds):
    assert deadline_of([text], None, 5.0) == Deadline(5.0, seconds)


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "-1", "+1", "1e3", "inf", "nan", "1s", "1,5", "0x10", "1_0", "٣", "86401", "9" * 300, ".5"]
)
def test_any_other_header_is_refused_by_name(text):
    with pytest.raises(ApiError) as caught:
        deadline_of([text], None, 0.0)
    assert caught.value.status == 400
    assert caught.value.param == HEADER
    assert caught.value.message.startswith(HEADER)
    assert len(caught.value.message) < 250


def test_a_header_given_twice_is_refused():
    with pytest.raises(ApiError, match="2 times"):
        deadline_of(["1", "1"], None, 0.0)


def test_the_servers_time_is_for_those_who_name_none():
    assert deadline_of([], None, 0.0) is None
    assert deadline_of([], 30.0, 1.0) == Deadline(1.0, 30.0)
    assert deadline_of(["60"], 30.0, 1.0) == Deadline(1.0, 60.0)


def test_what_is_left_shrinks_with_the_time_spent_and_never_below_nothing():
    clock = Clock()
    deadline = Deadline(100.0, 2.0, clock)
    for now_s, left_ns, is_late in ((100.0, 2_000_000_000, False), (101.5, 500_000_000, False), (103.0, 0, True)):
        clock.now_s = now_s
        assert (deadline.remaining_ns, deadline.has_passed) == (left_ns, is_late)


def test_a_clock_that_runs_a_little_slower_than_the_engines_does_not_call_its_word_early():
    clock = Clock()
    deadline = Deadline(0.0, 1000.0, clock)
    clock.now_s = 999.9
    assert deadline.has_passed
    clock.now_s = 990.0
    assert not deadline.has_passed


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_bad_header_is_a_400_before_anything_runs(api, path):
    status, answer, _ = await api.post(path, timeout=str(MAX_TIMEOUT_S + 1))
    assert status == 400
    assert answer["error"]["param"] == HEADER
    assert api.engine.submitted == []


# ---- what the engine is told ----


async def test_the_engine_is_told_what_is_left_and_nothing_without_a_deadline(api, clock):
    first = api.asking(timeout="10", max_tokens=1)
    await api.engine.given()
    second = api.asking(timeout=None, max_tokens=1)
    while len(api.engine.submitted) < 2:
        await asyncio.sleep(0)
    assert api.engine.remaining_ns == [10_000_000_000, None]
    for given in api.engine.submitted:
        given.output(0, [582], finish=Finish(FinishReason.LENGTH))
    assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_time_spent_in_the_frontend_is_taken_off(api, monkeypatch):
    real = completions.time.monotonic
    monkeypatch.setattr(completions, "time", types.SimpleNamespace(monotonic=lambda: real() - 4.0))
    task = api.asking(timeout="10", max_tokens=1)
    (await api.engine.given()).output(0, [582], finish=Finish(FinishReason.LENGTH))
    assert (await task)[0] == 200
    assert 0 < api.engine.remaining_ns[0] <= 6_000_000_000


@STREAMED
async def test_what_is_late_before_it_reached_an_engine_is_refused_and_counted(api, clock, stream, monkeypatch):
    monkeypatch.setattr(completions, "job_of", lambda *_: pytest.fail("it was tokenised for nothing"))
    clock.now_s = 10.0
    status, answer, _ = await api.post(timeout="10", stream=stream)
    assert status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    assert api.engine.submitted == []
    assert await api.count("admission_rejections", reason="expired") == 1
    assert api.server.admission.sequences == api.server.admission.prompt_tokens == 0


async def test_tokenising_that_took_too_long_is_noticed_before_the_engine_is_asked(api, clock, monkeypatch):
    tokenise = completions.job_of

    def slowly(*arguments):
        clock.now_s = 11.0
        return tokenise(*arguments)

    monkeypatch.setattr(completions, "job_of", slowly)
    status, _, _ = await api.post(timeout="10")
    assert status == 504
    assert api.engine.submitted == []


# ---- what the client gets ----


@STREAMED
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_deadline_before_the_first_token_is_a_504_in_both_forms(api, clock, path, stream):
    task = api.asking(path=path, stream=stream)
    given = await api.engine.given()
    clock.now_s = 10.1
    given.output(0, finish=NEVER_RAN)
    status, answer, headers = await task
    assert status == 504
    assert headers["Content-Type"].startswith("application/json")
    assert "within its 10 s" in answer["error"]["message"]
    assert answer["error"]["code"] == "deadline_exceeded"
    assert answer["error"]["type"] == "timeout_error"
    assert await api.count("admission_rejections", reason="expired") == 1
    assert await api.count("request_success") == 0, "it was refused, not finished"


async def test_a_deadline_after_the_first_token_ends_a_stream_with_one_error_event(api, clock):
    body = {"prompt": "x", "stream": True}
    opening = asyncio.create_task(api.http.post(COMPLETIONS, json=body, headers={HEADER: "10"}))
    given = await api.engine.given()
    given.output(0, [582])
    response = await opening  # its first event is out
    clock.now_s = 10.1
    given.output(0, finish=ABORTED)
    assert response.status == 200
    first, last, done = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert json.loads(first[6:])["choices"][0]["text"] == " one"
    assert json.loads(last[6:])["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"
    assert await api.count("request_success", finished_reason="abort") == 1
    assert await api.count("request_success") == 1


async def test_a_deadline_after_the_first_token_is_a_504_without_streaming(api, clock):
    task = api.asking()
    given = await api.engine.given()
    given.output(0, [582])
    clock.now_s = 10.1
    given.output(0, finish=ABORTED)
    status, answer, _ = await task
    assert status == 504
    assert set(answer) == {"error"}
    assert await api.count("request_success", finished_reason="abort") == 1


async def test_every_child_of_a_late_request_is_counted_as_aborted(api, clock):
    task = api.asking(n=3)
    given = await api.engine.given()
    given.output(1, [582])
    clock.now_s = 10.1
    for child in range(3):
        given.output(child, finish=ABORTED)
    assert (await task)[0] == 504
    assert await api.count("request_success", finished_reason="abort") == 3
    assert await api.count("request_success") == 3


@STREAMED
async def test_an_engine_that_does_not_speak_in_time_is_not_waited_for(api, monkeypatch, stream):
    """A step may take seconds. The client has its answer all the same, and the engine is told to stop."""
    monkeypatch.setattr(deadlines, "GRACE_S", 0.0)
    status, answer, _ = await api.post(timeout="0.05", stream=stream)
    assert status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    assert [reason.name for _, reason, _ in api.engine.submitted[0].closes] == ["CLIENT_GONE"]
    assert await api.count("request_success", finished_reason="abort") == 1
    assert api.server.admission.sequences == 0


@STREAMED
async def test_who_waited_too_long_in_the_queue_gets_a_503_and_may_come_back(api, stream):
    task = api.asking(stream=stream, timeout=None)
    (await api.engine.given()).output(0, finish=TIRED)
    status, answer, headers = await task
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert answer["error"]["message"] == "the request waited 2 s"
    assert await api.count("admission_rejections", reason="queue_timeout") == 1


async def test_an_engine_that_ends_a_request_before_its_deadline_is_not_called_a_deadline(api, clock):
    task = api.asking()
    (await api.engine.given()).output(0, finish=Finish(FinishReason.ABORT, message="the engine is shutting down"))
    status, answer, headers = await task
    assert status == 503
    assert "Retry-After" in headers
    assert answer["error"]["message"] == "the engine is shutting down"


async def test_a_wrong_request_stays_a_400_however_late_it_is(api, clock):
    task = api.asking()
    given = await api.engine.given()
    clock.now_s = 11.0
    given.output(0, finish=Finish(FinishReason.ERROR, message="no", rejected=RejectReason.INVALID))
    assert (await task)[0] == 400


async def test_the_servers_default_holds_for_requests_without_a_header(monkeypatch):
    monkeypatch.setattr(deadlines, "GRACE_S", 0.0)
    async for api in serving(request_timeout_s=0.05):
        assert (await api.post(timeout=None))[0] == 504
        task = api.asking(timeout="30", max_tokens=1)
        while len(api.engine.submitted) < 2:
            await asyncio.sleep(0)
        api.engine.submitted[1].output(0, [582], finish=Finish(FinishReason.LENGTH))
        assert (await task)[0] == 200


async def test_a_client_that_does_not_read_is_dropped_at_its_deadline(api, monkeypatch):
    """Its unread answer and its share of the limits would else stay for as long as it likes."""
    monkeypatch.setattr(deadlines, "GRACE_S", 0.0)

    async def full(stream, events):
        await asyncio.Event().wait()  # as a socket whose other end reads nothing

    monkeypatch.setattr("frontend.sse.EventStream.send", full)
    task = api.asking(stream=True, timeout="0.1")
    (await api.engine.given()).output(0, [582])
    with pytest.raises(ClientConnectionError):
        await task
    assert await api.count("request_success", finished_reason="abort") == 1
    assert api.server.admission.sequences == 0
    assert [reason.name for _, reason, _ in api.engine.submitted[0].closes] == ["CLIENT_GONE"]
