"""Model: what a user asks of one loaded model."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import trio

from erllama.engine.home import require_home
from erllama.engine.purpose import Purpose
from erllama.engine.request import EventStream, open_stream
from erllama.errors import (
    ContextOverflow,
    EngineError,
    HandleClosed,
    InvalidContent,
    InvalidOption,
    MissingOption,
    NotLoaded,
)
from erllama.options import GenerationOptions
from erllama.types import CacheHit, Completion, Done, Event, Exactness, Prefilled

from .block import Block
from .chat_calls import ChatCalls
from .embed_calls import EmbedCalls
from .info import ModelInfo, Phase, RequestInfo
from .kept import Pins, cached_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from erllama.engine.handle import Handle
    from erllama.engine.statistics import ActorStatistics

    from .calls import Calls
    from .chat import ModelChat
    from .generation import Continuation, Generation
    from .raw_thinking import RawThinking

Prompt = str | Sequence[int]
RESET_PATIENCE_S = 5.0
PLAIN_CALL_BYTES = 64 << 10  # longer text is tokenised in a worker thread, off the event loop


class Model(ChatCalls, EmbedCalls):
    """A loaded model. Made by `Engine.load_model`; once it is unloaded, every method but `unload` and
    `wait_closed` raises `NotLoaded`.
    """

    def __init__(
        self,
        handle: Handle,
        path: str | None,
        buffer_events: int,
        chat: ModelChat,
        calls: Calls,
        thinking: RawThinking | None = None,
    ) -> None:
        self.handle = handle  # the engine's; not for users
        self._chat = chat
        self._calls = calls
        self._thinking = thinking
        self._path = path
        self._buffer_events = buffer_events

    def __repr__(self) -> str:
        return repr(self.handle)

    @property
    def model_id(self) -> str:
        """Its name in the engine."""
        return self.handle.model_id

    def _live(self) -> Handle:
        if self.handle.stopping:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}")
        return self.handle

    # --- generation ---

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
        handle = self._live()
        require_home(handle.home)
        options = await self._constrained(options)
        prompt_ids = await self._prompt_ids(prompt)
        thinking = self._thinking if options.thinking else None
        async with open_stream(
            handle,
            prompt_ids,
            options,
            self._buffer_events,
            is_text=isinstance(prompt, str),
            guide=None if thinking is None else thinking.guide(handle),
            translate=None if thinking is None else thinking.translator(options.thinking_budget_tokens),
        ) as events:
            yield events

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

    async def _prompt_ids(self, prompt: Prompt, *, add_special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            await self._refuse_hopeless(prompt)
            return await self.tokenize_async(prompt, add_special)
        await trio.lowlevel.checkpoint()
        return _token_ids(prompt)

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
        handle = self._live()
        async with open_stream(
            handle, prompt_ids, options, self._buffer_events, purpose, is_text=is_text
        ) as events:
            done = await collect(events)
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

    # --- sessions: see the guide ---

    async def continue_(
        self,
        tail_tokens: Prompt,
        *,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Unpack[Continuation],
    ) -> Completion:
        """Generate behind what the session holds, prompt and answer so far, and `tail_tokens`.

        Only the tail is computed, and what was sampled last; nothing is looked up (with `exact="cold"` it
        is, and answers are prefilled again). To a tail given as text no tokens are added; an empty one goes
        on with the answer. `expect_committed`: the ids that the session must hold, or nothing happens.
        Raises: as `complete`, and `MissingOption` (no session), `NoSession` (it is not held any more),
        `StickyBusy`, `TranscriptMismatch`, `NotSupported` (this model's memory cannot be cut).
        Cancellation: as `complete`; the session keeps what was computed.
        """
        arguments = {
            "tail_tokens": tail_tokens,
            "session_id": session_id,
            "expect_committed": expect_committed,
            **generation,
        }
        done: Completion = await self._calls.run("continue_", arguments, self._continue_whole)
        return done

    async def _continue_whole(self, **arguments: Any) -> Completion:
        return await self._collected(self._continued(**arguments))

    def continue_stream(
        self,
        tail_tokens: Prompt,
        *,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Unpack[Continuation],
    ) -> AbstractAsyncContextManager[EventStream]:
        """`continue_` as events; see `stream`."""
        arguments = {
            "tail_tokens": tail_tokens,
            "session_id": session_id,
            "expect_committed": expect_committed,
            **generation,
        }
        return self._block("continue_stream", arguments, self._continued)

    def _continued(
        self,
        tail_tokens: Prompt,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Any,
    ) -> AbstractAsyncContextManager[EventStream]:
        if session_id is None:
            raise MissingOption("continuing needs the session_id of an earlier request", detail="session_id")
        options = GenerationOptions(session_id=session_id, **generation)
        if options.cache != "on":
            raise InvalidOption(
                f"cache={options.cache!r}: a continuation goes on from what is kept, so it keeps it",
                detail={"key": "cache", "value": options.cache},
            )
        expected = None if expect_committed is None else _token_ids(expect_committed)
        return self._continue(tail_tokens, expected, options)

    @asynccontextmanager
    async def _continue(
        self, tail: Prompt, expected: list[int] | None, options: GenerationOptions
    ) -> AsyncIterator[EventStream]:
        handle = self._live()
        options = await self._constrained(options)
        if isinstance(tail, str):
            ids = await self._prompt_ids(tail, add_special=False) if tail else []
        else:
            ids = _token_ids(tail)
        thinking = self._thinking if options.thinking else None

        def prompt() -> list[int]:
            return [*handle.actor.history(options.session_id, expected, options.salt), *ids]

        async with open_stream(
            handle,
            prompt,
            options,
            self._buffer_events,
            Purpose.CONTINUE,
            guide=None if thinking is None else thinking.guide(handle),
            translate=None if thinking is None else thinking.translator(options.thinking_budget_tokens),
        ) as events:
            yield events

    async def end_session(self, session_id: Hashable, *, salt: bytes = b"") -> None:
        """Give the session's sequence back; a turn in flight goes on and is not held after. Idempotent.

        `salt`: that of its requests; ids are names within it.
        """
        self._live().actor.end_session(session_id, salt)
        await trio.lowlevel.checkpoint()

    async def reset_session(
        self, session_id: Hashable, *, salt: bytes = b""
    ) -> Literal["recovered", "not_found"]:
        """Drop what the session holds, and end its request in flight; its reader gets `EngineReset` at once.

        Raises: `EngineError` with reason "timeout" if its sequence is not free again after 5 s.
        Cancellation: the request is ended all the same.
        """
        require_home(self.handle.home)
        actor = self._live().actor
        hit = actor.reset_session(session_id, salt)
        held = actor.end_session(session_id, salt, keep_cells=False)
        with trio.move_on_after(RESET_PATIENCE_S) as patience:
            for seq in hit:
                await seq.ended.wait()
        if patience.cancelled_caught:
            raise EngineError(
                f"session {session_id!r} is still computing after {RESET_PATIENCE_S:g} s", reason="timeout"
            )
        return "recovered" if hit or held else "not_found"

    async def _refuse_hopeless(self, text: str) -> None:
        """Raise `ContextOverflow` for text that cannot fit, before llama.cpp spends minutes on it.

        Its tokenizers take time quadratic in some texts (4 MB of spaces: 45 s), so a text so long that it
        would not fit in the longest tokens there are is never given to them.
        """
        handle = self._live()
        longest_piece = getattr(handle.backend, "longest_piece", None)
        if longest_piece is None or len(text) <= PLAIN_CALL_BYTES:
            return
        least = len(text) // await trio.to_thread.run_sync(longest_piece)
        if least >= handle.facts.n_ctx:
            raise ContextOverflow(
                f"the prompt of {len(text)} characters has at least {least} tokens, and the context length "
                f"is {handle.facts.n_ctx}; shorten it, or load the model with a larger n_ctx",
                detail={"n_prompt": least, "n_ctx": handle.facts.n_ctx},
            )

    # --- what is kept ---

    async def pin(self, prompt: Prompt, ttl_s: float | None = None) -> int:
        """Compute and store a prompt, however short, and keep it from eviction, for `ttl_s` seconds if given.

        Returns how many of its tokens are: fewer where the tier has no room for all, 0 if they would take
        more than the share of it that may be pinned. The pins unused for longest give way to new ones.
        Raises: as `complete`, and `NotSupported` if this model's memory is not kept.
        Cancellation: nothing is pinned.
        """
        pins = Pins.of(self._live(), ttl_s)
        prompt_ids = await self._prompt_ids(prompt)
        await self._prefill(prompt_ids, GenerationOptions(), Purpose.PIN)
        return await pins.put(prompt_ids, ttl_s)

    async def unpin(self, prompt: Prompt) -> bool:
        """End a pin; False if there was none (any more)."""
        pins = Pins.of(self._live())
        return pins.remove(await self._prompt_ids(prompt))

    def cached_prefix_len(self, tokens: Prompt) -> int:
        """Bytes of text of the longest beginning that is in memory or in any tier; 0 if there is none.

        A plain read of the indexes; use `cached_prefix_len_async` for more than 64 KiB.
        """
        ids = self.tokenize(tokens) if isinstance(tokens, str) else _token_ids(tokens)
        return cached_bytes(self._live(), ids)

    async def cached_prefix_len_async(self, tokens: Prompt) -> int:
        """`cached_prefix_len`; long text is tokenised in a worker thread. Cancellation: waits for it."""
        return cached_bytes(self._live(), await self._prompt_ids(tokens))

    def last_cache_hit(self) -> CacheHit | None:
        """How the latest request was admitted and how many tokens it reused; None before the first."""
        return self._live().actor.hits.last

    # --- text and tokens ---

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to token ids, in the calling thread; use `tokenize_async` for more than 64 KiB.

        `add_special` adds the tokens that the model wants around a prompt; `parse_special` reads control
        tokens written out in `text` as such. Raises: `InvalidContent`.
        """
        if not isinstance(text, str):
            raise InvalidContent(f"tokenize takes text (str), not {type(text).__name__}")
        tokenize = self._live().optional("tokenize")
        try:
            tokens: list[int] = tokenize(text, add_special=add_special, parse_special=parse_special)
        except HandleClosed:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}") from None
        return tokens

    async def tokenize_async(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """`tokenize`, in a worker thread when the text is long. Cancellation: leaves the thread to itself."""
        if len(text) <= PLAIN_CALL_BYTES // 4:
            await trio.lowlevel.checkpoint()
            return self.tokenize(text, add_special, parse_special)
        # llama.cpp's tokenizers can take minutes for odd texts and cannot be told to stop; they only read.
        return await trio.to_thread.run_sync(
            self.tokenize, text, add_special, parse_special, abandon_on_cancel=True
        )

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out; bytes that are no UTF-8 become U+FFFD."""
        try:
            raw: bytes = self._live().optional("detokenize")(_token_ids(tokens))
        except HandleClosed:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}") from None
        return raw.decode("utf-8", errors="replace")

    async def detokenize_async(self, tokens: Sequence[int]) -> str:
        """`detokenize`, in a worker thread. Cancellation: waits for the thread."""
        return await trio.to_thread.run_sync(self.detokenize, tokens)

    # --- read-outs: plain reads, they never wait for the model ---

    def phase(self) -> Phase:
        """`idle`, `prefilling` or `generating`."""
        return self._live().phase

    def pending_len(self) -> int:
        """Requests that wait for a sequence."""
        return self.statistics().n_waiting

    def queue_depth(self) -> int:
        """Requests that wait or run."""
        return self._live().actor.n_requests

    def statistics(self) -> ActorStatistics:
        """Counters and gauges of the engine that runs this model."""
        return self._live().actor.statistics()

    def requests(self) -> list[RequestInfo]:
        """Requests that wait or run, oldest first."""
        return [
            RequestInfo(
                id=seq.request.id,
                model_id=self.model_id,
                phase=seq.phase.value,
                n_prompt=seq.n_prompt,
                n_cached=seq.n_cached,
                n_generated=seq.n_generated,
                n_kv=seq.n_kv,
            )
            for seq in self._live().actor.sequences()
        ]

    def info(self) -> ModelInfo:
        """Everything worth knowing about the model."""
        handle = self._live()
        statistics = handle.actor.statistics()
        return ModelInfo(
            model_id=self.model_id,
            path=self._path,
            phase=handle.phase,
            pending_len=statistics.n_waiting,
            n_ctx=handle.facts.n_ctx,
            n_seq_max=handle.facts.n_slots,
            available_seqs=statistics.n_available,
            pinned_idle_seqs=statistics.n_pinned_idle,
            last_cache_hit=handle.actor.hits.last,
            memory_kind=handle.facts.memory_kind.value,
            status="stopping" if handle.stopping else "loaded",
            quant_tag=handle.facts.quant_tag,
            exactness=Exactness(
                cold=handle.actor.cold.holds,
                reason=handle.actor.cold.reason,
                default=handle.exact,
                deterministic=handle.deterministic,
            ),
            parts=() if handle.facts.layout is None else handle.facts.layout.parts,
            embeddings=handle.facts.embeddings,
            generates=handle.facts.generates,
            vram_estimate_bytes=handle.facts.memory_bytes,
            loaded_at_monotonic=handle.loaded_at,
            details=dict(handle.facts.details),
        )

    # --- end ---

    async def unload(self) -> None:
        """Free the model; who still waits for an answer gets `NotLoaded`.

        Harmless when it is unloaded already. Cancellation: it is freed all the same.
        """
        require_home(self.handle.home)
        self.handle.stop()
        await self.handle.closed.wait()

    async def wait_closed(self) -> None:
        """Until the model is unloaded, by whomever."""
        require_home(self.handle.home)
        await self.handle.closed.wait()


def _token_ids(tokens: Sequence[int]) -> list[int]:
    """Any integer sequence as a list of Python ints. Raises `InvalidContent`."""
    if isinstance(tokens, (bytes, bytearray)):
        raise InvalidContent("a prompt is text (str) or a sequence of token ids, not bytes")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as why:
        raise InvalidContent(f"these are no token ids: {why}") from None
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidContent("a prompt is text (str) or a flat sequence of whole numbers (token ids)")
    ids: list[int] = array.tolist()
    return ids


async def collect(events: AsyncIterator[Event] | Any) -> Completion:
    """Fold a stream into the result `complete` would have returned.

    Raises what the stream raises. Cancellation: the stream keeps its place.
    """
    async for event in events:
        if isinstance(event, Done):
            return event.completion
    raise InvalidContent("the stream ended before this call: it has no result any more")
