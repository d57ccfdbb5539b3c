"""What callers wrote in a conversation's inputs: every text of it changed, nothing else.

Messages (content, reasoning, names, ids, calls), tools, the answer's schema and the template's variables.
What is not changed here a template can turn into control tokens, so whatever inputs come to have belongs
here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .schema_facts import CONSTRAINTS

if TYPE_CHECKING:
    from .markup import Markup

NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentRequired", "dependentSchemas")
WORDS = CONSTRAINTS | {*NAMES, "title", "description", "default", "examples", "format", "name", "parameters"}
HARMLESS_PATTERN = "^x$"
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)", re.DOTALL)


class Change(Protocol):
    """What becomes of a text, the parts of a content, a property's name, a regex, arguments as JSON text."""

    def text(self, text: str) -> str: ...

    def said(self, parts: list[str], role: str) -> list[str]: ...

    def name(self, name: str) -> str: ...

    def pattern(self, pattern: str) -> str: ...

    def arguments(self, text: str) -> str: ...


class Marked:
    """Control-token text split by a mark; in an assistant's words the spared texts stay."""

    def __init__(self, markup: Markup, mark: str, spared: Sequence[str]) -> None:
        self._markup, self._mark, self._spared = markup, mark, tuple(spared)

    def text(self, text: str) -> str:
        return self._markup.split([text], self._mark)[0]

    def said(self, parts: list[str], role: str) -> list[str]:
        return self._markup.split(parts, self._mark, self._spared if role == "assistant" else ())

    name = pattern = arguments = text


class Neutral:
    """Nothing that a control token could begin with; in an assistant's words the spared texts stay."""

    def __init__(self, markup: Markup, spared: Sequence[str]) -> None:
        self._markup, self._spared = markup, tuple(spared)

    def text(self, text: str) -> str:
        return self._markup.neutral(text)

    def said(self, parts: list[str], role: str) -> list[str]:
        return [self._markup.neutral(part, self._spared if role == "assistant" else ()) for part in parts]

    def name(self, name: str) -> str:
        return self._markup.neutral_name(name)

    def pattern(self, pattern: str) -> str:
        return pattern if self.text(pattern) == pattern else HARMLESS_PATTERN

    def arguments(self, text: str) -> str:
        # How a number is written makes no token.
        given = json.loads(text, parse_float=lambda _: 0.5)
        changed = changed_values(given, self)
        return text if changed == given else json.dumps(changed, ensure_ascii=False)


def changed_inputs(inputs: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """`ChatTemplates.apply`'s inputs, changed."""
    made = dict(inputs)
    made["messages"] = [_message(message, change) for message in inputs["messages"]]
    if "tools" in inputs:
        made["tools"] = [_tool(tool, change) for tool in inputs["tools"]]
    if "json_schema" in inputs:
        made["json_schema"] = _schema(inputs["json_schema"], change)
    kwargs = inputs.get("template_kwargs", {})
    made["template_kwargs"] = {key: changed_values(value, change) for key, value in kwargs.items()}
    return made


def changed_values(value: Any, change: Change) -> Any:
    """JSON with every text in it changed, names included."""
    if isinstance(value, str):
        return change.text(value)
    if isinstance(value, Mapping):
        return {_name(key, change): changed_values(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [changed_values(each, change) for each in value]
    return value


def _name(key: Any, change: Change) -> Any:
    return change.name(key) if isinstance(key, str) else key  # a number is no text


def without_escapes(arguments: str) -> str:
    """JSON text with the escapes that it needs and no others: they hide what a template will write."""
    return _ESCAPE.sub(lambda found: _plain(found[0]), arguments)


def _plain(escape: str) -> str:
    if escape[1] not in "u/":
        return escape
    return json.dumps(json.loads(f'"{escape}"'), ensure_ascii=False)[1:-1]


def _message(message: Mapping[str, Any], change: Change) -> dict[str, Any]:
    made = dict(message)
    role, content = message["role"], message["content"]
    if isinstance(content, list):
        texts = change.said([part["text"] for part in content], role)
        made["content"] = [{**part, "text": text} for part, text in zip(content, texts, strict=True)]
    else:
        made["content"] = change.said([content], role)[0]
    if "reasoning_content" in message:
        made["reasoning_content"] = change.said([message["reasoning_content"]], role)[0]
    for key in ("name", "tool_call_id"):
        if key in message:
            made[key] = change.text(message[key])
    if "tool_calls" in message:
        made["tool_calls"] = [_call(call, change) for call in message["tool_calls"]]
    return made


def _call(call: Mapping[str, Any], change: Change) -> dict[str, Any]:
    function = call["function"]
    made = {
        **call,
        "function": {
            **function,
            "name": change.text(function["name"]),
            "arguments": change.arguments(function["arguments"]),
        },
    }
    if "id" in call:
        made["id"] = change.text(call["id"])
    return made


def _tool(tool: Mapping[str, Any], change: Change) -> dict[str, Any]:
    function = tool["function"]
    return {
        **tool,
        "function": {
            **function,
            "name": change.text(function["name"]),
            "description": change.text(function["description"]),
            "parameters": _schema(function["parameters"], change),
        },
    }


def _schema(schema: Any, change: Change, *, are_names: bool = False) -> Any:
    """A schema; where `are_names`, its keys are names that the author chose, and no keywords."""
    if isinstance(schema, str):
        return change.text(schema)
    if isinstance(schema, (list, tuple)):
        return [_schema(each, change) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if not are_names and key == "pattern" and isinstance(value, str):
            made[key] = change.pattern(value)
        elif not are_names and key == "required" and isinstance(value, (list, tuple)):
            made[key] = [change.name(name) if isinstance(name, str) else name for name in value]
        else:
            own = _name(key, change) if are_names or key not in WORDS else key
            made[own] = _schema(value, change, are_names=not are_names and key in NAMES)
    return made
