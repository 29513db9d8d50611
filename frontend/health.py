"""What operators and their tools read: liveness, readiness, version, models, metrics.

Owns these small pages. Never touches requests in flight. Routed by `frontend.app`. All are open; none changes anything.
"""

from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web

from frontend.engine_families import EngineStatus
from frontend.server import SERVER, Server


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def version() -> str:
    """The installed distribution's version; a source tree that was never installed says so."""
    try:
        return metadata.version("drafthouse")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"


async def health(request: web.Request) -> web.Response:
    """Live: this process answers. Says nothing of the engine, so that an engine's death restarts no frontend."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when a request sent now would be served by some engine, else 503 with the reason. Every engine is listed."""
    server = request.app[SERVER]
    engines = [_engine(status) for status in server.engine.statuses]
    if server.admission.is_leaving:
        return _not_ready("this frontend is shutting down", engines)
    if server.engine.hello is None:
        return _not_ready(server.engine.down_reason or "no engine", engines)
    return json_response({"status": "ready", "engine": server.engine.hello.engine_id, "engines": engines})


async def show_version(request: web.Request) -> web.Response:
    return json_response({"version": version()})


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[SERVER])]})


async def model(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    server.check_model(request.match_info["model"])
    return json_response(_model(server))


async def metrics(request: web.Request) -> web.Response:
    return await _metrics(request, "all")


async def metrics_engine(request: web.Request) -> web.Response:
    return await _metrics(request, "engine")


async def metrics_frontend(request: web.Request) -> web.Response:
    return await _metrics(request, "frontend")


async def _metrics(request: web.Request, scope: str) -> web.Response:
    server = request.app[SERVER]
    if scope != "frontend":
        # Without this a scrape could miss the step that another frontend's client has just seen the end of.
        fence = await server.engine.fence()
        if fence.missed:
            server.metrics.fence_missed()
    views = server.views()
    for view in views:
        if view.up:
            server.metrics.attach(view.hello.engine_id, view.hello.model_name)
    page, content_type = server.metrics.render(views, request.headers.get("Accept", ""), scope)
    return web.Response(body=page, headers={"Content-Type": content_type})


def _engine(status: EngineStatus) -> dict[str, object]:
    return {
        "id": status.engine_id,
        "address": status.address,
        "ready": status.reason is None,
        "reason": status.reason,
    }


def _not_ready(reason: str, engines: list[dict[str, object]]) -> web.Response:
    return json_response({"status": "not ready", "reason": reason, "engines": engines}, 503)


def _model(server: Server) -> dict[str, Any]:
    created = server.started_s
    permission = {
        "id": f"modelperm-{server.model_name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": server.model_name,
        "object": "model",
        "created": created,
        "owned_by": "drafthouse",
        "root": server.config.model,
        "parent": None,
        "max_model_len": max_model_len(server),
        "permission": [permission],
    }


def max_model_len(server: Server) -> int:
    """The engines' limit, or the model's own while no engine is attached."""
    hello = server.engine.hello
    return server.text.context_length if hello is None else hello.capacity.max_model_len
