"""Changing lines at the head of prompts, moved or dropped so that the rest can be reused. Pure.

Some clients put a line that differs with every request before everything else. Whatever stands behind it
would have to be computed again each time, so such a line is moved to the end of the last message, or dropped
where it says nothing to a model. Only the lines of this table, only in the system messages that a
conversation begins with: further on a line stays as it was said. The reply names each in the header
`x-erllama-prompt-changes`. Dates without a time stay: they change once a day.

Who sends what, by their own issue trackers on GitHub:

- Claude Code, a first system block with `x-anthropic-billing-header: cc_version=…; cc_entrypoint=…; cch=…;`,
  whose `cch` is another one with each request: anthropics/claude-code 68900, ggml-org/llama.cpp 20623. Where
  blocks were joined before they came here, the next one begins on the same line: ggml-org/llama.cpp 21793.
- pi, `Current date and time: Monday, March 9, 2026 at 06:00:31 PM PDT`: earendil-works/pi 1873, 2013; so
  LibreChat's `append_current_datetime`.
- goose, `The current date is 2025-05-04 12:30:00.`: aaif-goose/goose 2434.
- Open WebUI, what users make of `{{CURRENT_TIME}}` and `{{CURRENT_DATETIME}}`: open-webui/open-webui 28527.
- nanobot, a heading `## Current Time` and the time below: HKUDS/nanobot 226. OpenClaw, the same with
  `## Current Date & Time`: openclaw/openclaw 7650.

Looked at and left alone, as it changes nothing at the head: OpenCode's `Today's date:`, a date
(anomalyco/opencode 32644); the `environment_details` of Cline and Roo, which are in users' messages
(RooCodeInc/Roo-Code 1788); Claude Code's count of tokens left, a system message after each result, which
stays where it is (ollama/ollama 17918). Nothing of the kind is known of Aider and Codex.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEAD_ROLES = ("system", "developer")
END_ROLES = ("user", "tool")
NOW = r"current (?:date and time|date & time|date/time|datetime|date time|date|time)"
WITH_TIME = r"[^\n]{0,80}\d{1,2}:\d{2}[^\n]{0,80}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Text that changes: who writes it, how it looks, what becomes of it."""

    client: str
    name: str
    text: re.Pattern[str]
    action: Literal["dropped", "moved"]


def _rule(client: str, name: str, pattern: str, action: Literal["dropped", "moved"]) -> Rule:
    return Rule(client, name, re.compile(rf"^{pattern}", re.MULTILINE | re.IGNORECASE), action)


RULES = (
    _rule(
        "claude-code",
        "billing",
        r"x-anthropic-billing-header:(?:[ \t]*[\w.-]{1,40}=[^;\s]{0,80};?){0,20}[ \t]*",
        "dropped",
    ),
    _rule("any", "clock", rf"#{{1,6}} {NOW}[ \t]*\n{WITH_TIME}$", "moved"),
    _rule("any", "clock", rf"[-*# \t]{{0,8}}(?:the )?{NOW}\b(?:\*\*)?(?: is|[ \t]*:){WITH_TIME}$", "moved"),
)
DROPPED = tuple(rule for rule in RULES if rule.action == "dropped")


def stable_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages with the table's lines moved or dropped, and what was done, for the header."""
    rules = RULES if messages and _can_take(messages[-1]) else DROPPED
    made = [dict(message) for message in messages]
    head = list(takewhile(lambda message: message.get("role") in HEAD_ROLES, made))
    moved: list[str] = []
    notes: list[str] = []
    for message in head:
        message["content"] = _changed(message.get("content"), rules, moved, notes)
    if moved:
        _append(made[-1], moved)
    made = [m for m in head if m["content"]] + made[len(head) :]
    return made, tuple(f"x-erllama-prompt-changes: {note}" for note in dict.fromkeys(notes))


def _changed(content: Any, rules: Sequence[Rule], moved: list[str], notes: list[str]) -> Any:
    if isinstance(content, list):
        parts = [
            {**part, "text": _changed(part["text"], rules, moved, notes)}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return [p for p in parts if not isinstance(p, dict) or p.get("text") != ""]
    if not isinstance(content, str):
        return content
    for rule in rules:
        found = rule.text.findall(content)
        if not found:
            continue
        content = rule.text.sub("", content).strip("\n")
        notes.append(f"{rule.client} {rule.name} {rule.action}")
        if rule.action == "moved":
            moved += [line.strip() for line in found]
    return content


def _can_take(last: Mapping[str, Any]) -> bool:
    """Whether lines can be moved there."""
    return last.get("role") in END_ROLES and isinstance(last.get("content"), (str, list))


def _append(last: dict[str, Any], lines: list[str]) -> None:
    """Behind the text of the last message."""
    text = "\n\n" + "\n".join(lines)
    if isinstance(last.get("content"), list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]
    else:
        last["content"] += text
