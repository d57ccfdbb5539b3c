"""Translators: from the engine's events to those of chats and of streams with thinking."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from erllama.chat.answer import Answer, CallDelta, ContentDelta, Delta
from erllama.chat.thinking import Piece, ThinkingSplitter, signature
from erllama.types import Done, Event, Request, Thinking, ThinkingEnd, Token, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.chat.prompt import ChatParams
    from erllama.types import ChatMessage, Completion


class ThinkingBlock:
    """What of a thinking block has been told, to sign it at its end."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._text = ""
        self._is_open = False

    def more(self, text: str, request: Request) -> list[Event]:
        """A piece of thinking."""
        self._is_open = True
        self._text += text
        return [Thinking(text, request)] if text else []

    def end(self, request: Request) -> list[Event]:
        """The block is over, if one is open."""
        if not self._is_open:
            return []
        signed = signature(self._text, self._key)
        self._is_open, self._text = False, ""
        return [ThinkingEnd(signed, request)]


class ChatTranslator:
    """Text of the answer → content, thinking and tool calls; at the end the message."""

    def __init__(self, params: ChatParams, key: bytes | None, stops: Sequence[str]) -> None:
        self._answer = Answer(params)
        self._block = ThinkingBlock(key)
        self._stops = tuple(stops)
        self._own_stops = params.applied.stops
        self.message: ChatMessage | None = None  # once the answer is over

    def __enter__(self) -> ChatTranslator:
        self._answer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._answer.__exit__(*error)

    @property
    def text(self) -> str:
        """The answer as it was generated, so far."""
        return self._answer.text

    @property
    def parse_s(self) -> float:
        """Seconds spent on reading the answer."""
        return self._answer.parse_s

    def is_slow(self, event: Event) -> bool:
        """Whether it would keep the event loop waiting for milliseconds."""
        match event:
            case Token():
                return self._answer.is_slow(len(event.text))
            case Done():
                return self._answer.is_slow()
        return False

    def __call__(self, event: Event) -> list[Event]:
        """What becomes of one of the engine's events."""
        match event:
            case Token():
                return self._events(self._answer.feed(event.text), event.request)
            case Done():
                return self._finished(event.completion, event.request)
        return [event]

    def _events(self, deltas: list[Delta], request: Request) -> list[Event]:
        found: list[Event] = []
        for delta in deltas:
            match delta:
                case ContentDelta():
                    found += [*self._block.end(request), Token(delta.text, request)]
                case CallDelta():
                    call = ToolCallDelta(delta.index, delta.id, delta.name, delta.arguments, request)
                    found += [*self._block.end(request), call]
                case _:
                    found += self._block.more(delta.text, request)
        return found

    def _finished(self, completion: Completion, request: Request) -> list[Event]:
        ended = completion.stop_sequence is None or completion.stop_sequence in self._own_stops
        deltas, message = self._answer.finish(complete=ended and completion.finish_reason == "stop")
        self.message = message
        events = [*self._events(deltas, request), *self._block.end(request)]
        stop = completion.stop_sequence if completion.stop_sequence in self._stops else None
        answered = dataclasses.replace(completion, reply=message.content, message=message, stop_sequence=stop)
        return [*events, Done(answered, request)]


class ThinkingTranslator:
    """Text between a model's thinking markers → thinking; the reply is what is left."""

    def __init__(self, markers: tuple[str, str], budget: int | None, key: bytes | None) -> None:
        self._splitter = ThinkingSplitter(*markers, budget)
        self._block = ThinkingBlock(key)
        self._reply: list[str] = []

    def is_slow(self, _event: Event) -> bool:
        """Never."""
        return False

    def __call__(self, event: Event) -> list[Event]:
        """What becomes of one of the engine's events."""
        match event:
            case Token():
                return self._events(self._splitter.feed(event.text), event.request)
            case Done():
                events = self._events(self._splitter.finish(), event.request)
                reply = dataclasses.replace(event.completion, reply="".join(self._reply))
                return [*events, Done(reply, event.request)]
        return [event]

    def _events(self, pieces: list[Piece], request: Request) -> list[Event]:
        found: list[Event] = []
        for piece in pieces:
            if piece.is_thinking:
                found += self._block.more(piece.text, request)
            elif piece.text:
                self._reply.append(piece.text)
                found.append(Token(piece.text, request))
            if piece.ends:
                found += self._block.end(request)
        return found
