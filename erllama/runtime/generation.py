"""The keyword arguments of a generation, typed once for every entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from erllama.middleware import Middleware


class Sampling(TypedDict, total=False):
    """See `erllama.options.GenerationOptions` for meaning, range and default of each."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    grammar: str | None
    grammar_first: bool
    json_schema: Mapping[str, Any] | None
    thinking_budget_tokens: int | None
    stop: str | Sequence[str]
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    on_full: Literal["block", "error"]
    cache: Literal["on", "read", "off"]
    salt: bytes
    prefix_checkpoint_len: int | None
    exact: Literal["session", "cold"] | None
    middleware: Sequence[Middleware]


class Continuation(Sampling, total=False):
    """The same, and whether thinking is told apart."""

    thinking: bool


class Generation(Continuation, total=False):
    """The same, and what names the history a prompt belongs to."""

    session_id: Hashable
    parent_key: bytes | None
