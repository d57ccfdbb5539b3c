"""System messages that a chat template does not take: several at the head, or one further on. Pure.

Agents write instructions where they come up (Claude Code after the user's message and after results, Codex
as `developer`), and templates such as Qwen 3.5's refuse them there. Those at the head become one; a later
one becomes a reminder in what the user or the tool said before it. It stays at its place, so that what stands
before it is still found by the next turn.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLES = ("system", "developer")
BREAK = "\n\n"
PROBE_FIRST, PROBE_LATE = "Answer in verse.", "Answer in prose."
# What shows whether a template takes them everywhere.
PROBE = (
    {"role": "system", "content": "Be kind."},
    {"role": "system", "content": PROBE_FIRST},
    {"role": "user", "content": "Who are you?"},
    {"role": "system", "content": PROBE_LATE},
    {"role": "assistant", "content": "Nobody."},
    {"role": "user", "content": "And now?"},
)


def needs_care(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is a system message that is not the first message."""
    return any(message.get("role") in ROLES for message in messages[1:])


def is_taken(prompt: str) -> bool:
    """Whether a rendering of `PROBE` has all of its messages, in their order."""
    marks = [message["content"] for message in PROBE]
    places = [prompt.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places)


def with_reminders(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with a system message at its head only. Raises: `InvalidContent`."""
    head = list(takewhile(lambda message: message.get("role") in ROLES, messages))
    made = [{"role": "system", "content": BREAK.join(map(_text, head))}] if head else []
    is_open = False  # the last message of the user is one of ours
    for message in messages[len(head) :]:
        if message.get("role") in ROLES:
            is_open = _remind(made, f"<system-reminder>\n{_text(message)}\n</system-reminder>") or is_open
        elif is_open and message.get("role") == "user":
            made[-1] = {**message, "content": _joined(made[-1]["content"], message.get("content"))}
            is_open = False
        else:
            made.append(dict(message))
            is_open = False
    return made


def _remind(made: list[dict[str, Any]], text: str) -> bool:
    """Behind what was said last; True if that took a message of its own."""
    if made and made[-1].get("role") in ("user", "tool"):
        made[-1]["content"] = _joined(made[-1].get("content"), text)
        return False
    made.append({"role": "user", "content": text})
    return True


def _joined(before: Any, after: Any) -> Any:
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}{BREAK}{after}"
    return [*_parts(before), *_parts(after)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidContent("a system message is text, or a list of text parts", detail={"key": "messages"})
    return BREAK.join(str(text) for text in texts)
