"""What a chat request may say besides its messages and its generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from erllama.errors import InvalidOption
from erllama.options import Rejected, boolean, choice, option, options

if TYPE_CHECKING:
    from erllama.checks import Check

Reasoning = Literal["auto", "off", "inline"]
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


def checked_later(expected: str) -> Check:
    """Refuses what cannot be right; `tools.py` and `schema_of` look at the rest where it is used."""

    def check(value: object) -> object:
        if value is not None and not isinstance(value, (str, Mapping, Sequence)):
            raise Rejected(expected)
        return value

    return check


def template_kwargs(value: object) -> dict[str, Any]:
    """Names and JSON values for the template."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Rejected("a mapping of names to JSON values")
    if own := OWN_VARIABLES & value.keys():
        raise Rejected(f"other names than {min(own)}, which the conversation itself sets")
    if not isinstance(value.get("enable_thinking", True), bool):
        raise Rejected("enable_thinking to be True or False")
    return dict(value)


@options
class ChatOptions:
    """How a conversation is rendered and its answer read.

    `reasoning`: "auto" lets the model think where its template has it think, and keeps that apart from the
    content; "off" asks it not to; "inline" leaves it in the content. `template_kwargs` are further
    variables of the template. `lazy_tool_grammar`: where the model may call tools, a grammar takes over when
    a call begins; without it calls are read as they were written, unless a tool is `strict`.
    `add_generation_prompt=False` renders the messages alone.
    """

    tools: Sequence[Mapping[str, Any]] | None = option(default=None, check=checked_later("a list of tools"))
    tool_choice: str | Mapping[str, Any] = option(
        default="auto", check=checked_later('"auto", "none", "required" or a tool\'s name in a mapping')
    )
    parallel_tool_calls: bool = option(default=True, check=boolean)
    response_format: Mapping[str, Any] | None = option(
        default=None, check=checked_later("a mapping with a type")
    )
    reasoning: Reasoning = option(default="auto", check=choice(*get_args(Reasoning)))
    template_kwargs: Mapping[str, Any] | None = option(default=None, check=template_kwargs)
    lazy_tool_grammar: bool = option(default=True, check=boolean)
    add_generation_prompt: bool = option(default=True, check=boolean)


def schema_of(response_format: object, json_schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The schema that the answer has to satisfy; None if it is free.

    Raises: `InvalidOption` for what is no response format, and for two schemas at once.
    """
    wanted = (
        "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': …}}"
    )
    if response_format is None:
        return json_schema
    if not isinstance(response_format, Mapping):
        raise _bad_format(response_format, wanted)
    found: object
    match response_format.get("type"):
        case "text":
            return json_schema
        case "json_object":
            found = response_format.get("schema", {"type": "object"})
        case "json_schema":
            inner = response_format.get("json_schema")
            found = inner.get("schema") if isinstance(inner, Mapping) else None
        case _:
            raise _bad_format(response_format, wanted)
    if not isinstance(found, Mapping):
        raise _bad_format(response_format, wanted)
    if json_schema is not None:
        raise InvalidOption(
            "give json_schema or response_format, not both", detail={"key": "response_format"}
        )
    return found


def _bad_format(given: object, wanted: str) -> InvalidOption:
    return InvalidOption(
        f"response_format={given!r}: expected {wanted}", detail={"key": "response_format", "value": given}
    )
