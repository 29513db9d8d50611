"""What the handlers of one frontend process share.

Owns nothing but the pairing: the engines, the model's text side, the metrics and the limits. Built by `frontend.app`;
read by `frontend.completions` and `frontend.health`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from frontend.admin import AdminKeys
from frontend.admission import Admission
from frontend.bodies import LARGE_BODY_BYTES
from frontend.config import FrontendConfig
from frontend.engine_families import EngineStatus, EngineView
from frontend.errors import ApiError, clipped, invalid, overloaded
from frontend.gate import Gate
from frontend.generation import Submitter
from frontend.inflate import HEADER, check_encoding, inflate, too_large
from frontend.metrics import FrontendMetrics
from frontend.request_trace import RequestTrace
from frontend.text import Text
from frontend.tracer import Tracer
from protocol.messages import Hello, ProfileAction, ProfileReply

EMBEDDED = "embedded"
DRAINING_RETRY_S = 5  # an engine that ends makes room for another, which has a model to load

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Fenced(Protocol):
    """The part of a fence's result that a scrape looks at."""

    @property
    def missed(self) -> bool: ...


class Engine(Submitter, Protocol):
    """What a frontend needs of the engines behind it (`frontend.engine_pool.EnginePool`)."""

    @property
    def hello(self) -> Hello | None: ...  # the limits of those that take requests; None while none does

    @property
    def down_reason(self) -> str | None: ...

    @property
    def is_draining(self) -> bool: ...  # none takes requests, because all of them finish their last

    @property
    def statuses(self) -> Sequence[EngineStatus]: ...

    async def fence(self) -> Fenced: ...

    async def profile(self, action: ProfileAction, timeout_s: float, engine_id: str | None = None) -> ProfileReply:
        """Of one engine, the only one by default. Raises EngineLost and TimeoutError."""
        ...


@dataclass(slots=True)
class Server:
    """`views` gives the newest snapshot of every engine that ever said Hello."""

    config: FrontendConfig
    engine: Engine
    text: Text
    metrics: FrontendMetrics
    admission: Admission
    views: Callable[[], Sequence[EngineView]]
    model_name: str
    started_s: int  # unix time: `created` of the model
    tracer: Tracer | None = None  # None while tracing is off
    admin: AdminKeys = field(default_factory=AdminKeys)  # none: nobody is an admin
    gate: Gate = field(default_factory=Gate)  # none: everybody may use the API

    def hello(self) -> Hello:
        """What a request must fit. Raises ApiError(503) while no engine takes requests."""
        hello = self.engine.hello
        if hello is None:
            raise self.no_engine()
        self.metrics.attach(hello.engine_id, hello.model_name)
        return hello

    def no_engine(self) -> ApiError:
        """The refusal of a request that no engine takes; counts it."""
        reason = self.engine.down_reason or "no engine is attached"
        if self.engine.is_draining:
            self.metrics.rejected("draining")
            return overloaded(reason, retry_after_s=DRAINING_RETRY_S)
        self.metrics.rejected("engine_down")
        return overloaded(reason)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError(404, model_not_found) unless `name` is the served model, its alias, or absent."""
        aliases = {self.model_name, EMBEDDED} if self.config.model == EMBEDDED else {self.model_name}
        if name is not None and name not in aliases:
            raise ApiError(
                404, f"the model {clipped(name)} does not exist; this server has {self.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip


SERVER = web.AppKey("server", Server)
REQUEST_ID = web.RequestKey("request_id", str)
SCOPE = web.RequestKey("scope", str)  # whose text it is (`frontend.gate`)
TRACE = web.RequestKey("trace", RequestTrace)  # of traced requests only


async def off_loop(size: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run `work` here, or in a thread when it handles so many bytes that other streams would notice."""
    if size <= LARGE_BODY_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def read_body(request: web.Request, limit: int) -> bytes:
    """The request's body, inflated. Raises ApiError 413, before reading one that says it is too large, 415 and 400."""
    encoding = check_encoding(request.headers.get(HEADER, ""))
    length = request.content_length
    if length is not None and length > limit:
        raise too_large(limit)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit) from None
    except RequestPayloadError:
        request.content.feed_eof()  # nobody needs to read on for the rest of it
        request.protocol.close()  # after the answer: where the next request begins cannot be told
        raise invalid("the request body does not fit its Transfer-Encoding header") from None
    return body if encoding == "identity" else await asyncio.to_thread(inflate, body, encoding, limit)
