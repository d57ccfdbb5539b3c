"""Request bodies of the Ollama dialect; fields that it does not know are ignored, and told in a header."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .body import Lenient


class Options(Lenient):
    """`options` that have an effect here."""

    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class Asked(Lenient):
    """What /api/generate and /api/chat share."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class GenerateBody(Asked):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool = False
    images: list[Any] | None = None


class OllamaChatBody(Asked):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class EmbedBody(Lenient):
    """POST /api/embed."""

    model: str = Field(min_length=1)
    input: str | list[str]
    truncate: bool | None = None
    keep_alive: float | str | None = None
    dimensions: int | None = None


class OllamaEmbeddingsBody(Lenient):
    """POST /api/embeddings."""

    model: str = Field(min_length=1)
    prompt: str = ""
    keep_alive: float | str | None = None


class ShowBody(Lenient):
    """POST /api/show; `name` is the older word."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None
