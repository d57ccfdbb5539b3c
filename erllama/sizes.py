"""Sizes in bytes, as people read and type them. Standard library only."""

from __future__ import annotations

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def show_bytes(n: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def parse_bytes(text: str) -> int:
    """A size as people type it: 500M, 20G, 1.5g, 4096. Raises: ValueError."""
    trimmed = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = trimmed[-1:] if trimmed[-1:] in UNITS and trimmed[-1:] else ""
    number = float(trimmed[: len(trimmed) - len(unit)])
    if not 0 <= number < float("inf"):
        raise ValueError(f"{text!r} is no size")
    return int(number * 1024 ** UNITS[unit])
