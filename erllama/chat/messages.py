"""What users write as messages, checked, in the one shape that templates are given.

Everything wrong is `InvalidContent` and names the message's index, before any native code sees it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from erllama.errors import InvalidContent
from erllama.types import ChatMessage

from .nesting import MAX_NESTING, is_too_deep

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
Message = Mapping[str, Any] | ChatMessage


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dictionaries.

    Content is text or a list of text parts; a tool message answers a call of an earlier assistant message.
    Raises: `InvalidContent`.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidContent("messages are a list of messages, each with a role and content")
    if not messages:
        raise InvalidContent("there are no messages; give at least one")
    checked = [_Checker(i).check(message) for i, message in enumerate(messages)]
    _check_results(checked)
    if len(checked) > 1 and checked[-1]["role"] == checked[-2]["role"] == "assistant":
        raise invalid(len(checked) - 1, "two assistant messages at the end; at most one can be gone on with")
    return checked


def is_prefilled(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def joined(content: str | list[dict[str, str]]) -> str:
    """The text of a checked message."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def invalid(index: int, why: str, where: str = "messages") -> InvalidContent:
    """The error for one message or tool."""
    return InvalidContent(f"{where}[{index}]: {why}", detail={"index": index, "where": where})


class _Checker:
    def __init__(self, index: int) -> None:
        self._index = index

    def _fail(self, why: str) -> InvalidContent:
        return invalid(self._index, why)

    def check(self, message: Message) -> dict[str, Any]:
        if isinstance(message, ChatMessage):
            message = message.to_dict()
        if not isinstance(message, Mapping):
            raise self._fail(f"expected a mapping with role and content, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise self._fail(f"unknown role {role!r}; there are {', '.join(ROLES)}")
        made: dict[str, Any] = {"role": role}
        for key, value in message.items():
            if key not in KEYS and value not in (None, [], {}, ""):
                raise self._fail(f"unknown key {key!r}; there are {', '.join(sorted(KEYS))}")
        calls = message.get("tool_calls")
        if calls:
            if role != "assistant":
                raise self._fail(f"only assistants call tools, not a message of role {role!r}")
            made["tool_calls"] = self._calls(calls)
        made["content"] = self._content(message, may_lack=bool(calls))
        for key in ("name", "reasoning_content", "tool_call_id"):
            if message.get(key) is not None:
                made[key] = self._text(message[key], key)
        if role != "tool" and "tool_call_id" in made:
            raise self._fail("tool_call_id belongs to messages of role 'tool'")
        return made

    def _text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self._fail(f"{what} is text, not {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._fail(f"{what} has a lone surrogate at position {error.start}") from None
        return value

    def _content(self, message: Mapping[str, Any], *, may_lack: bool) -> str | list[dict[str, str]]:
        content = message.get("content")
        if content is None:
            if may_lack or (message["role"] == "assistant" and message.get("reasoning_content")):
                return ""
            raise self._fail("content is missing")
        if isinstance(content, (list, tuple)):
            return [self._part(part) for part in content]
        return self._text(content, "content")

    def _part(self, part: object) -> dict[str, str]:
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise self._fail(f'content parts are {{"type": "text", "text": …}}; {kind!r} cannot be used')
        if part.keys() - {"type", "text"}:
            raise self._fail(f"a text part has no {min(map(str, part.keys() - {'type', 'text'}))!r}")
        return {"type": "text", "text": self._text(part["text"], "a part's text")}

    def _calls(self, calls: object) -> list[dict[str, Any]]:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise self._fail("tool_calls is a list of calls")
        made = [self._call(call, n) for n, call in enumerate(calls)]
        ids = [call["id"] for call in made if "id" in call]
        if len(set(ids)) != len(ids):
            raise self._fail("two tool_calls have the same id")
        return made

    def _call(self, call: object, n: int) -> dict[str, Any]:
        where = f"tool_calls[{n}]"
        if not isinstance(call, Mapping) or call.get("type", "function") != "function":
            raise self._fail(f'{where}: expected {{"type": "function", "function": {{…}}}}')
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise self._fail(f"{where}: its function has no name")
        made: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self._text(function["name"], f"{where}: its name"),
                "arguments": self._arguments(function, where),
            },
        }
        if call.get("id") is not None:
            made["id"] = self._text(call["id"], f"{where}: id")
        return made

    def _arguments(self, function: Mapping[str, Any], where: str) -> str:
        arguments = function.get("arguments", "{}")
        try:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            decoded = json.loads(arguments or "{}")
        except (TypeError, ValueError, RecursionError) as why:
            raise self._fail(f"{where}: its arguments are not JSON: {why}") from None
        if is_too_deep(decoded):
            raise self._fail(f"{where}: its arguments are nested deeper than {MAX_NESTING}")
        if not isinstance(decoded, dict):
            raise self._fail(f"{where}: its arguments are a JSON object, not {arguments[:40]!r}")
        return self._text(arguments or "{}", f"{where}: arguments")


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Every tool message answers a call that came before it and has no answer yet."""
    unanswered: list[str | None] = []
    for index, message in enumerate(messages):
        unanswered += [call.get("id") for call in message.get("tool_calls", ())]
        if message["role"] != "tool":
            continue
        answered = message.get("tool_call_id")
        if answered in unanswered:
            unanswered.remove(answered)
        elif answered is None and unanswered:
            unanswered.pop(0)
        else:
            what = "tool result" if answered is None else f"tool result for {answered!r}"
            raise invalid(index, f"a {what}, and no call before it that still waits for one")
