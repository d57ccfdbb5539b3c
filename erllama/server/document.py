"""The OpenAPI document, as the routes really answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

from .failures import surface_of

if TYPE_CHECKING:
    from fastapi import FastAPI

ABOUT = """\
The APIs of OpenAI, Anthropic and Ollama over local models. Answers are JSON, or streams in each API's own
format: server-sent events, and one JSON object a line for Ollama's."""

ERRORS: dict[str, dict[str, Any]] = {
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                },
            }
        },
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message", "reason"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "reason": {"type": "string"},
                },
            },
            "request_id": {"type": "string"},
        },
    },
    "ollama": {
        "type": "object",
        "required": ["error", "reason"],
        "properties": {"error": {"type": "string"}, "reason": {"type": "string"}},
    },
}


# Of a route that only says what is not there.
NOT_OFFERED: dict[int | str, dict[str, Any]] = {
    501: {"description": "Not offered", "content": {"application/json": {"schema": ERRORS["ollama"]}}}
}
# Paths at which a model may be asked for what it cannot do, such as tools without a template for them.
ASKS_MODEL = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"),
    *(
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/generate",
        "/api/chat",
        "/api/embed",
        "/api/embeddings",
    ),
)
# Paths that answer as a stream where that is asked for, and its type.
STREAMS = {
    **dict.fromkeys(
        ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"), "text/event-stream"
    ),
    **dict.fromkeys(("/api/generate", "/api/chat"), "application/x-ndjson"),
}


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=app.version,
            openapi_version="3.1.0",
            description=ABOUT,
            routes=app.routes,
        )
        for path, operations in made["paths"].items():
            for operation in operations.values():
                _correct(operation, path)
        schemas = made.get("components", {}).get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema


def _correct(operation: dict[str, Any], path: str) -> None:
    """Refusals have the surface's own shape and are never FastAPI's 422; streams have their type."""
    responses = operation["responses"]
    if path in STREAMS:
        responses["200"]["content"][STREAMS[path]] = {}
    responses.pop("422", None)
    schema = ERRORS[surface_of(path)]
    refused = {"description": "Refused or failed", "content": {"application/json": {"schema": schema}}}
    if path in ASKS_MODEL:
        responses["501"] = {**refused, "description": "The model cannot do that"}
    responses["4XX"] = responses["5XX"] = refused
