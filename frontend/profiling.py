"""POST /start_profile and /stop_profile: an admin records what the engine's steps are made of.

Owns these two pages; what is recorded, and for how long at most, is the engine's. Needs an admin key, because a profile slows
every request while it runs. Routed by `frontend.app`.
"""

import asyncio

from aiohttp import web

from frontend.admin import not_admin
from frontend.bodies import decode_body
from frontend.errors import ApiError, clipped, invalid, overloaded
from frontend.health import json_response
from frontend.server import SERVER, Server, read_body
from frontend.streams import EngineLost
from protocol.messages import ProfileAction, ProfileOutcome, ProfileReply

ENGINE_TIMEOUT_S = 30.0  # loading CUPTI, or saving the last window, behind a step of seconds
_STATUSES = {ProfileOutcome.REFUSED: 400, ProfileOutcome.CONFLICT: 409, ProfileOutcome.FAILED: 500}
# SGLang's options of this route. Everything else is ignored: `vllm bench serve --profile` posts a whole completion request.
_REFUSED_OPTIONS = (
    "output_dir", "start_step", "num_steps", "activities", "profile_by_stage", "with_stack", "record_shapes",
    "merge_profiles", "profile_prefix", "profile_stages",
)  # fmt: skip


async def start_profile(request: web.Request) -> web.Response:
    """200 once the engines record; the answer says until when at most."""
    replies = await _asked(request, ProfileAction.START)
    return _answer("started", [{"engine": reply.engine_id, "message": reply.message} for reply in replies])


async def stop_profile(request: web.Request) -> web.Response:
    """200 once the files are whole: `path` on the engine's machine, and how many steps it holds."""
    replies = await _asked(request, ProfileAction.STOP)
    return _answer(
        "stopped",
        [
            {
                "engine": reply.engine_id,
                "message": reply.message,
                "path": reply.path,
                "num_steps": reply.num_steps,
            }
            for reply in replies
        ],
    )


def _answer(status: str, engines: list[dict[str, object]]) -> web.Response:
    """One engine's answer as it is, those of several in a list."""
    return json_response({"status": status, **(engines[0] if len(engines) == 1 else {"engines": engines})})


async def _asked(request: web.Request, action: ProfileAction) -> list[ProfileReply]:
    """The consent of all engines, or of the one that `?engine=ID` names. Raises ApiError for everything else."""
    server = request.app[SERVER]
    _check_admin(server, request)
    _refuse_options(await read_body(request, server.config.max_body_bytes))
    engine_ids = _meant(server, request.query.get("engine"))
    replies = await asyncio.gather(*(_ask(server, action, engine_id) for engine_id in engine_ids))
    refusals = [reply for reply in replies if reply.outcome is not ProfileOutcome.DONE]
    if refusals:
        message = refusals[0].message
        if len(replies) > 1:  # those that did what was asked are not undone: say who did
            message = "; ".join(f"engine {reply.engine_id}: {reply.message}" for reply in replies)
        outcome = refusals[0].outcome
        raise ApiError(_STATUSES[outcome], message, code=f"profile_{outcome.name.lower()}")
    return replies


def _meant(server: Server, name: str | None) -> list[str | None]:
    """Ids of engines; None for whichever is there."""
    attached = [status.engine_id for status in server.engine.statuses if status.reason is None]
    if name is None:
        return list(attached) or [None]
    if name not in attached:
        raise ApiError(404, f"no engine {clipped(name)} is attached to this frontend", param="engine")
    return [name]


async def _ask(server: Server, action: ProfileAction, engine_id: str | None) -> ProfileReply:
    try:
        return await server.engine.profile(action, ENGINE_TIMEOUT_S, engine_id)
    except EngineLost as loss:
        raise overloaded(str(loss)) from None
    except TimeoutError:
        raise ApiError(504, f"the engine did not answer within {ENGINE_TIMEOUT_S:g} s") from None


def _check_admin(server: Server, request: web.Request) -> None:
    if not server.admin.allows(request.headers.get("Authorization")):
        raise not_admin(server.config.admin_key_file)


def _refuse_options(body: bytes) -> None:
    """Raises ApiError(400) for an option that somebody set and that would be ignored."""
    if not body.strip():
        return
    options, _ = decode_body(body, dict[str, object])
    for name in _REFUSED_OPTIONS:
        if options.get(name) is not None:
            raise invalid(f"{name} is not supported: --profile-dir is the engine's, and the rest is fixed", name)
