"""Conversations of /v1/responses: input items to messages, and those that are kept for the next turn."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TTL_S = 3600.0
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

Messages = list[dict[str, Any]]


def messages_of(given: str | list[dict[str, Any]]) -> Messages:
    """Input items as messages; calls join the assistant's message before them. Raises: `InvalidContent`."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    made: Messages = []
    for i, item in enumerate(given):
        _add(made, item, i)
    return made


def _add(made: Messages, item: Mapping[str, Any], i: int) -> None:
    match item.get("type", "message"):
        case "message":
            role, content = item.get("role"), _text(item.get("content"), i)
            if role == "assistant" and made and made[-1]["role"] == "assistant" and not made[-1]["content"]:
                made[-1]["content"] = content  # the reasoning item before it
            else:
                made.append({"role": role, "content": content})
        case "function_call":
            call = {
                "id": _id(item, i),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments") or "{}"},
            }
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _text(output, i)
            made.append({"role": "tool", "tool_call_id": _id(item, i), "content": text})
        case "reasoning":
            made.append(
                {"role": "assistant", "content": "", "reasoning_content": _text(item.get("content") or [], i)}
            )
        case other:
            raise InvalidContent(
                f"input[{i}]: items of type {other!r} cannot be used", detail={"key": "input"}
            )


def _id(item: Mapping[str, Any], i: int) -> str:
    found = item.get("call_id")
    if not isinstance(found, str):
        raise InvalidContent(f"input[{i}]: its call_id is missing", detail={"key": "input"})
    return found


def _text(content: object, i: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidContent(f"input[{i}]: content is text or a list of parts", detail={"key": "input"})
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidContent(
                f"input[{i}]: parts of type {kind!r} cannot be used", detail={"key": "input"}
            )
        texts.append(part["text"])
    return "".join(texts)


class Threads:
    """Conversations by the id of their last response, in memory, for an hour.

    Each is its salt's alone: the id of another API key's response is as good as none. Those that were kept
    first go first when all of them are over `max_bytes`.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[tuple[bytes, str], _Thread] = OrderedDict()
        self._n_bytes = 0

    def get(self, response_id: str | None, salt: bytes) -> Messages:
        """The conversation so far, empty for None. Raises: `InvalidOption` (404) where it is not kept."""
        if response_id is None:
            return []
        self._forget()
        thread = self._kept.get((salt, response_id))
        if thread is None:
            raise _not_kept(response_id)
        return list(thread.messages)

    def put(self, response_id: str, salt: bytes, messages: Messages) -> None:
        """Keep it."""
        thread = _Thread(messages, size_of(messages), self._clock() + TTL_S)
        self._kept[salt, response_id] = thread
        self._n_bytes += thread.n_bytes
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.expires_at > now and self._n_bytes <= self._max_bytes:
                return
            self._kept.popitem(last=False)
            self._n_bytes -= oldest.n_bytes


def _not_kept(response_id: str) -> InvalidOption:
    error = InvalidOption(
        f"there is no response {response_id[:128]!r}: it was not kept (store: false), is too old, is another "
        "key's, or the server was restarted; send the whole conversation as input",
        reason="previous_response_not_found",
        detail={"key": "previous_response_id"},
    )
    error.http_status = 404
    return error


@dataclass(frozen=True, slots=True)
class _Thread:
    messages: Messages
    n_bytes: int
    expires_at: float


def size_of(value: object) -> int:
    """Bytes of memory that a JSON value takes. What conversations share counts for each of them."""
    n_bytes, left = 0, [value]
    while left:
        each = left.pop()
        n_bytes += sys.getsizeof(each)
        if isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list):
            left += each
    return n_bytes
