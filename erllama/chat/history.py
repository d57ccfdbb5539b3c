"""Calls of earlier turns in the words in which they were sampled, whatever a client made of them.

Clients decode a call's arguments and send them back in another order. A grammar lets a model write them in
one order only: what is required first, then the rest, both as the schema lists them. So that order is put
back, and the prompt begins as it did, also in a process that never saw the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tools import Tools


def with_calls_as_sampled(messages: Sequence[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The messages, with the arguments of every call of one of the tools in the order of its schema."""
    schemas = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in (*tools.shown, *tools.enforced)
    }
    return [_message(message, schemas) if message.get("tool_calls") else message for message in messages]


def _message(message: dict[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = in_order(function["arguments"], schemas.get(function["name"]))
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def in_order(arguments: str, schema: Any) -> str:
    """JSON text with its keys in the order in which the schema's grammar has them; else as it is."""
    given = json.loads(arguments)
    ordered = _ordered(given, schema)
    if _keys(ordered) == _keys(given):
        return arguments
    try:
        return json.dumps(ordered, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number beyond what Python's floats hold
        return arguments


def _ordered(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_ordered(each, schema.get("items")) for each in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    required = schema.get("required")
    names = set(required) if isinstance(required, (list, tuple)) else set()
    order = [
        *(name for name in properties if name in names),
        *(n for n in properties if n not in names),
        *value,
    ]
    return {
        name: _ordered(value[name], properties.get(name)) for name in dict.fromkeys(order) if name in value
    }


def _keys(value: Any) -> Any:
    """The shape of a value: its keys in their order, all the way down."""
    if isinstance(value, dict):
        return [(name, _keys(each)) for name, each in value.items()]
    return [_keys(each) for each in value] if isinstance(value, list) else None
