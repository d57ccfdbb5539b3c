"""Errors as each dialect words them: the one place where a reason becomes a status and a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from erllama.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    EngineError,
    ErllamaError,
    ModelNotFound,
    Overloaded,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Container

Surface = Literal["openai", "anthropic", "ollama"]

ANTHROPIC_HEADER = "anthropic-version"  # which its clients send with every request
# docs.anthropic.com, "Errors": 529 is overloaded_error; it is no status of HTTP's own.
ANTHROPIC_OVERLOADED = 529
BUSY_REASONS = ("sticky_busy", "seq_capacity", "queue_full", "shutting_down", "model_loading")


def surface_of(path: str, headers: Container[str] = ()) -> Surface:
    """Whose path this is; models are asked for at the same one by OpenAI's clients and Anthropic's."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if (path == "/v1/models" or path.startswith("/v1/models/")) and ANTHROPIC_HEADER in headers:
        return "anthropic"
    if path == "/api" or path.startswith("/api/"):
        return "ollama"
    return "openai"


def as_error(failure: BaseException) -> ErllamaError:
    """What a client is told about any failure; what is not ours to tell stays in the log."""
    if isinstance(failure, EngineError) and isinstance(failure.detail, dict) and "crash" in failure.detail:
        return EngineError("the model's engine failed; the server's log has it", reason=failure.reason)
    if isinstance(failure, ErllamaError):
        return failure
    if isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        return as_error(failure.exceptions[0])
    return ErllamaError("an internal error; the server's log has it", reason="error")


def status_of(error: ErllamaError, surface: Surface) -> int:
    """The HTTP status."""
    if surface == "anthropic" and error.reason in BUSY_REASONS:
        return ANTHROPIC_OVERLOADED
    return error.http_status


def headers_of(error: ErllamaError) -> dict[str, str]:
    """`retry-after`, where waiting helps."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}


def body_of(error: ErllamaError, surface: Surface, request_id: str) -> dict[str, Any]:
    """The JSON of a refused request, and of an error in the middle of a stream."""
    match surface:
        case "anthropic":
            kind = _anthropic_type(error, status_of(error, surface))
            inner = {"type": kind, "message": str(error), "reason": error.reason, **_anthropic_details(error)}
            return {"type": "error", "error": inner, "request_id": request_id}
        case "ollama":
            return {"error": str(error), "reason": error.reason}
        case "openai":
            return {
                "error": {
                    "message": str(error),
                    "type": _openai_type(error),
                    "param": _param(error),
                    "code": _openai_code(error),
                }
            }


def _anthropic_details(error: ErllamaError) -> dict[str, Any]:
    """What Anthropic's package looks for beyond the type, where it does."""
    code = error.detail.get("error_code") if isinstance(error.detail, dict) else None
    return {} if code is None else {"details": {"error_code": code, "unsupported": []}}


def _openai_type(error: ErllamaError) -> str:
    match error:
        case AuthenticationFailed():
            return "authentication_error"
        case RequestError() if error.http_status < 500:
            return "invalid_request_error"
        case Overloaded() if error.http_status == 429:
            return "rate_limit_error"
    return "server_error"


def _openai_code(error: ErllamaError) -> str:
    # OpenAI's own names, where clients look for them.
    return {"context_overflow": "context_length_exceeded", "authentication_error": "invalid_api_key"}.get(
        error.reason, error.reason
    )


def _param(error: ErllamaError) -> str | None:
    key = error.detail.get("key") if isinstance(error.detail, dict) else None
    return None if key is None else str(key)


def _anthropic_type(error: ErllamaError, status: int) -> str:
    match error:
        case AuthenticationFailed():
            return "authentication_error"
        case BodyTooLarge():
            return "request_too_large"
        case ModelNotFound():
            return "not_found_error"
    if status == ANTHROPIC_OVERLOADED:
        return "overloaded_error"
    if status == 404:
        return "not_found_error"
    if status == 504:
        return "timeout_error"
    return "invalid_request_error" if status < 500 else "api_error"
