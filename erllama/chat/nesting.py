"""How deep JSON goes: what walks it recurses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NESTING = 256  # shim_chat.cpp: MAX_NESTING; Python's stack holds three times as much


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than `MAX_NESTING`."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [each for outer in level for each in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
