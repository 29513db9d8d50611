"""A request that no engine takes: what its client is told, and under which reason it is counted."""

import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from frontend.app import build_app
from frontend.streams import EngineLost
from tests.frontend.fakes_client import FakeEngineClient, server_over

ROUTES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}


class Api:
    """`counted` is what was refused since the start, by reason, without the reasons that are at 0."""

    def __init__(self, http: TestClient, engine: FakeEngineClient) -> None:
        self.http = http
        self.engine = engine

    async def refused(self, route: str, stream: bool) -> tuple[str, str]:
        """The message and Retry-After of a 503."""
        async with self.http.post(route, json=ROUTES[route] | {"stream": stream}) as response:
            assert response.status == 503
            error = (await response.json())["error"]
            assert error["type"] == "overloaded_error"
            return error["message"], response.headers["Retry-After"]

    async def counted(self) -> dict[str, int]:
        page = await (await self.http.get("/metrics/frontend")).text()
        lines = [line for line in page.splitlines() if line.startswith("vllm:admission_rejections_total{")]
        found = {line.split('reason="')[1].split('"')[0]: int(line.rsplit(" ", 1)[1]) for line in lines}
        return {reason: count for reason, count in found.items() if count}


@pytest.fixture
async def api():
    engine = FakeEngineClient()
    async with TestClient(TestServer(build_app(server_over(engine)))) as http:
        await (await http.post("/v1/completions", json=ROUTES["/v1/completions"])).read()  # the series have names now
        yield Api(http, engine)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_while_every_engine_finishes_its_last_requests_the_reason_is_draining(api, route, stream):
    api.engine.finish_last()
    message, retry_after = await api.refused(route, stream)
    assert "is shutting down" in message and "lost" not in message and retry_after == "5"
    assert await api.counted() == {"draining": 1}
    ready = await api.http.get("/ready")
    assert ready.status == 503 and "is shutting down" in json.dumps(await ready.json())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_while_an_engine_is_lost_the_reason_is_engine_down(api, route, stream):
    api.engine.lose("the engine at X is not available: it was killed")
    message, retry_after = await api.refused(route, stream)
    assert "it was killed" in message and retry_after == "1"
    assert await api.counted() == {"engine_down": 1}


@pytest.mark.parametrize("how", ["draining", "engine_down"])
async def test_an_engine_that_goes_while_the_prompt_is_tokenised_is_counted_as_the_one_that_went_before(
    api, how, monkeypatch
):
    def submit(*arguments: object, **options: object) -> None:
        if how == "draining":
            api.engine.finish_last()
        else:
            api.engine.lose("it was killed")
        raise EngineLost(api.engine.down_reason)

    monkeypatch.setattr(api.engine, "submit", submit)
    message, _ = await api.refused("/v1/completions", stream=False)
    assert message == api.engine.down_reason
    assert await api.counted() == {how: 1}
