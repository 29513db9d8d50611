"""POST /start_profile and /stop_profile: an admin records what the engine's steps are made of.

Owns these two pages; what is recorded, and for how long at most, is the engine's. Needs an admin key, because a profile slows
every request while it runs. Routed by `frontend.app`.
"""

from typing import Protocol, runtime_checkable

from aiohttp import web

from frontend.admin import not_admin
from frontend.bodies import decode_body
from frontend.errors import ApiError, invalid, overloaded
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


@runtime_checkable
class Profiled(Protocol):
    """The part of the engine client that these pages need."""

    async def profile(self, action: ProfileAction, timeout_s: float) -> ProfileReply:
        """Raises EngineLost and TimeoutError."""
        ...


async def start_profile(request: web.Request) -> web.Response:
    """200 once the engine records; the answer says until when at most."""
    reply = await _asked(request, ProfileAction.START)
    return json_response({"status": "started", "engine": reply.engine_id, "message": reply.message})


async def stop_profile(request: web.Request) -> web.Response:
    """200 once the file is whole: `path` on the engine's machine, and how many steps it holds."""
    reply = await _asked(request, ProfileAction.STOP)
    return json_response(
        {
            "status": "stopped",
            "engine": reply.engine_id,
            "message": reply.message,
            "path": reply.path,
            "num_steps": reply.num_steps,
        }
    )


async def _asked(request: web.Request, action: ProfileAction) -> ProfileReply:
    """The engine's consent. Raises ApiError for everything else."""
    server = request.app[SERVER]
    _check_admin(server, request)
    _refuse_options(await read_body(request, server.config.max_body_bytes))
    engine = server.engine
    if not isinstance(engine, Profiled):
        raise ApiError(501, "this frontend's engine connection cannot ask for profiles")
    try:
        reply = await engine.profile(action, ENGINE_TIMEOUT_S)
    except EngineLost as loss:
        raise overloaded(str(loss)) from None
    except TimeoutError:
        raise ApiError(504, f"the engine did not answer within {ENGINE_TIMEOUT_S:g} s") from None
    if reply.outcome is not ProfileOutcome.DONE:
        raise ApiError(_STATUSES[reply.outcome], reply.message, code=f"profile_{reply.outcome.name.lower()}")
    return reply


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
