"""Errors as the OpenAI API tells them: a status, and a body ``{"error": {"message", "type", "param", "code"}}``.

What a caller is told is what a FusionError says, which holds no prompt and says what to do. Of everything that was not
foreseen the caller learns nothing but that it happened; the log has the rest.
"""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct
from msgspec.json import encode

from fusion_node.errors import (
    ConfigError,
    ContextTooLong,
    FusionError,
    NoPeers,
    NoRoute,
    PeerError,
    ResourceExhausted,
    UnknownModel,
)

RETRY_AFTER_S = 2
"""For a swarm that lacks a node just now: the search itself has already waited for seconds."""


class ErrorBody(Struct, frozen=True):
    """The inner object of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(FusionError):
    """A request is answered with this error.

    Args:
        param: path of the field that is wrong, like ``messages[0].content``.
        code: for programs, like ``context_length_exceeded``.
        retry_after_s: value of the Retry-After header; None leaves it out.
    """

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
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def encode(self) -> bytes:
        """The body, as JSON."""
        return encode({"error": ErrorBody(str(self), _type_of(self.status), self.param, self.code)})

    def response(self) -> web.Response:
        """The answer to a request of which nothing has been answered yet."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.Response(
            status=self.status, body=self.encode(), content_type="application/json", charset="utf-8", headers=headers
        )


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """The caller has to change the request."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """The caller asks for something that the API has and this gateway has not."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def api_error(error: Exception) -> ApiError:
    """What a caller is told of an error."""
    match error:
        case ApiError():
            return error
        case ContextTooLong():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case ConfigError():
            return bad_request(str(error))
        case NoRoute() | NoPeers():
            return ApiError(503, str(error), code="no_route", retry_after_s=RETRY_AFTER_S)
        case PeerError():
            return ApiError(503, str(error), code="node_failed", retry_after_s=RETRY_AFTER_S)
        case ResourceExhausted():
            return ApiError(503, str(error), code="resource_exhausted", retry_after_s=RETRY_AFTER_S)
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is too large: send at most 1 MiB", code="request_too_large")
        case web.HTTPNotFound():
            return ApiError(404, "there is no such path: the API is below /v1", code="unknown_url")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, f"this path takes {allowed}", code="method_not_allowed")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case _:
            return ApiError(500, "the gateway failed; its log says why", code="internal_error")


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
