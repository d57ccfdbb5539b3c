"""What users call to chat with a model: thin methods over `ModelChat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from erllama.chat.options import ChatOptions, Reasoning
from erllama.engine.purpose import Purpose
from erllama.errors import InvalidOption
from erllama.options import GenerationOptions

from .block import Block

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from erllama.chat.messages import Message
    from erllama.chat.prompt import ChatParams
    from erllama.engine.request import EventStream
    from erllama.types import ChatMessage, Completion, Prefilled

    from .chat import ChatStatistics, ModelChat
    from .generation import ChatGeneration


class ChatCalls:
    """The chat half of `Model`."""

    _chat: ModelChat

    async def _collected(self, stream: AbstractAsyncContextManager[EventStream]) -> Completion:
        raise NotImplementedError

    async def _prefill(
        self,
        prompt_ids: list[int],
        options: GenerationOptions,
        purpose: Purpose,
        *,
        is_text: bool = False,
    ) -> Prefilled:
        raise NotImplementedError

    def _n_ctx(self) -> int:
        raise NotImplementedError

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
        **generation: Unpack[ChatGeneration],
    ) -> Completion:
        """Answer a conversation: a `Completion` whose `message` has content, reasoning and tool calls.

        `messages` are mappings with role and content, or earlier answers' `message`; a last one of the
        assistant is gone on with. `tools` are described in OpenAI's shape; `tool_choice` is "auto", "none",
        "required" or names one. `response_format` or `json_schema` hold the content to a schema. There is
        no limit of tokens but the context unless `max_tokens` says so.
        Raises: `InvalidContent` naming the message, `InvalidGrammar`, `InvalidOption`, `NotSupported` (no
        chat template, or one that cannot do it), and as `complete`. Cancellation: as `complete`.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            reasoning=reasoning,
            template_kwargs=template_kwargs,
        )
        return await self._collected(self._chat.stream(messages, options, self._generation(generation)))

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
        **generation: Unpack[ChatGeneration],
    ) -> AbstractAsyncContextManager[EventStream]:
        """`chat` as events: `Token` of the content, `Thinking`, `ThinkingEnd`, `ToolCallDelta`, then `Done`.

        Leaving the block ends the request. Raises as `chat`.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            reasoning=reasoning,
            template_kwargs=template_kwargs,
        )
        inner = self._chat.stream(messages, options, self._generation(generation))
        return Block(inner, "async with model.chat_stream(…) as events")

    def _generation(self, given: Mapping[str, Any]) -> GenerationOptions:
        if "thinking" in given:
            raise InvalidOption(
                "chat has no thinking=: the template decides; say reasoning='off' to ask for none",
                detail={"key": "thinking", "value": given["thinking"]},
            )
        return GenerationOptions(**{"max_tokens": self._n_ctx(), **given})

    async def render_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, as `chat` computes it. `options` are those of `chat_apply`."""
        return (await self.chat_apply(messages, **options)).prompt_ids

    async def chat_apply(self, messages: Sequence[Message], **options: Any) -> ChatParams:
        """Render a conversation and compute nothing: `prompt`, `prompt_ids`, and what `chat_parse` needs.

        `options` are `chat`'s besides generation, `json_schema`, and `add_generation_prompt`.
        Raises: as `chat`. Cancellation: leaves a worker thread to itself.
        """
        schema = options.pop("json_schema", None)
        generation = GenerationOptions(json_schema=schema)
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
        params = await self.chat_apply(messages, **options)
        generation = GenerationOptions(session_id=session_id, on_full=on_full, salt=salt)
        return await self._prefill(params.prompt_ids, generation, Purpose.PREFILL, is_text=True)

    def chat_purge(self) -> bool:
        """Forget the model's parsed chat template; False if it was not kept."""
        return self._chat.purge()

    def chat_statistics(self) -> ChatStatistics:
        """Counts and seconds of rendering and reading."""
        return self._chat.statistics()
