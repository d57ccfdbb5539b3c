"""Request bodies of the Anthropic dialect."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .body import Strict


class CountBody(Strict):
    """POST /v1/messages/count_tokens; what it shares with /v1/messages."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
