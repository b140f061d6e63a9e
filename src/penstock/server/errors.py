"""Exception -> error JSON, as OpenAI's clients read it, or as Anthropic's do where these ask.

The only mapping; nothing of a stack trace reaches a client.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    RequestError,
    TokenizerError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {
    400: "bad_request",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    429: "over_capacity",
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What a client learns of a failure."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Read by the openai client (`error`), and flat as TensorRT-LLM's clients expect it."""
        kind = _TYPES.get(self.status, "internal_server_error")
        said = {"message": self._message, "type": kind, "param": self.param}
        return {
            "error": {**said, "code": self.code},
            "object": "error",
            **said,
            "code": self.status,
        }

    def as_anthropic_dict(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._message}}

    def encoded(self, path: str) -> bytes:
        """As clients of the API at `path` read it."""
        is_anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
        return msgspec.json.encode(self.as_anthropic_dict() if is_anthropic else self.as_dict())

    @property
    def _message(self) -> str:
        """Words of a template or a library may hold what is no character."""
        return self.message.encode("utf8", "replace").decode()


def explain(error: Exception) -> ErrorBody:
    match error:
        case RequestError():
            return ErrorBody(400, error.code, error.message, error.param)
        case ConfigError():
            return ErrorBody(400, "not_configured", str(error))
        case CapacityError():
            headers = {"retry-after": str(error.retry_after_s)}
            return ErrorBody(429, "over_capacity", str(error), headers=headers)
        case TokenizerError():
            return ErrorBody(500, "tokenizer_failed", str(error))
        case BackendError():
            return ErrorBody(503, "engine_unavailable", str(error))
        case HTTPException():
            status, code = error.status_code, _CODES.get(error.status_code, "http_error")
            return ErrorBody(status, code, error.detail, headers=dict(error.headers or {}))
    # uvicorn drops the connection after an exception; say so.
    headers = {"connection": "close"}
    message = "the server failed to answer this request"
    return ErrorBody(500, "internal_error", message, headers=headers)


def error_response(error: Exception, path: str) -> Response:
    said = explain(error)
    return Response(said.encoded(path), said.status, said.headers, media_type="application/json")


async def on_bug(request: Request, error: Exception) -> Response:
    """The server logs the stack trace once this response has been sent."""
    return error_response(error, request.scope["path"])
