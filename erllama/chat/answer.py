"""An answer as it grows: text in, deltas of content, reasoning and tool calls out, a message at the end.

Rule 1: a delta is what a later parse has more than an earlier one; what was given out is never taken back.
Rule 2: a call is announced with id and name once its arguments begin; the rest of it is arguments.
Rule 3: a call is in the message only if its arguments are a whole JSON object: none is ever made up.
Rule 4: what cannot be read as the model was to write it is content, unless it was given out as anything else.
Rule 5: where no grammar held the calls, one that cannot be read is content from its beginning, whatever was
given out; and arguments are what the model wrote for them.
"""

from __future__ import annotations

import logging
import secrets
import string
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from erllama import llama
from erllama.errors import InvalidContent
from erllama.llama.chat import WORD
from erllama.types import ChatMessage, ToolCall

from .arguments import as_written, decoded, is_begun, is_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .prompt import ChatParams

log = logging.getLogger("erllama.chat")

ID_LENGTH = 9  # Mistral's templates take no other
ID_LETTERS = string.ascii_letters + string.digits
NOTHING: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
PARSES = 256  # an answer is parsed again when it has grown by this part of its length
SLOW_S = 0.002  # a parse that took so long may take as long again


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call's id and name, or more of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | CallDelta


@dataclass(slots=True)
class _Call:
    """What has been given out of one call."""

    id: str = field(default_factory=lambda: new_call_id())
    name: str = ""
    sent: str = ""
    is_announced: bool = False


