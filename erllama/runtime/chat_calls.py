"""What users call to chat with a model: thin methods over `ModelChat`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Unpack

from erllama.chat.options import ChatOptions, Reasoning
from erllama.checks import unknown_option
from erllama.engine.purpose import Purpose
from erllama.errors import InvalidOption
from erllama.options import GenerationOptions

from .request_calls import RequestCalls

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from erllama.chat.messages import Message
    from erllama.chat.prompt import ChatParams
    from erllama.engine.request import EventStream
    from erllama.types import ChatMessage, Completion, Prefilled

    from .chat import ChatStatistics
    from .generation import Generation


CHAT_OPTIONS = [field.name for field in dataclasses.fields(ChatOptions)]
GENERATION_OPTIONS = {field.name for field in dataclasses.fields(GenerationOptions)}


class ChatCalls(RequestCalls):
    """The part of `Model` that chats."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        reasoning: Reasoning = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        lazy_tool_grammar: bool = True,
        **generation: Unpack[Generation],
    ) -> Completion:
        """Answer a conversation: a `Completion` whose `message` has content, reasoning and tool calls.

        `messages` are mappings with role and content, or earlier answers' `message`; a last one of the
        assistant is gone on with. `tools` are described in OpenAI's shape; `tool_choice` is "auto", "none",
        "required" or names one. `response_format` or `json_schema` hold the content to a schema.
        With `lazy_tool_grammar=False` calls that the model may make are read as it writes them.
        `thinking=False` is `reasoning="off"`, `thinking=True` is "auto". There is no limit of tokens but the
        context unless `max_tokens` says so.
        Raises: `InvalidContent` naming the message, `InvalidGrammar`, `InvalidOption`, `NotSupported` (no
        chat template, or one that cannot do it), and as `complete`. Cancellation: as `complete`.
        """
        arguments = {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "reasoning": reasoning,
            "template_kwargs": template_kwargs,
            "lazy_tool_grammar": lazy_tool_grammar,
            **generation,
        }
        done: Completion = await self._calls.run("chat", arguments, self._answered)
        return done

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        reasoning: Reasoning = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        lazy_tool_grammar: bool = True,
        **generation: Unpack[Generation],
    ) -> AbstractAsyncContextManager[EventStream]:
        """`chat` as events: `Token` of the content, `Thinking`, `ThinkingEnd`, `ToolCallDelta`, then `Done`.

        Leaving the block ends the request. Raises as `chat`.
        """
        arguments = {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "reasoning": reasoning,
            "template_kwargs": template_kwargs,
            "lazy_tool_grammar": lazy_tool_grammar,
            **generation,
        }
        return self._block("chat_stream", arguments, self._asked)

    async def _answered(self, **arguments: Any) -> Completion:
        return await self._collected(self._asked(**arguments))

    def _asked(self, messages: Sequence[Message], **given: Any) -> AbstractAsyncContextManager[EventStream]:
        options = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
        for name in sorted(given.keys() - GENERATION_OPTIONS):
            raise unknown_option(
                name,
                GENERATION_OPTIONS.union(CHAT_OPTIONS) - {"add_generation_prompt"},
                where="chat",
                instead=GenerationOptions.ELSEWHERE.get(name),
            )
        generation = GenerationOptions(**{"max_tokens": self._n_ctx(), **given})
        if "thinking" in given:
            options["reasoning"] = _reasoning(options["reasoning"], thinking=generation.thinking)
            generation = dataclasses.replace(generation, thinking=False)
        return self._chat.stream(messages, ChatOptions(**options), generation)

    async def render_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, as `chat` computes it. `options` are those of `chat_apply`."""
        return (await self.chat_apply(messages, **options)).prompt_ids

    async def chat_apply(self, messages: Sequence[Message], **options: Any) -> ChatParams:
        """Render a conversation and compute nothing: `prompt`, `prompt_ids`, and what `chat_parse` needs.

        `options` are `chat`'s besides generation, `json_schema`, `middleware`, and `add_generation_prompt`.
        Raises: as `chat`. Cancellation: leaves a worker thread to itself.
        """
        own = {name: options.pop(name) for name in ("json_schema", "middleware") if name in options}
        generation = GenerationOptions(**own)
        return await self._chat.apply(messages, ChatOptions(**options), generation)

    async def chat_parse(self, params: ChatParams, text: str, partial: bool = False) -> ChatMessage:
        """Read an answer to what `chat_apply` rendered. With `partial` it may end anywhere.

        Raises: `InvalidContent` if it is not in the form of the model's template.
        """
        return await self._chat.parse(params, text, partial)

    async def warm(
        self,
        messages: Sequence[Message],
        *,
        session_id: Hashable = None,
        on_full: Literal["block", "error"] = "block",
        salt: bytes = b"",
        **options: Any,
    ) -> Prefilled:
        """Compute a conversation's prompt and keep it, so that `chat` with it begins at once.

        `options` are those of `chat_apply`. Raises and cancels as `chat`.
        """
        own = {"messages": messages, "session_id": session_id, "on_full": on_full, "salt": salt}
        done: Prefilled = await self._calls.run("warm", {**own, **options}, self._warm)
        return done

    async def _warm(
        self, messages: Sequence[Message], session_id: Hashable, on_full: str, salt: bytes, **options: Any
    ) -> Prefilled:
        params = await self.chat_apply(messages, **options)
        generation = GenerationOptions(session_id=session_id, on_full=on_full, salt=salt)  # type: ignore[arg-type]
        return await self._prefill(params.prompt_ids, generation, Purpose.PREFILL, is_text=True)

    def chat_purge(self) -> bool:
        """Forget the model's parsed chat template; False if it was not kept."""
        return self._chat.purge()

    def chat_statistics(self) -> ChatStatistics:
        """Counts and seconds of rendering and reading."""
        return self._chat.statistics()


def _reasoning(given: Reasoning, *, thinking: bool) -> Reasoning:
    """What `thinking` means among the words of `reasoning`. Raises: `InvalidOption` where both disagree."""
    if given != "auto" and thinking == (given == "off"):
        raise InvalidOption(
            f"thinking={thinking} and reasoning={given!r} do not agree; give one of them",
            detail={"key": "thinking", "value": thinking},
        )
    return given if thinking else "off"
