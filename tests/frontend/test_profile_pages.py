"""POST /start_profile and /stop_profile: who may, what the engine's answers become, and what is refused by name."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from frontend import profiling
from frontend.admin import AdminKeys
from frontend.attachment import Attachment, Expectation
from frontend.engine_families import EngineStatus
from frontend.errors import ApiError
from frontend.profiling import ENGINE_TIMEOUT_S, start_profile, stop_profile
from frontend.server import SERVER
from frontend.streams import EngineLost
from protocol.messages import ProfileAction, ProfileOutcome, ProfileReply
from tests.frontend.fakes_client import FakeEngineClient, server_over
from tests.wiring import EPOCH, hello

KEY = "correct-horse-battery"
ADMIN = {"Authorization": f"Bearer {KEY}"}
STARTED = ProfileReply("0", EPOCH, 1, ProfileOutcome.DONE, "recording")
STOPPED = ProfileReply("0", EPOCH, 1, ProfileOutcome.DONE, "9 steps recorded", "/profiles/drafthouse-0.json.gz", 9)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProfiledEngine(FakeEngineClient):
    """Gives the prepared answers, or raises them."""

    def __init__(self, *answers: ProfileReply | Exception) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[tuple[ProfileAction, float]] = []

    async def profile(self, action: ProfileAction, timeout_s: float, engine_id: str | None = None) -> ProfileReply:
        self.asked.append((action, timeout_s))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body(), content_type="application/json")


def app_over(engine: FakeEngineClient, key_file: Path | None) -> web.Application:
    options = {} if key_file is None else {"admin_key_file": str(key_file)}
    server = server_over(engine, **options)
    server.admin = AdminKeys.load(server.config.admin_key_file)
    app = web.Application(middlewares=[_errors])
    app[SERVER] = server
    app.router.add_post("/start_profile", start_profile)
    app.router.add_post("/stop_profile", stop_profile)
    return app


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
async def engine() -> ProfiledEngine:
    return ProfiledEngine()


@pytest.fixture
async def http(engine: ProfiledEngine, key_file: Path) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(app_over(engine, key_file))) as client:
        yield client


async def test_an_admin_starts_and_stops_and_is_told_where_the_file_is(http: TestClient, engine: ProfiledEngine):
    engine.answers += [STARTED, STOPPED]
    started = await http.post("/start_profile", headers=ADMIN)
    assert (started.status, await started.json()) == (
        200,
        {"status": "started", "engine": "0", "message": "recording"},
    )
    stopped = await http.post("/stop_profile", headers=ADMIN)
    assert (stopped.status, await stopped.json()) == (
        200,
        {
            "status": "stopped",
            "engine": "0",
            "message": "9 steps recorded",
            "path": "/profiles/drafthouse-0.json.gz",
            "num_steps": 9,
        },
    )
    assert engine.asked == [(ProfileAction.START, ENGINE_TIMEOUT_S), (ProfileAction.STOP, ENGINE_TIMEOUT_S)]


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong-but-long-enough"}, {"Authorization": KEY}])
async def test_who_is_no_admin_reaches_no_engine(
    http: TestClient, engine: ProfiledEngine, path: str, headers: dict[str, str]
):
    refused = await http.post(path, headers=headers)
    assert refused.status == 401
    error = (await refused.json())["error"]
    assert "admin key" in error["message"] and KEY not in error["message"]
    assert engine.asked == []


async def test_without_a_key_file_the_answer_says_how_to_get_one(engine: ProfiledEngine):
    async with TestClient(TestServer(app_over(engine, None))) as client:
        refused = await client.post("/start_profile", headers=ADMIN)
        assert refused.status == 401
        assert "--admin-key-file" in (await refused.json())["error"]["message"]
    assert engine.asked == []


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(ProfileOutcome.REFUSED, 400), (ProfileOutcome.CONFLICT, 409), (ProfileOutcome.FAILED, 500)],
)
async def test_the_engines_sentence_reaches_the_admin(
    http: TestClient, engine: ProfiledEngine, outcome: ProfileOutcome, status: int
):
    engine.answers.append(ProfileReply("0", EPOCH, 1, outcome, "the engine's own sentence"))
    answer = await http.post("/start_profile", headers=ADMIN)
    error = (await answer.json())["error"]
    assert (answer.status, error["message"]) == (status, "the engine's own sentence")
    assert error["code"] == f"profile_{outcome.name.lower()}"


async def test_every_outcome_has_a_status():
    assert set(profiling._STATUSES) == set(ProfileOutcome) - {ProfileOutcome.DONE}


async def test_a_lost_and_a_silent_engine_are_said_so(http: TestClient, engine: ProfiledEngine):
    engine.answers += [EngineLost("the engine is not available: it was killed"), TimeoutError()]
    lost = await http.post("/stop_profile", headers=ADMIN)
    assert lost.status == 503 and "it was killed" in (await lost.json())["error"]["message"]
    silent = await http.post("/stop_profile", headers=ADMIN)
    assert silent.status == 504 and "30 s" in (await silent.json())["error"]["message"]


async def test_what_the_bench_client_posts_is_taken_and_sglangs_options_are_refused(
    http: TestClient, engine: ProfiledEngine
):
    engine.answers.append(STARTED)
    bench = {"model": "m", "prompt": "text", "max_tokens": 128, "stream": True, "num_steps": None}
    assert (await http.post("/start_profile", json=bench, headers=ADMIN)).status == 200
    for name, value in (("output_dir", "/tmp/elsewhere"), ("num_steps", 5), ("with_stack", False)):
        refused = await http.post("/start_profile", json={name: value}, headers=ADMIN)
        error = (await refused.json())["error"]
        assert (refused.status, error["param"]) == (400, name) and name in error["message"]
    assert (await http.post("/start_profile", data=b"{not json", headers=ADMIN)).status == 400
    assert len(engine.asked) == 1


class TwoProfiledEngines(ProfiledEngine):
    """Both answer by their own id."""

    @property
    def statuses(self) -> list[EngineStatus]:
        return [EngineStatus(name, f"ipc:///{name}", None) for name in ("0", "1")] + [EngineStatus("2", "x", "down")]

    async def profile(self, action: ProfileAction, timeout_s: float, engine_id: str | None = None) -> ProfileReply:
        answer = await super().profile(action, timeout_s)
        return msgspec.structs.replace(answer, engine_id=engine_id)


async def test_all_engines_are_asked_or_the_one_that_is_named(key_file: Path):
    engine = TwoProfiledEngines()
    async with TestClient(TestServer(app_over(engine, key_file))) as http:
        engine.answers += [STARTED, STARTED]
        started = await (await http.post("/start_profile", headers=ADMIN)).json()
        assert [one["engine"] for one in started["engines"]] == ["0", "1"] and started["status"] == "started"
        engine.answers.append(STOPPED)
        stopped = await (await http.post("/stop_profile?engine=1", headers=ADMIN)).json()
        assert (stopped["engine"], stopped["num_steps"]) == ("1", 9)
        for name in ("2", "7"):
            assert (await http.post(f"/stop_profile?engine={name}", headers=ADMIN)).status == 404
        engine.answers += [STOPPED, ProfileReply("1", EPOCH, 1, ProfileOutcome.CONFLICT, "none runs")]
        refused = await http.post("/stop_profile", headers=ADMIN)
        message = (await refused.json())["error"]["message"]
        assert refused.status == 409 and message == "engine 0: 9 steps recorded; engine 1: none runs"


# ---- the answer's way through an attachment ----


def attached() -> Attachment:
    attachment = Attachment(lambda _: None, Expectation(None, None))
    attachment.apply(hello())
    return attachment


async def test_an_answer_reaches_who_asked_and_a_late_one_nobody():
    attachment = attached()
    first, second = attachment.expect_profile(1), attachment.expect_profile(2)
    attachment.apply(ProfileReply("0", EPOCH, 2, ProfileOutcome.DONE, "second"))
    assert (await second).message == "second" and not first.done()
    first.cancel()
    await asyncio.sleep(0)
    attachment.apply(ProfileReply("0", EPOCH, 1, ProfileOutcome.DONE, "late"))
    assert first.cancelled() and attachment._profiles == {}


async def test_an_answer_is_no_step_and_no_snapshot():
    seen: list[object] = []
    attachment = Attachment(seen.append, Expectation(None, None))
    attachment.apply(hello())
    attachment.apply(ProfileReply("0", EPOCH, 9, ProfileOutcome.DONE, "for nobody"))
    assert [type(message) for message in seen] == [type(hello())] and attachment.applied_step == 0


async def test_who_waits_when_the_engine_is_lost_is_told():
    attachment = attached()
    reply = attachment.expect_profile(1)
    attachment.end("it was killed")
    with pytest.raises(EngineLost, match="it was killed"):
        await reply
