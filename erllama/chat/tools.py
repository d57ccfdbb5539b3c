"""Tools, checked, with schemas that a grammar can enforce; which of them the model may or must call."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from erllama import llama
from erllama.errors import InvalidContent, InvalidGrammar, InvalidOption

from .grammar import schema_text, sealed
from .messages import invalid
from .remembered import Remembered
from .schema import canonical_schema

log = logging.getLogger("erllama.chat")

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
_NO_RULE = re.compile(r"[^a-zA-Z0-9-]")  # what the converter makes a "-" in the names of rules
MAX_BYTES = 32 << 20  # of schemas that are kept: an agent sends the same ones with every request
Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called, in the shape OpenAI gave tools.

    `shown` is what the model reads, `enforced` what the grammar knows: schemas that it holds, and of a tool
    that is `named` none but that. `strict`: whether one of these is held to its schema whatever happens.
    """

    shown: tuple[dict[str, Any], ...] = ()
    enforced: tuple[dict[str, Any], ...] = ()
    choice: Choice = "auto"
    strict: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that may be called."""
        return tuple(tool["function"]["name"] for tool in self.enforced)


def check_tools(tools: object, tool_choice: object) -> Tools:
    """Raises: `InvalidContent` naming the tool's index, `InvalidOption`, `InvalidGrammar` (strict tools)."""
    if tools is None:
        tools = ()
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidContent("tools are a list of tools")
    shown = tuple(_tool(i, tool) for i, tool in enumerate(tools))
    choice, named = _choice(tool_choice, _distinct_names(shown))
    callable_ = [i for i, tool in enumerate(shown) if named in (None, tool["function"]["name"])]
    strict = {i for i in callable_ if tools[i]["function"].get("strict") is True}
    enforced = tuple(_enforced(i, shown[i], strict=i in strict) for i in callable_)
    return Tools(shown, enforced, choice, bool(strict))


def _distinct_names(tools: Sequence[dict[str, Any]]) -> set[str]:
    seen: dict[str, str] = {}  # by the name of the rule, which is what the grammar tells tools apart by
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        rule = _NO_RULE.sub("-", name)
        if (other := seen.get(rule)) is not None:
            alike = "" if other == name else f": {other!r} makes the same rule of the grammar"
            raise invalid(i, f"a second tool named {name!r}{alike}", "tools")
        seen[rule] = name
    return set(seen.values())


def _choice(given: object, names: set[str]) -> tuple[Choice, str | None]:
    named = None
    if isinstance(given, Mapping):
        function = given.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        if given.get("type", "function") != "function" or not isinstance(named, str):
            raise _bad_choice(given)
        if named not in names:
            raise InvalidOption(f"tool_choice names {named!r}, which is not among the tools")
        return "required", named
    match given:
        case "auto" | "none":
            return given, None
        case "required":
            if not names:
                raise InvalidOption("tool_choice='required' needs tools", detail={"key": "tool_choice"})
            return given, None
    raise _bad_choice(given)


def _bad_choice(given: object) -> InvalidOption:
    wanted = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}"
    return InvalidOption(
        f"tool_choice={given!r}: expected {wanted}", detail={"key": "tool_choice", "value": given}
    )


def _tool(index: int, tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise invalid(index, 'expected {"type": "function", "function": {…}}', "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise invalid(index, "it has no function", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            index, f"{name!r} is no name for a tool: letters, digits, _ . : / -, up to 128", "tools"
        )
    unknown = function.keys() - FUNCTION_KEYS
    if unknown:
        raise invalid(index, f"unknown key {min(map(str, unknown))!r} in its function", "tools")
    misplaced = (tool.keys() & FUNCTION_KEYS) - function.keys()
    if misplaced:
        raise invalid(index, f"{min(misplaced)!r} belongs into its function", "tools")
    if function.get("strict") not in (None, True, False):
        raise invalid(index, "its strict is True or False", "tools")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise invalid(index, "its description is text", "tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise invalid(index, "its parameters are a schema of type object", "tools")
    schema_text(parameters)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _enforced(index: int, tool: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The tool with a schema that the converter enforces: its own where that is one."""
    function = tool["function"]
    try:
        text, notes = (_strict if strict else _loose)(schema_text(function["parameters"]))
    except InvalidGrammar as why:
        raise InvalidGrammar(f"tools[{index}] ({function['name']}): {why}", detail=why.detail) from None
    for note in notes:
        _warned(f"{function['name']}: {note}")
    return {**tool, "function": {**function, "parameters": json.loads(text)}}


def _warn(what: str) -> None:
    log.warning("tool %s; its arguments are not held to that", what)


def _enforced_schema(text: str, *, strict: bool) -> tuple[str, tuple[str, ...]]:
    """The schema that is enforced, and what of the given one is not."""
    given = json.loads(text)
    if not given:
        return text, ()
    canonical, notes = canonical_schema({"type": "object", **given}, loosen=not strict)
    try:
        grammar = llama.schema_to_grammar(canonical)
        llama.check_grammar(sealed(grammar))
    except InvalidGrammar as why:
        if strict:
            raise
        return json.dumps({"type": "object"}), (str(why),)
    if not notes and '"pattern"' not in text and _grammar_or_none(given) == grammar:
        return text, ()
    return schema_text(canonical), tuple(map(str, notes))


def _grammar_or_none(schema: dict[str, Any]) -> str | None:
    try:
        return llama.schema_to_grammar(schema)
    except InvalidGrammar:
        return None


def _length(enforced: tuple[str, tuple[str, ...]]) -> int:
    text, notes = enforced
    return len(text) + sum(map(len, notes))


_strict = Remembered(partial(_enforced_schema, strict=True), _length, max_bytes=MAX_BYTES)
_loose = Remembered(partial(_enforced_schema, strict=False), _length, max_bytes=MAX_BYTES)
_warned = Remembered(_warn, lambda _: 0, max_bytes=1 << 20)  # said once: tools come with every request
