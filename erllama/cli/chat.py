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

from erllama.errors import InvalidContent, NotSupported
from erllama.options import GenerationOptions

from .checking import check_kept, checked, context_of, generation_of
from .conversation import Conversation
from .loaded import loaded
from .progress import show_warnings

if TYPE_CHECKING:
    import argparse

    import erllama
    from erllama.options import ContextOptions


def run(arguments: argparse.Namespace) -> None:
    """Check what can be checked, load the model, and talk until the input ends."""
    context = context_of(arguments)
    generation = generation_of(arguments)
    if arguments.no_cache:
        generation["cache"] = "off"
    checked(GenerationOptions, arguments, generation)
    check_kept(arguments)
    template = None if arguments.chat_template is None else _read(arguments.chat_template, "template")
    tools = None if arguments.tools is None else _tools(arguments.tools)
    options = {**generation, "reasoning": arguments.reasoning, "tools": tools}
    with show_warnings():
        trio.run(_chat, arguments, context, options, template)


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        reason = why.strerror if isinstance(why, OSError) else "it is not UTF-8 text"
        raise InvalidContent(f"cannot read the {what} {path!r}: {reason}") from None


def _tools(path: str) -> list[Any]:
    try:
        found = json.loads(_read(path, "tools"))
    except ValueError as why:
        raise InvalidContent(f"the tools {path!r} are not JSON: {why}") from None
    if not isinstance(found, list):
        raise InvalidContent(f"the tools {path!r} are no list of tools")
    return found


async def _chat(
    arguments: argparse.Namespace, context: ContextOptions, options: dict[str, Any], template: str | None
) -> None:
    async with loaded(arguments, context, chat_template=template) as found:
        await _check(found.model, options["tools"])
        conversation = Conversation(found.model, arguments.system, options)
        await conversation.warm()
        if sys.stdin.isatty():
            print(f"{found.path.name}; /help for commands, Ctrl-D to leave", file=sys.stderr)
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conversation.watch, interrupts)
                await conversation.talk()
                nursery.cancel_scope.cancel()


async def _check(model: erllama.Model, tools: list[Any] | None) -> None:
    """Say at once, and in the words of the command, when this model cannot chat."""
    try:
        await model.chat_apply([{"role": "user", "content": "…"}], tools=tools)
    except NotSupported as why:
        if why.reason != "chat_not_supported":
            raise
        raise NotSupported(
            f"{model.model_id!r} has no chat template: give one with --chat-template FILE, or let it go on "
            "with a text: erllama generate",
            reason=why.reason,
        ) from None
