"""Which requests are traced: the meeting of the caller's headers, the sampler, the rate limit and the admin's wish.

Owns the decision per request and its counting. Never makes a span itself. Called by `frontend.app` once per request, and
only while tracing is on.
"""

from dataclasses import dataclass

from aiohttp import web

from frontend.errors import ApiError, clipped
from frontend.metrics import FrontendMetrics
from frontend.request_trace import RequestTrace
from frontend.spans import Sampled, Surroundings, Trace, TraceLevel
from frontend.trace_context import RateLimit, Sampler, new_trace_id, read_caller

LEVEL_HEADER = "X-Trace-Level"
TRACE_ID_HEADER = "X-Trace-Id"


@dataclass(slots=True)
class Tracer:
    """Decides, and begins the traces of those it takes. `level` is what a request without a wish of its own gets."""

    around: Surroundings
    sampler: Sampler
    limit: RateLimit
    level: TraceLevel
    metrics: FrontendMetrics
    follows_callers: bool = True  # False: OTEL_PROPAGATORS leaves tracecontext out

    def begin(self, request: web.Request, name: str, level: TraceLevel | None) -> RequestTrace | None:
        """The trace of this request, None when it is not traced. `level`: the admin's, None for the server's."""
        caller, is_malformed = read_caller(request.headers) if self.follows_callers else (None, False)
        if is_malformed:
            self.metrics.malformed_traceparent()
        trace_id = new_trace_id() if caller is None else caller.trace_id
        wanted = self.level if level is None else level
        if wanted is TraceLevel.OFF or not self.sampler.takes(trace_id, caller):
            self.metrics.trace_decided("unsampled")
            return None
        if not self.limit.takes():
            self.metrics.trace_decided("limited")
            return None
        self.metrics.trace_decided("sampled")
        state, parent_id = ("", None) if caller is None else (caller.state, caller.parent_id)
        return RequestTrace(self.around, Sampled(Trace(trace_id, state), parent_id, wanted), name)


def level_asked(value: str, is_admin: bool, is_tracing: bool) -> TraceLevel:
    """The level that the header asks for. Raises ApiError for a wish that cannot be granted."""
    if not is_admin:
        raise ApiError(
            403, f"{LEVEL_HEADER} needs the admin key (--admin-key-file) as bearer token", param=LEVEL_HEADER
        )
    if value not in ("0", "1", "2", "3"):
        raise ApiError(400, f"{LEVEL_HEADER} must be 0, 1, 2 or 3, got {clipped(value)}", param=LEVEL_HEADER)
    if not is_tracing and value != "0":
        raise ApiError(
            400, f"{LEVEL_HEADER}: tracing is off on this server (see OTEL_EXPORTER_OTLP_ENDPOINT)", param=LEVEL_HEADER
        )
    return TraceLevel(int(value))
