"""Errors a client sees, in OpenAI's nested shape.

Owns `ApiError` and its JSON; never logs and never holds anything of the request beyond the value it names. Raised by
everything that looks at a request; turned into a response by `frontend.app` or, inside a stream, by `frontend.completions`.
"""

from http import HTTPStatus

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",  # as OpenAI's; the code says which
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",  # a balancer's, whose error bodies are spelled like ours
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request cannot be served. `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """`error.type` of the answer."""
        return _TYPES.get(self.status, HTTPStatus(self.status).phrase.lower().replace(" ", "_"))

    def body(self) -> bytes:
        """Strict JSON: `{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A value of the request is wrong: 400."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """The same request may succeed later: 503 with Retry-After, because clients retry a bare 503 at once."""
    return ApiError(503, message, retry_after_s=retry_after_s)


def clipped(value: object, limit: int = 80) -> str:
    """`repr(value)` short enough for a message: what a client sent may be megabytes long."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
