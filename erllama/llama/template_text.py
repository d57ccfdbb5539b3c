"""What a chat template's text shows before it is run: recursion without end, and absurd amounts.

llama-common's interpreter recurses with macros and knows no limits, so such a template would end the process
or keep a thread for minutes. Only what cannot be meant is refused: macros that call themselves under a
condition are common (they walk schemas).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from erllama.errors import InvalidContent

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 1_000_000  # repetitions that a template may write out as a number

_OPENS = re.compile(r"\{[%{#]")
_CLOSES = {"{%": re.compile(r"%\}|['\"]"), "{{": re.compile(r"\}\}|['\"]"), "{#": re.compile(r"#\}")}
_QUOTED = {"'": re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL), '"': re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)}
_WORD = re.compile(r"^\{%[-+]?\s*(\w+)(?:\s+(\w+))?")
_CALLED = re.compile(r"\b(\w+)\s*\(")
_DEPENDS = re.compile(r"\b(?:if|and|or)\b")
_AMOUNT = re.compile(r"\brange\s*\(([^()]*)|\*\s*(\d+)|(\d+)\s*\*")
_CONDITIONS = {"if": 1, "for": 1, "endif": -1, "endfor": -1}


def check_text(source: str) -> None:
    """Raise `InvalidContent` for a template that cannot come to an end."""
    calls = _certain_calls(source)
    for name in calls:
        if _calls_itself(name, calls):
            raise InvalidContent(
                f"the chat template cannot be used: its macro {name!r} calls itself without end"
            )


def _certain_calls(source: str) -> dict[str, set[str]]:
    """Of each macro, what it calls whatever its arguments are."""
    calls: dict[str, set[str]] = {}
    inside: list[tuple[str, int]] = []  # the macros around, each with its conditions open
    for code in _tags(source):
        _check_amounts(code)
        begun = _WORD.match(code)
        word, name = begun.groups() if begun else (None, None)
        if word == "macro" and name:
            inside.append((name, 0))
            calls[name] = set()
        elif not inside:
            continue
        elif word == "endmacro":
            inside.pop()
        elif word in _CONDITIONS:
            inside[-1] = (inside[-1][0], inside[-1][1] + _CONDITIONS[word])
        elif inside[-1][1] == 0 and not _DEPENDS.search(code):
            calls[inside[-1][0]].update(_CALLED.findall(code))
    return calls


def _tags(source: str) -> Iterator[str]:
    """The code of every tag, its strings emptied. Looks at each character once."""
    at = 0
    while (opens := _OPENS.search(source, at)) is not None:
        code, at = opens[0], opens.end()
        while True:
            found = _CLOSES[opens[0]].search(source, at)
            if found is None:
                return
            code += source[at : found.start()]
            at = found.end()
            if found[0] not in _QUOTED:
                break
            quoted = _QUOTED[found[0]].match(source, at)
            if quoted is None:
                return
            at = quoted.end()
            code += "''"
        if opens[0] != "{#":
            yield code


def _calls_itself(name: str, calls: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    left = list(calls[name])
    while left:
        called = left.pop()
        if called == name:
            return True
        if called in calls and called not in seen:
            seen.add(called)
            left += calls[called]
    return False


def _check_amounts(code: str) -> None:
    for found in _AMOUNT.finditer(code):
        numbers = re.findall(r"\d+", found[1]) if found[1] else [found[2] or found[3] or "0"]
        if any(len(number) > 15 or int(number) > MOST for number in numbers):
            raise InvalidContent(
                f"the chat template cannot be used: {found[0][:40]!r} repeats more than {MOST} times"
            )
