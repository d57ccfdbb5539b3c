"""Request bodies of the OpenAI dialect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Strict

Number = Annotated[float, Field(ge=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
# platform.openai.com, "metadata": sixteen pairs of texts.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
MAX_TOKENS = 1024  # generated where the client does not say


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponsesStreamOptions(Strict):
    """`stream_options` of /v1/responses, which always tell the usage."""

    include_obfuscation: bool = False


class Reasoning(Strict):
    """`reasoning` of /v1/responses."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesText(Strict):
    """`text` of /v1/responses."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


class Sampled(Strict):
    """What chat and text completions share. `top_k` and those after it are erllama's own."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    top_k: int = Field(default=40, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    grammar: str | None = None
    cache: Literal["on", "read", "off"] | None = None
    exact: Literal["session", "cold"] | None = None
    keep_alive: float | str | None = None


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget_tokens: int | None = None


class TextBody(Sampled):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    json_schema: dict[str, Any] | None = None


class EmbeddingsBody(Strict):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class ResponsesBody(Strict):
    """POST /v1/responses."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=40, ge=0)
    text: ResponsesText | None = None
    response_format: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_options: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class TokenizeBody(Strict):
    """POST /tokenize: text, or messages as a chat renders them."""

    model: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special: bool = True
    parse_special: bool = True


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
