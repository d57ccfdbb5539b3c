"""Request bodies of the Anthropic dialect."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .body import Strict


class ThinkingOption(Strict):
    """`thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1, strict=True)
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Strict):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Strict):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None
    task_budget: dict[str, Any] | None = None


class Metadata(Strict):
    """`metadata`."""

    user_id: str | None = None


class CountBody(Strict):
    """POST /v1/messages/count_tokens; what it shares with /v1/messages."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
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
    metadata: Metadata | None = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