class Answer:
    """Reads one answer. Sync; `close` when done."""

    def __init__(self, params: ChatParams) -> None:
        self._params = params
        self._parser = llama.ChatParser(params.applied.parser)
        self._text = ""
        self._parsed_at = 0
        self._read: dict[str, Any] = dict(
            NOTHING
        )  # the last that could be read, and how much of the text it was
        self._read_to = 0
        self._called = self._read  # the last with calls
        self._called_to = 0
        self._calls: list[_Call] = []
        self.parse_s = 0.0
        self._last_parse_s = 0.0
        begun = self._parse(partial=True) if params.prefilled else None
        self._content = self._begun_content = begun["content"] if begun else ""
        self._reasoning = self._begun_reasoning = begun["reasoning_content"] if begun else ""

    @property
    def text(self) -> str:
        """What was generated so far."""
        return self._text

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._parser.close()

    def is_slow(self, n_more: int | None = None) -> bool:
        """Whether to take so many characters more, or to finish, will take longer than `SLOW_S`."""
        return self._last_parse_s >= SLOW_S and (n_more is None or self._is_due(n_more))

    def _is_due(self, n_more: int = 0) -> bool:
        n = len(self._text) + n_more
        return n - self._parsed_at >= n // PARSES

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return what may be shown of it now."""
        self._text += text
        if not self._is_due():
            return []
        parsed = self._parse(partial=True)
        return [] if parsed is None else self._deltas(parsed, final=False)

    def finish(self, *, complete: bool) -> tuple[list[Delta], ChatMessage]:
        """The last deltas, and the message: what was given out. `complete`: the model ended it itself."""
        whole = self._parse(partial=False) if complete else None
        read = whole or self._parse(partial=True)
        parsed = read or self._last_read()
        if (complete or read is None) and (
            unread := self._unread(parsed, is_read=read is not None)
        ) is not None:
            parsed = self._raw_from(*unread)
        elif len(parsed["tool_calls"]) < self._n_announced():
            parsed = self._with_announced()
        calls = [
            call for i, each in enumerate(parsed["tool_calls"]) if (call := self._call(i, each)) is not None
        ]
        is_strange = complete and (whole is None or parsed["tool_calls"])
        if is_strange and not calls and not any(call.is_announced for call in self._calls):
            log.info("an answer is not in the form of its template; it is taken as content")
            parsed = self._as_content(parsed)
        deltas = self._deltas(parsed, final=True)
        message = ChatMessage(
            role="assistant",
            content=self._content.removeprefix(self._begun_content),
            reasoning_content=self._reasoning.removeprefix(self._begun_reasoning) or None,
            tool_calls=tuple(calls),
        )
        return deltas, message

    def _n_announced(self) -> int:
        return max((i + 1 for i, call in enumerate(self._calls) if call.is_announced), default=0)

    def _unread(self, parsed: dict[str, Any], *, is_read: bool) -> tuple[dict[str, Any], int] | None:
        """The answer with most calls, and how many of them come before one that is to be shown as text."""
        most = parsed if len(parsed["tool_calls"]) >= len(self._called["tool_calls"]) else self._called
        calls = most["tool_calls"]
        n_read = next((i for i, call in enumerate(calls) if self._call(i, call) is None), len(calls))
        if is_read and most is parsed and n_read == len(calls) and self._is_call_lost(parsed):
            return most, n_read
        if n_read == len(calls):  # what made an answer unreadable behind them may be one more call
            is_behind = bool(calls) and (not is_read or most is not parsed)
            return (most, n_read) if is_behind and not self._params.are_calls_held else None
        is_shown = not self._params.are_calls_held or is_object(calls[n_read]["arguments"])
        return (most, n_read) if is_shown else None

    def _is_call_lost(self, parsed: dict[str, Any]) -> bool:
        """Whether one begins behind what was read: the parser passes over a call that it sees no name of."""
        if self._params.are_calls_held or not self._params.tool_names:
            return False  # a grammar lets no answer end there
        calls, content = parsed["tool_calls"], parsed["content"]
        marks = self._marks()
        if not marks:
            return not (calls or content or parsed["reasoning_content"]) and bool(self._text.strip())
        text = self._text[self._end_of(calls) :] if calls else self._text
        if parsed["reasoning_content"] and not calls:
            text = self._parted(text)[1]
        return any(mark in text and mark not in content for mark in marks)

    def _marks(self) -> list[str]:
        """What calls of this template begin with."""
        marks = [text.strip() for kind, text in self._params.applied.triggers if kind == WORD]
        return [mark for mark in marks if mark]

    def _raw_from(self, most: dict[str, Any], n_calls: int) -> dict[str, Any]:
        """The first calls, and as text whatever is behind them."""
        if n_calls == 0:
            return self._as_content(most)
        calls = most["tool_calls"][:n_calls]
        at = self._end_of(calls)
        found = [place for mark in self._marks() if (place := self._text.find(mark, at)) >= 0]
        if not found and n_calls == len(most["tool_calls"]):
            return self._with_announced()
        content = self._content + _more(self._content, most["content"])
        return {**most, "tool_calls": calls, "content": content + self._text[min(found, default=at) :]}

    def _end_of(self, calls: list[dict[str, str]]) -> int:
        """Where in the text the last of these calls was read as it is."""
        begin, end = 0, len(self._text)
        while end - begin > 1:
            middle = (begin + end) // 2
            parsed = self._parse(partial=True, end=middle)
            read = [] if parsed is None else parsed["tool_calls"]
            wanted = calls[-1]["arguments"]
            if len(read) > len(calls) or (len(read) == len(calls) and read[-1]["arguments"] == wanted):
                end = middle
            else:
                begin = middle
        return end

    def _with_announced(self) -> dict[str, Any]:
        """The calls that were given out, and behind them the text that made all of it unreadable."""
        n_calls, end = len(self._called["tool_calls"]), len(self._text)
        while end - self._called_to > 1:  # text was not parsed at every character
            middle = (self._called_to + end) // 2
            parsed = self._parse(partial=True, end=middle)
            if parsed is None or len(parsed["tool_calls"]) < n_calls:
                end = middle
        rest = self._text[self._called_to :]
        return {**self._called, "content": self._called["content"] + rest}

    def _last_read(self) -> dict[str, Any]:
        """What could be read when it was shorter, and behind it the text that came since."""
        read, rest = self._read, self._text[self._read_to :]
        if read["tool_calls"]:
            return read
        if read["reasoning_content"] and not read["content"]:
            thought, content = self._parted(rest)
            return {**read, "reasoning_content": read["reasoning_content"] + thought, "content": content}
        return {**read, "content": read["content"] + rest}

    def _as_content(self, parsed: Mapping[str, Any]) -> dict[str, Any]:
        """The text as it is, but for thinking that was told apart."""
        reasoning = parsed["reasoning_content"]
        text = self._parted(self._text)[1] if reasoning else self._text
        given = self._content.removeprefix(self._begun_content)
        at = max(text.find(given), 0)  # the parser leaves out what surrounds it
        return {**NOTHING, "content": self._begun_content + text[at:], "reasoning_content": reasoning}

    def _parted(self, text: str) -> tuple[str, str]:
        """Thinking, and what is behind its end: nothing if it has none."""
        for end in self._params.applied.thinking_ends:
            if end in text:
                thought, _, rest = text.partition(end)
                return thought, rest
        return text, ""

    def _parse(self, *, partial: bool, end: int | None = None) -> dict[str, Any] | None:
        text = self._text[:end]
        self._parsed_at = len(text)
        started = time.perf_counter()
        try:
            parsed = as_written(
                self._parser.parse(text, partial=partial), are_calls_held=self._params.are_calls_held
            )
        except InvalidContent as why:
            log.debug("%s", why)
            return None
        finally:
            self._last_parse_s = time.perf_counter() - started
            self.parse_s += self._last_parse_s
        self._read, self._read_to = parsed, len(text)
        if len(parsed["tool_calls"]) >= max(1, len(self._called["tool_calls"])):
            self._called, self._called_to = parsed, len(text)
        return parsed

    # --- deltas ---

    def _deltas(self, parsed: Mapping[str, Any], *, final: bool) -> list[Delta]:
        found: list[Delta] = []
        if more := _more(self._reasoning, parsed["reasoning_content"]):
            self._reasoning += more
            found.append(ReasoningDelta(more))
        if more := _more(self._content, parsed["content"]):
            self._content += more
            found.append(ContentDelta(more))
        calls = parsed["tool_calls"]
        for index, call in enumerate(calls):
            found += self._call_deltas(index, call, is_over=final or index + 1 < len(calls))
            if not (self._params.are_calls_held or self._calls[index].is_announced):
                break  # it may turn out to be text, and then so is what follows
        return found

    def _call_deltas(self, index: int, call: Mapping[str, str], *, is_over: bool) -> list[Delta]:
        state = self._state(index, call)
        if not state.is_announced:
            # A name may still grow while nothing follows it.
            if call["name"] not in self._params.tool_names or not (call["arguments"] or is_over):
                return []
            if not self._params.are_calls_held and not is_begun(call["arguments"]):
                return []
            state.is_announced, state.name = True, call["name"]
            return [CallDelta(index, state.id, state.name, ""), *self._argument_deltas(index, call)]
        return self._argument_deltas(index, call)

    def _argument_deltas(self, index: int, call: Mapping[str, str]) -> list[Delta]:
        state = self._calls[index]
        more = _more(state.sent, call["arguments"])
        state.sent += more
        return [CallDelta(index, None, None, more)] if more else []

    def _state(self, index: int, call: Mapping[str, str]) -> _Call:
        while len(self._calls) <= index:
            self._calls.append(_Call())
        state = self._calls[index]
        others = [each.id for each in self._calls if each is not state]
        if call["id"] and not state.is_announced and call["id"] not in others:
            state.id = call["id"]
        return state

    def _call(self, index: int, call: Mapping[str, str]) -> ToolCall | None:
        arguments = decoded(call["arguments"] or "{}")
        if arguments is None or call["name"] not in self._params.tool_names:
            return None
        return ToolCall(
            id=self._state(index, call).id,
            name=call["name"],
            arguments=arguments,
            arguments_json=call["arguments"] or "{}",
        )


def read_answer(params: ChatParams, text: str, *, partial: bool) -> ChatMessage:
    """A whole answer, or with `partial` its beginning, as a message. Raises: `InvalidContent`."""
    with llama.ChatParser(params.applied.parser) as parser:
        try:
            parsed = as_written(parser.parse(text, partial=partial), are_calls_held=params.are_calls_held)
        except InvalidContent:
            if not partial:
                raise
            parsed = dict(NOTHING)
    return ChatMessage(
        role="assistant",
        content=parsed["content"],
        reasoning_content=parsed["reasoning_content"] or None,
        tool_calls=tuple(_read_call(call, partial=partial) for call in parsed["tool_calls"]),
    )


def _read_call(call: Mapping[str, str], *, partial: bool) -> ToolCall:
    arguments = decoded(call["arguments"] or "{}")
    if arguments is None and not partial:
        raise InvalidContent(f"the arguments of a call of {call['name']!r} are no JSON object")
    return ToolCall(
        id=call["id"], name=call["name"], arguments=arguments or {}, arguments_json=call["arguments"]
    )


def new_call_id() -> str:
    """An id for a call whose model writes none."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


def _more(sent: str, now: str) -> str:
    """What goes beyond what was given out; nothing where the parser changed its mind."""
    return now[len(sent) :] if now.startswith(sent) else ""
