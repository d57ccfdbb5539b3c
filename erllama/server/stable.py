"""Changing lines at the head of prompts, moved or dropped so that the rest can be reused. Pure.

Some clients put a line that differs with every request before everything else. Whatever stands behind it
would have to be computed again each time, so such a line is moved to the end of the last message, or dropped
where it says nothing to a model. Only the lines of this table, only in system messages, and the reply names
each in the header `x-erllama-prompt-changes`. Dates without a time stay: they change once a day.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIME = r"\d{1,2}:\d{2}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line that changes: who writes it, how it looks, what becomes of it."""

    client: str
    name: str
    line: re.Pattern[str]
    action: Literal["dropped", "moved"]


def _rule(client: str, name: str, pattern: str, action: Literal["dropped", "moved"]) -> Rule:
    return Rule(
        client, name, re.compile(rf"^[ \t]*(?:{pattern})[ \t]*$", re.MULTILINE | re.IGNORECASE), action
    )


RULES = (
    _rule("claude-code", "billing", r"x-anthropic-billing-header:.{0,500}", "dropped"),
    _rule(
        "any",
        "clock",
        rf"(?:the )?current (?:date and time|time|date)(?: is)?\b.{{0,80}}{TIME}.{{0,80}}",
        "moved",
    ),
    _rule(
        "any",
        "clock",
        rf"(?:today(?:'s date)?|date|time|timestamp|now)(?: is)?[ \t]*:.{{0,80}}{TIME}.{{0,80}}",
        "moved",
    ),
    _rule(
        "any",
        "tokens",
        r"(?:token usage|tokens used|context usage|tokens left)[ \t]*:.{0,40}\d.{0,80}",
        "moved",
    ),
)


def stable_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages with the table's lines moved or dropped, and what was done, for the header."""
    made = [dict(message) for message in messages]
    moved: list[str] = []
    notes: list[str] = []
    for message in made:
        if message.get("role") in ("system", "developer"):
            message["content"] = _changed(message.get("content"), moved, notes)
    if moved and not _append(made, moved):
        return [dict(message) for message in messages], ()  # nowhere to move them to
    made = [m for m in made if m.get("role") not in ("system", "developer") or m["content"]]
    return made, tuple(f"x-erllama-prompt-changes: {note}" for note in dict.fromkeys(notes))


def _changed(content: Any, moved: list[str], notes: list[str]) -> Any:
    if isinstance(content, list):
        parts = [
            {**part, "text": _changed(part["text"], moved, notes)}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return [p for p in parts if not isinstance(p, dict) or p.get("text") != ""]
    if not isinstance(content, str):
        return content
    for rule in RULES:
        found = rule.line.findall(content)
        if not found:
            continue
        content = rule.line.sub("", content).strip("\n")
        notes.append(f"{rule.client} {rule.name} {rule.action}")
        if rule.action == "moved":
            moved += [line.strip() for line in found]
    return content


def _append(messages: list[dict[str, Any]], lines: list[str]) -> bool:
    """Behind the text of the last message, if that is the user's or a tool's."""
    last = messages[-1] if messages else {}
    text = "\n\n" + "\n".join(lines)
    if last.get("role") not in ("user", "tool"):
        return False
    if isinstance(last.get("content"), str):
        last["content"] += text
        return True
    if isinstance(last.get("content"), list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]
        return True
    return False
