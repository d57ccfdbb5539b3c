"""`erllama chat`: a conversation in the terminal.

Rule 1: Ctrl-C ends the answer that is being written, and keeps what was said and computed; at the prompt it
leaves. Rule 2: nothing but the conversation goes to stdout.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

import erllama
from erllama.errors import InvalidContent
from erllama.options import GenerationOptions

from .checking import check_kept, checked, context_of, generation_of
from .generate import reused, stats_line
from .kept import POLICY, SAVE_S, TIER, kept_tiers
from .progress import bar, default_path, show_warnings

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from erllama.options import ContextOptions
    from erllama.types import Completion

HELP = """\
/reset        forget the conversation (what was computed stays cached)
/stats        tokens and speed of the last answer
/save FILE    the conversation as JSON
/quit         leave; Ctrl-D does too
A line that ends in \\ goes on in the next one; lines between two \"\"\" lines are one message."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
FENCE = '"""'


def run(arguments: argparse.Namespace) -> None:
    """Check what can be checked, load the model, and talk until the input ends."""
    context = context_of(arguments)
    generation = generation_of(arguments)
    if arguments.no_cache:
        generation["cache"] = "off"
    checked(GenerationOptions, arguments, generation)
    check_kept(arguments)
    template = None if arguments.chat_template is None else _read(arguments.chat_template)
    with show_warnings():
        trio.run(_chat, arguments, context, generation, template)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        reason = why.strerror if isinstance(why, OSError) else "it is not UTF-8 text"
        raise InvalidContent(f"cannot read the template {path!r}: {reason}") from None


async def _chat(
    arguments: argparse.Namespace, context: ContextOptions, generation: dict[str, Any], template: str | None
) -> None:
    path = await default_path() if arguments.model is None else Path(arguments.model)
    tiers = [] if arguments.no_cache else kept_tiers(arguments.kv_dir, arguments.kv_max)
    async with erllama.open_engine(tiers=tiers, evict_save_timeout_s=SAVE_S) as engine:
        tier = TIER if tiers else "ram"
        with bar(f"Loading {path.name}") as draw:
            model = await engine.load_model(
                path, context=context, policy=POLICY, tier=tier, progress=draw, chat_template=template
            )
        conversation = Conversation(model, generation, arguments.system, arguments.reasoning)
        await conversation.warm()
        if sys.stdin.isatty():
            print(f"{path.name}; /help for commands, Ctrl-D to leave", file=sys.stderr)
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conversation.watch, interrupts)
                await conversation.talk()
                nursery.cancel_scope.cancel()


class Conversation:
    """The messages so far, and the answer that is being written."""

    def __init__(self, model: Any, generation: dict[str, Any], system: str | None, reasoning: str) -> None:
        self._model = model
        self._generation = generation
        self._reasoning = reasoning
        self._head: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._head)
        self._last: Completion | None = None
        self._answering: Any = None
        self._scope = trio.CancelScope()
        self._colours = sys.stdout.isatty()

    async def warm(self) -> None:
        """Compute the system message while the user still thinks of a question."""
        if self._head and self._generation.get("cache") != "off":
            await self._model.warm([*self._head, {"role": "user", "content": "…"}])

    async def watch(self, interrupts: AsyncIterator[int]) -> None:
        """Ctrl-C: end the answer, or the conversation if there is none."""
        async for _ in interrupts:
            if self._answering is not None:
                self._answering.cancel()
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
                    await self._answer(text)
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

    async def _answer(self, text: str) -> None:
        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            async with self._model.chat_stream(
                asked, reasoning=self._reasoning, **self._generation
            ) as events:
                self._answering = events
                self._last = await self._show(events)
        except erllama.RequestError as why:  # this message cannot be sent; the conversation goes on
            print(f"erllama: {' '.join(str(why).split())} [{why.reason}]", file=sys.stderr)
            return
        finally:
            self._answering = None
        self._messages = [*asked, self._last.message]
        if sys.stderr.isatty():
            print(f"{self._dim(reused(self._last) + ' came from the cache')}", file=sys.stderr)

    async def _show(self, events: Any) -> Completion:
        async for event in events:
            match event:
                case erllama.Thinking(text=text):
                    print(self._dim(text), end="", flush=True)
                case erllama.ThinkingEnd():
                    print(flush=True)
                case erllama.ToolCallDelta(name=str(name)):
                    print(self._dim(f"\n[{name}] "), end="", flush=True)
                case erllama.ToolCallDelta(arguments=arguments):
                    print(self._dim(arguments), end="", flush=True)
                case erllama.Token(text=text):
                    print(text, end="", flush=True)
                case erllama.Done(completion=completion):
                    stopped = " [interrupted]" if completion.finish_reason == "cancelled" else ""
                    print(self._dim(stopped), flush=True)
                    return completion
        raise AssertionError("a stream ends with Done or an error")

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._colours and text else text


async def read_message() -> str | None:
    """What the user types, one line or several; None at the end of the input."""
    line = await _read_line("> ")
    if line is None:
        return None
    if line.strip() == FENCE:
        lines = []
        while (line := await _read_line("| ")) is not None and line.strip() != FENCE:
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        more = await _read_line("| ")
        line = line[:-1] + "\n" + (more or "")
        if more is None:
            break
    return line


async def _read_line(prompt: str) -> str | None:
    """A line without its end. Cancellation: leaves the reading thread to itself."""

    def read() -> str | None:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None

    return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
