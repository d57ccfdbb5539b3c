"""A call's arguments as JSON text: whether they are an object, or what a model wrote instead of one."""

from __future__ import annotations

import json
import math
from typing import Any


def decoded(arguments: str) -> dict[str, Any] | None:
    """A call's arguments, or None if they are no JSON object, or have a number that is none (1e999)."""
    try:
        value = json.loads(arguments, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is beyond what a float holds")
    return value


def is_object(arguments: str) -> bool:
    """Whether they are a JSON object, be its numbers what they may."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def is_begun(arguments: str) -> bool:
    """Whether there is more of them than the brace that the parser begins every call with."""
    return arguments.startswith("{") and arguments != "{"


def as_written(parsed: dict[str, Any], *, are_calls_held: bool) -> dict[str, Any]:
    """Where no grammar held calls, their arguments as they were written: the parser makes {} of no object."""
    if are_calls_held:
        return parsed
    calls = [
        call if not (written := call["written"].strip()) or written.startswith("{")
        else {**call, "arguments": _unquoted(written)}
        for call in parsed["tool_calls"]
    ]  # fmt: skip
    return {**parsed, "tool_calls": calls}


def _unquoted(written: str) -> str:
    """The object that a string holds, as OpenAI's own format has it; else what was written."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return value.strip() if isinstance(value, str) and decoded(value) is not None else written
