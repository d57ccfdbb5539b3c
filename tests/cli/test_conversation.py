"""What a conversation in the terminal does with tool calls, thinking and interrupts: a scripted model."""

from __future__ import annotations

import pytest
import trio
from chat.scenes import TOOLS
from runtime.chat_scenes import ScriptedChat
from runtime.scenes import loaded

from erllama.cli.conversation import Conversation

pytestmark = pytest.mark.model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Weather(ScriptedChat):
    """Asks for the weather, then says what it was told."""

    def _answer(self, prompt):
        self.prompts.append(prompt)
        return list(b"Wet." if "It rains." in prompt else f"<think>Hm.</think>{CALL}".encode())


@pytest.fixture
def typed(monkeypatch):
    """Lines that the user types, and the prompts that asked for them."""
    lines, prompts = [], []

    async def read_line(prompt):
        await trio.lowlevel.checkpoint()
        prompts.append(prompt)
        return lines.pop(0) if lines else None

    monkeypatch.setattr("erllama.cli.typed.read_line", read_line)
    monkeypatch.setattr("erllama.cli.conversation.read_line", read_line)
    return lines, prompts


async def test_the_user_says_what_a_tool_gave(typed, capsys):
    """The call is shown beside the answer, the next line is its result, and the model goes on."""
    lines, prompts = typed
    lines += ["Weather?", "It rains."]
    async with loaded(Weather()) as model:
        talk = Conversation(model, None, {"tools": TOOLS, "reasoning": "auto"})
        await talk.talk()
    said = capsys.readouterr()
    assert prompts == ["> ", "get_weather gives> ", "> "]
    assert said.out.strip() == "Wet."
    assert "Hm." in said.err
    assert '[get_weather] {"city": "Oslo"}' in said.err
    roles = [m["role"] if isinstance(m, dict) else m.role for m in talk._messages]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_an_interrupt_before_the_first_token_ends_the_turn_only(typed, capsys, monkeypatch):
    """While the message is rendered or waits there is no answer to end: it is not sent, and one goes on."""
    lines, _ = typed
    lines += ["Weather?", "Again?"]
    interrupts, interrupted = trio.open_memory_channel(1)
    async with loaded(ScriptedChat()) as model:
        talk = Conversation(model, None, {"tools": None, "reasoning": "auto"})
        stream, n_streams = model.chat_stream, 0

        def hanging(*arguments, **options):
            nonlocal n_streams
            n_streams += 1
            return Hanging(interrupts) if n_streams == 1 else stream(*arguments, **options)

        monkeypatch.setattr(model, "chat_stream", hanging)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk.watch, interrupted)
            await talk.talk()
            nursery.cancel_scope.cancel()
    said = capsys.readouterr()
    assert said.err == "[interrupted]\n"
    assert said.out == "Hello.\n"
    assert [m["content"] for m in talk._messages if isinstance(m, dict)] == ["Again?"]


class Hanging:
    """A stream that does not begin; asking for it makes the user press Ctrl-C."""

    def __init__(self, interrupts):
        self._interrupts = interrupts

    async def __aenter__(self):
        await self._interrupts.send(2)
        await trio.sleep_forever()

    async def __aexit__(self, *_):
        raise AssertionError("it was entered")
