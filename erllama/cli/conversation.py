"""A conversation in the terminal: the messages so far, commands, and the answer that is being written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import trio

import erllama

from .generate import reused, stats_line
from .typed import read_line, read_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from erllama.types import Completion

HELP = """\
/reset        forget the conversation (what was computed stays cached)
/stats        tokens and speed of the last answer
/save FILE    the conversation as JSON
/quit         leave; Ctrl-D does too
A line that ends in \\ goes on in the next one; lines between two \"\"\" lines are one message."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Conversation:
    """The messages so far, and the answer that is being written."""

    def __init__(self, model: Any, system: str | None, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self._head: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._head)
        self._last: Completion | None = None
        self._answering: Any = None
        self._turn: trio.CancelScope | None = None
        self._scope = trio.CancelScope()
        self._aside = sys.stdout if sys.stdout.isatty() else sys.stderr

    async def warm(self) -> None:
        """Compute the system message while the user still thinks of a question."""
        if (self._head or self._options["tools"]) and self._options.get("cache") != "off":
            asked = [*self._head, {"role": "user", "content": "…"}]
            named = {name: self._options[name] for name in ("tools", "reasoning")}
            await self._model.warm(asked, **named)

    async def watch(self, interrupts: AsyncIterator[int]) -> None:
        """Ctrl-C: end the answer, or the conversation if there is none."""
        async for _ in interrupts:
            if self._answering is not None:
                self._answering.cancel()
            elif self._turn is not None:  # it is being rendered, or waits
                self._turn.cancel()
            else:
                self._scope.cancel()

    async def talk(self) -> None:
        """Until the input ends or the user leaves."""
        with self._scope:
            while (text := await read_message()) is not None:
                if text.startswith("/"):
                    if not self._command(text):
                        return
                elif text.strip():
                    await self._turn_of({"role": "user", "content": text})
        if self._scope.cancelled_caught:
            print(file=sys.stderr)

    def _command(self, text: str) -> bool:
        """Obey; False to leave."""
        name, _, rest = text.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._messages = list(self._head)
                print("The conversation is forgotten.", file=sys.stderr)
            case "/stats":
                print(stats_line(self._last) if self._last else "There is no answer yet.", file=sys.stderr)
            case "/save":
                self._save(rest.strip())
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                print(f"There is no command {name}; /help lists them.", file=sys.stderr)
        return True

    def _save(self, path: str) -> None:
        if not path:
            print("Say where to: /save FILE", file=sys.stderr)
            return
        plain = [m if isinstance(m, dict) else m.to_dict() for m in self._messages]
        try:
            Path(path).write_text(json.dumps(plain, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as why:
            print(f"cannot write {path}: {why.strerror}", file=sys.stderr)
        else:
            print(f"{len(plain)} messages in {path}", file=sys.stderr)

    async def _turn_of(self, message: dict[str, Any]) -> None:
        """The answer to a message; where it calls tools, the user says what they gave, and it goes on."""
        asked = [*self._messages, message]
        while await self._answer(asked):
            asked = list(self._messages)
            for call in asked[-1].tool_calls:
                given = await read_line(f"{call.name} gives> ")
                if given is None:
                    return
                asked.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": given})

    async def _answer(self, asked: list[Any]) -> bool:
        """Whether tools were called."""
        try:
            with trio.CancelScope() as self._turn:
                async with self._model.chat_stream(asked, **self._options) as events:
                    self._answering = events
                    self._last = await self._show(events)
            if self._turn.cancelled_caught:
                print("[interrupted]", file=sys.stderr)
                return False
        except erllama.RequestError as why:  # this message cannot be sent; the conversation goes on
            print(f"erllama: {' '.join(str(why).split())} [{why.reason}]", file=sys.stderr)
            return False
        finally:
            self._answering = self._turn = None
        assert self._last is not None
        self._messages = [*asked, self._last.message]
        if sys.stderr.isatty():
            print(dim(f"{reused(self._last)} came from the cache", sys.stderr), file=sys.stderr)
        message = self._last.message
        return message is not None and bool(message.tool_calls) and self._last.finish_reason != "cancelled"

    async def _show(self, events: Any) -> Completion:
        async for event in events:
            match event:
                case erllama.Thinking(text=text):
                    self._say_aside(text)
                case erllama.ThinkingEnd():
                    self._say_aside("\n")
                case erllama.ToolCallDelta(name=str(name)):
                    self._say_aside(f"\n[{name}] ")
                case erllama.ToolCallDelta(arguments=arguments):
                    self._say_aside(arguments)
                case erllama.Token(text=text):
                    print(text, end="", flush=True)
                case erllama.Done(completion=completion):
                    if completion.finish_reason == "cancelled":
                        self._say_aside(" [interrupted]")
                    print(flush=True)
                    return completion
        raise AssertionError("a stream ends with Done or an error")

    def _say_aside(self, text: str) -> None:
        """Beside the answer: dimmed on a terminal, and not on stdout where that is none."""
        print(dim(text, self._aside), end="", file=self._aside, flush=True)


def dim(text: str, stream: TextIO) -> str:
    """The text as a terminal shows what is less important."""
    return f"{DIM}{text}{PLAIN}" if text.strip() and stream.isatty() else text
