"""What users call to have a prompt computed, and how a call becomes a request of the engine."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Unpack

from erllama.engine.home import require_home
from erllama.engine.purpose import Purpose
from erllama.engine.request import EventStream, open_stream
from erllama.errors import InvalidContent
from erllama.options import GenerationOptions
from erllama.types import Completion, Done, Event, Prefilled

from .block import Block
from .text_calls import TextCalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

    from erllama.engine.handle import Handle

    from .calls import Calls
    from .chat import ModelChat
    from .generation import Generation
    from .raw_thinking import RawThinking
    from .text_calls import Prompt


class RequestCalls(TextCalls):
    """The part of `Model` that makes requests of raw prompts; what others make goes through it too."""

    def __init__(
        self,
        handle: Handle,
        buffer_events: int,
        chat: ModelChat,
        calls: Calls,
        thinking: RawThinking | None = None,
    ) -> None:
        super().__init__(handle)
        self._chat = chat
        self._calls = calls
        self._thinking = thinking
        self._buffer_events = buffer_events

    async def complete(self, prompt: Prompt, **generation: Unpack[Generation]) -> Completion:
        """Generate an answer and return it whole.

        `prompt` is text or token ids. At most 64 tokens are generated unless `max_tokens` says otherwise.
        Raises: `RequestError` before anything was computed, `Overloaded`, `EngineError`.
        Cancellation: ends the request at the next step's border; nothing is returned.
        """
        done: Completion = await self._calls.run("complete", {"prompt": prompt, **generation}, self._complete)
        return done

    async def _complete(self, prompt: Prompt, **generation: Any) -> Completion:
        return await self._collected(self._opened(prompt, **generation))

    def stream(
        self, prompt: Prompt, **generation: Unpack[Generation]
    ) -> AbstractAsyncContextManager[EventStream]:
        """Generate an answer as events: `async with model.stream(…) as events: async for event in events`.

        Leaving the block ends the request. A slow reader slows only its own request. Raises as `complete`.
        """
        return self._block("stream", {"prompt": prompt, **generation}, self._opened)

    def _opened(self, prompt: Prompt, **generation: Any) -> AbstractAsyncContextManager[EventStream]:
        return self._stream(prompt, GenerationOptions(**generation))

    def _block(
        self,
        name: str,
        arguments: dict[str, Any],
        make: Callable[..., AbstractAsyncContextManager[EventStream]],
    ) -> Block[EventStream]:
        """A request's block, behind the middleware if there is any."""
        plain = self._calls.pass_through(arguments)
        inner = make(**arguments) if plain else self._calls.enter(name, arguments, make)
        return Block(inner, f"async with model.{name}(…) as events")

    @asynccontextmanager
    async def _stream(self, prompt: Prompt, options: GenerationOptions) -> AsyncIterator[EventStream]:
        require_home(self._live().home)
        options = await self._constrained(options)
        prompt_ids = await self._prompt_ids(prompt)
        async with self._request(prompt_ids, options, is_text=isinstance(prompt, str)) as events:
            yield events

    def _request(
        self,
        prompt: list[int] | Callable[[], list[int]],
        options: GenerationOptions,
        purpose: Purpose = Purpose.ANSWER,
        *,
        is_text: bool = False,
    ) -> AbstractAsyncContextManager[EventStream]:
        """The engine's request, its thinking told apart if that is wanted."""
        handle = self._live()
        thinking = self._thinking if options.thinking else None
        return open_stream(
            handle,
            prompt,
            options,
            self._buffer_events,
            purpose,
            is_text=is_text,
            guide=None if thinking is None else thinking.guide(handle),
            translate=None if thinking is None else thinking.translator(options.thinking_budget_tokens),
        )

    async def _constrained(self, options: GenerationOptions) -> GenerationOptions:
        """A schema as the grammar it means."""
        if options.json_schema is None:
            return options
        grammar = await self._chat.grammar_of(options.json_schema)
        return dataclasses.replace(options, json_schema=None, grammar=grammar)

    async def _collected(self, stream: AbstractAsyncContextManager[EventStream]) -> Completion:
        async with stream as events:
            return await collect(events)

    def _n_ctx(self) -> int:
        return self._live().facts.n_ctx

    async def prefill_only(
        self,
        prompt: Prompt,
        *,
        parent_key: bytes | None = None,
        session_id: Hashable = None,
        on_full: Literal["block", "error"] = "block",
        exact: Literal["session", "cold"] | None = None,
        salt: bytes = b"",
    ) -> Prefilled:
        """Compute a prompt and store it, so that whoever begins like it finds it there; sample nothing.

        Requests with `exact="cold"` find only what was computed so, those with a `salt` only their own.
        Raises and cancels as `complete`.
        """
        own = {"parent_key": parent_key, "session_id": session_id, "on_full": on_full}
        arguments = {"prompt": prompt, "exact": exact, "salt": salt, **own}
        done: Prefilled = await self._calls.run("prefill_only", arguments, self._prefill_only)
        return done

    async def _prefill_only(self, prompt: Prompt, **options: Any) -> Prefilled:
        checked = GenerationOptions(**options)
        return await self._prefill(await self._prompt_ids(prompt), checked, Purpose.PREFILL)

    async def _prefill(
        self,
        prompt_ids: list[int],
        options: GenerationOptions,
        purpose: Purpose,
        *,
        is_text: bool = False,
    ) -> Prefilled:
        done = await self._collected(self._request(prompt_ids, options, purpose, is_text=is_text))
        return Prefilled(
            context_tokens=done.context_tokens,
            committed_tokens=done.committed_tokens,
            finish_key=done.finish_key,
            cache_hit_kind=done.cache_hit_kind,
            cache_source=done.cache_source,
            cache_delta=done.cache_delta,
            miss=done.miss,
            stats=done.stats,
        )


async def collect(events: AsyncIterator[Event] | Any) -> Completion:
    """Fold a stream into the result `complete` would have returned.

    Raises what the stream raises. Cancellation: the stream keeps its place.
    """
    async for event in events:
        if isinstance(event, Done):
            return event.completion
    raise InvalidContent("the stream ended before this call: it has no result any more")
