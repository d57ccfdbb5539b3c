"""Lengths of time as Ollama's clients write them."""

from __future__ import annotations

import math
import re

from .body import refuse

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
LONGEST_S = 10 * 365 * 86400.0


def seconds_of(given: float | str | None) -> float | None:
    """Seconds; numbers are seconds, "1h30m" is 5400, below 0 means for ever (-1). None stays None.

    Raises: `InvalidOption`.
    """
    if given is None:
        return None
    if isinstance(given, str):
        given = _parsed(given.strip())
    if not math.isfinite(given) or given > LONGEST_S:
        raise refuse("keep_alive", "a length of time of at most ten years")
    return -1.0 if given < 0 else float(given)


def _parsed(text: str) -> float:
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"\d+(\.\d+)?", body):
        return sign * float(body)
    if not body or PART.sub("", body):
        raise refuse("keep_alive", f'seconds, or a length of time such as "5m", not {text[:40]!r}')
    return sign * sum(float(number) * UNITS[unit] for number, unit in PART.findall(body))
