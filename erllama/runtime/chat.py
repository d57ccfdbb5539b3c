"""Chat with one model: conversations to prompts, streams to messages. `Model` offers it to users."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from erllama.chat.answer import read_answer
from erllama.chat.grammar import SchemaGrammars
from erllama.chat.messages import check_messages, joined
from erllama.chat.options import ChatOptions
from erllama.chat.prompt import ChatParams, Renderer, Vocabulary
from erllama.chat.templates import Template
from erllama.engine.home import require_home
from erllama.engine.request import EventStream, open_stream
from erllama.errors import ContextOverflow, HandleClosed, InvalidContent, NotLoaded, NotSupported
from erllama.options import GenerationOptions

from .chat_events import ChatTranslator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from erllama.backend import Guide
    from erllama.chat.messages import Message
    from erllama.chat.templates import TemplateCache
    from erllama.engine.handle import Handle
    from erllama.types import ChatMessage

    from .calls import Calls

LARGE_PARSER = 64 << 10  # characters of its text: some 20 tools
T = TypeVar("T")
HOPELESS_FROM = 64 << 10  # characters; below, rendering costs less than finding out


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStatistics:
    """What chat calls of one model did: calls and their seconds, schemas converted and found converted."""

    n_applied: int = 0
    n_parsed: int = 0
    apply_s: float = 0.0
    parse_s: float = 0.0
    n_schema_hits: int = 0
    n_schema_misses: int = 0


class ModelChat:
    """Templates, schemas and counts of one loaded model."""

    def __init__(
        self,
        handle: Handle,
        templates: TemplateCache,
        calls: Calls,
        *,
        template: str | None = None,
        signing_key: bytes | None = None,
        buffer_events: int,
    ) -> None:
        self._handle = handle
        self._templates = templates
        self._calls = calls
        self._text = template
        self._key = signing_key
        self._buffer_events = buffer_events
        self._grammars = SchemaGrammars()
        self._counts = ChatStatistics()

    def statistics(self) -> ChatStatistics:
        """Counts since the model was loaded."""
        conversions = self._grammars.statistics()
        return dataclasses.replace(
            self._counts, n_schema_hits=conversions.n_hits, n_schema_misses=conversions.n_misses
        )

    def purge(self) -> bool:
        """Forget the parsed template."""
        return self._templates.purge(self._handle)

    async def grammar_of(self, schema: Mapping[str, Any]) -> str:
        """GBNF of a schema. Raises: `InvalidGrammar`. Cancellation: leaves the thread to itself."""
        return await trio.to_thread.run_sync(self._grammars.of, schema, abandon_on_cancel=True)

    # --- rendering and reading ---

    async def apply(
        self, messages: Sequence[Message], options: ChatOptions, generation: GenerationOptions | None = None
    ) -> ChatParams:
        """Render in a worker thread. Cancellation: leaves the thread to itself, it only reads."""
        return (await self._rendered(messages, options, generation))[0]

    async def _rendered(
        self, messages: Sequence[Message], options: ChatOptions, generation: GenerationOptions | None
    ) -> tuple[ChatParams, Guide]:
        handle = self._live()
        if getattr(handle.backend, "chat_templates", None) is None:
            raise NotSupported(f"the backend of {handle.model_id!r} cannot chat", reason="chat_not_supported")
        generation = generation or GenerationOptions()
        arguments = {"messages": messages, **vars(options), **_constraints(generation)}
        if self._calls.pass_through(arguments):
            params, guide = await self._in_thread(lambda: self._render_and_guide(generation, **arguments))
        else:
            params = await self._calls.run("chat_apply", arguments, self._applied)
            guide = await self._in_thread(lambda: self._guide(params, generation))
        counts = self._counts
        self._counts = dataclasses.replace(
            counts, n_applied=counts.n_applied + 1, apply_s=counts.apply_s + params.apply_s
        )
        return params, guide

    async def _applied(self, **arguments: Any) -> ChatParams:
        return await self._in_thread(lambda: self._render(**arguments))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """`work` in a worker thread. Cancellation: leaves the thread to itself, it only reads."""
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except HandleClosed:
            raise NotLoaded(f"model {self._handle.model_id!r} {self._handle.gone}") from None

    def _render_and_guide(self, generation: GenerationOptions, **arguments: Any) -> tuple[ChatParams, Guide]:
        params = self._render(**arguments)
        return params, self._guide(params, generation)

    def _render(
        self,
        messages: Sequence[Message],
        json_schema: Mapping[str, Any] | None = None,
        grammar: str | None = None,
        middleware: object = (),  # which is around this
        **options: Any,
    ) -> ChatParams:
        self._refuse_hopeless(sum(map(_content_length, check_messages(messages))))
        return self._renderer().render(messages, ChatOptions(**options), json_schema, grammar)

    def _guide(self, params: ChatParams, generation: GenerationOptions) -> Guide:
        budget = generation.thinking_budget_tokens
        return self._renderer().guide(
            params,
            thinking_budget=budget if budget and budget > 0 else None,
            own_grammar=generation.grammar is not None,
        )

    async def parse(self, params: ChatParams, text: str, partial: bool) -> ChatMessage:
        """Read an answer in a worker thread. Cancellation: leaves the thread to itself."""
        arguments = {"params": params, "text": text, "partial": partial}
        message: ChatMessage = await self._calls.run("chat_parse", arguments, self._read)
        return message

    async def _read(self, params: ChatParams, text: str, partial: bool) -> ChatMessage:
        if not isinstance(params, ChatParams):
            raise InvalidContent("chat_parse needs what chat_apply gave")
        started = trio.current_time()
        message = await trio.to_thread.run_sync(
            lambda: read_answer(params, text, partial=partial), abandon_on_cancel=True
        )
        self._parsed(trio.current_time() - started)
        return message

    def _parsed(self, seconds: float) -> None:
        counts = self._counts
        self._counts = dataclasses.replace(
            counts, n_parsed=counts.n_parsed + 1, parse_s=counts.parse_s + seconds
        )

    def _renderer(self) -> Renderer:
        backend: Any = self._handle.backend
        template = self._templates.get(
            self._handle, lambda: Template.of(backend.chat_templates(self._text), backend.special_texts())
        )
        if self._handle.stopping:  # rendered for nobody: a model that is gone keeps no template
            self._templates.purge(self._handle)
        if not template.native.is_explicit:
            raise NotSupported(
                f"the file of {self._handle.model_id!r} has no chat template; give one to load_model: "
                "chat_template=…",
                reason="chat_not_supported",
            )
        return Renderer(template, self._vocabulary(), self._grammars)

    def _vocabulary(self) -> Vocabulary:
        backend: Any = self._handle.backend
        return Vocabulary(backend.tokenize, backend.piece, self._refuse_hopeless)

    def _refuse_hopeless(self, n_characters: int) -> None:
        """As `Model.complete` does: templates and tokenizers are not given what cannot fit anyway."""
        longest_piece: Callable[[], int] | None = getattr(self._handle.backend, "longest_piece", None)
        if longest_piece is None or n_characters < HOPELESS_FROM:
            return
        least, n_ctx = n_characters // longest_piece(), self._handle.facts.n_ctx
        if least >= n_ctx:
            raise ContextOverflow(
                f"messages of {n_characters} characters have at least {least} tokens, and the context length "
                f"is {n_ctx}; shorten them, or load the model with a larger n_ctx",
                detail={"n_prompt": least, "n_ctx": n_ctx},
            )

    def _live(self) -> Handle:
        if self._handle.stopping:
            raise NotLoaded(f"model {self._handle.model_id!r} {self._handle.gone}")
        return self._handle

    # --- a turn ---

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Message], options: ChatOptions, generation: GenerationOptions
    ) -> AsyncIterator[EventStream]:
        """The answer's events; see `Model.chat_stream`."""
        handle = self._live()
        require_home(handle.home)
        params, guide = await self._rendered(messages, options, generation)
        resolved = dataclasses.replace(
            generation,
            json_schema=None,
            grammar=params.grammar if generation.grammar is None else generation.grammar,
            stop=(*generation.stop, *params.applied.stops),
            prefix_checkpoint_len=generation.prefix_checkpoint_len or params.n_head or None,
        )
        with await self._translator(params, generation.stop) as translator:
            try:
                async with open_stream(
                    handle,
                    params.prompt_ids,
                    resolved,
                    self._buffer_events,
                    is_text=True,
                    guide=guide,
                    translate=translator,
                ) as events:
                    yield events
            finally:
                self._parsed(translator.parse_s)
            await self._tell_parsed(params, translator, generation)

    async def _tell_parsed(
        self, params: ChatParams, translator: ChatTranslator, generation: GenerationOptions
    ) -> None:
        """One call for all of the reading while the answer was generated, with the seconds it took."""
        arguments = {
            "params": params,
            "text": translator.text,
            "partial": translator.message is None,
            "seconds": translator.parse_s,
            **_constraints(generation),
        }
        if self._calls.pass_through(arguments):
            return

        async def read(**_arguments: Any) -> ChatMessage | None:
            return translator.message

        await self._calls.run("chat_parse", arguments, read)

    async def _translator(self, params: ChatParams, stops: Sequence[str]) -> ChatTranslator:
        """What reads the answer; to load a parser of hundreds of tools takes milliseconds."""
        if len(params.applied.parser) < LARGE_PARSER:
            return ChatTranslator(params, self._key, stops)
        return await trio.to_thread.run_sync(ChatTranslator, params, self._key, stops)


def _constraints(generation: GenerationOptions) -> dict[str, Any]:
    """What of a generation rendering has to know, where it is given."""
    names = ("json_schema", "grammar", "middleware")
    return {name: value for name in names if (value := getattr(generation, name)) not in (None, ())}


def _content_length(message: Mapping[str, Any]) -> int:
    return len(joined(message["content"]))
