"""One request: from prompt and options to a sequence in the actor, and its events back.

Everything a caller can get wrong is found here, before the actor hears of it.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from erllama.backend import Guide
from erllama.errors import ContextOverflow, InvalidContent, InvalidOption, NotSupported
from erllama.types import Done, Event, Request, Stats

from .home import current_home, require_home
from .purpose import Purpose
from .sampling import PlainSampler, resolve_sampling
from .sequence import Sequence
from .stream import EventBuffer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from erllama.backend import BackendFacts, Sampler, SamplingParams
    from erllama.options import GenerationOptions

    from .handle import Handle


class Translate(Protocol):
    """Turns each of the engine's events into those to deliver."""

    def __call__(self, event: Event, /) -> Iterable[Event]:
        """What becomes of one event."""
        ...

    def is_slow(self, event: Event, /) -> bool:
        """Whether that takes milliseconds, and so is done in a worker thread."""
        ...


_request_ids = itertools.count(1)


class EventStream:
    """The events of one request: iterate it. `request` names it; `cancel` ends it early.

    Failures are raised out of the iterator. The last event is always `Done`.
    """

    def __init__(
        self,
        seq: Sequence,
        buffer: EventBuffer,
        cancel: Callable[[Sequence], None],
        translate: Translate | None = None,
    ) -> None:
        self.request = seq.request
        self._translate = translate
        self._ready: deque[Event] = deque()
        self._seq = seq
        self._buffer = buffer
        self._cancel = cancel
        self._done = False
        self._home = current_home()

    def __repr__(self) -> str:
        return f"<EventStream {self._seq!r}>"

    def so_far(self) -> Stats:
        """Its tokens as they are now, without times; `n_prompt`: those that memory holds or held."""
        seq = self._seq
        n_prompt = seq.n_prompt if seq.n_generated else max(seq.n_cached, min(seq.n_kv, seq.n_prompt))
        return Stats(n_prompt=n_prompt, n_cached=seq.n_cached, n_generated=seq.n_generated)

    def cancel(self) -> None:
        """End the request now; `Done` follows with finish_reason "cancelled". Harmless when it is over."""
        require_home(self._home)
        self._cancel(self._seq)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        """The next event. Cancellation: loses nothing; leaving the stream's block ends the request."""
        require_home(self._home)
        while not self._ready:
            if self._done:
                raise StopAsyncIteration
            try:
                event = await self._buffer.receive()
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
            self._done = isinstance(event, Done)
            self._ready.extend(await self._translated(event))
        return self._ready.popleft()

    async def _translated(self, event: Event) -> Iterable[Event]:
        translate = self._translate
        if translate is None:
            return (event,)
        return translate(event) if not translate.is_slow(event) else await self._in_thread(translate, event)

    async def _in_thread(self, translate: Translate, event: Event) -> Iterable[Event]:
        # Shielded: the event has been taken, and a translator that saw half of it is of no more use. One
        # thread of its own, milliseconds: nobody waits for those that others have abandoned.
        translated: Iterable[Event] = ()
        with trio.CancelScope(shield=True):
            translated = await trio.to_thread.run_sync(translate, event, limiter=trio.CapacityLimiter(1))
        return translated

    async def receive_all(self) -> list[Event]:
        """Every event that is there, at least one; none after the last. Cancellation: loses nothing."""
        require_home(self._home)
        translate = self._translate
        while not self._ready and not self._done:
            try:
                events = await self._buffer.receive_all()
            except trio.EndOfChannel:
                break
            self._done = type(events[-1]) is Done
            if translate is None:
                return events
            for event in events:  # `_translated`, without a coroutine for every token
                slow = translate.is_slow(event)
                self._ready.extend(await self._in_thread(translate, event) if slow else translate(event))
        ready = list(self._ready)
        self._ready.clear()
        return ready


@asynccontextmanager
async def open_stream(
    handle: Handle,
    prompt: list[int] | Callable[[], list[int]],
    options: GenerationOptions,
    buffer_events: int,
    purpose: Purpose = Purpose.ANSWER,
    *,
    is_text: bool = False,
    guide: Guide | None = None,
    translate: Translate | None = None,
) -> AsyncIterator[EventStream]:
    """A request for the block. Leaving it cancels what is still running and delivers nothing more.

    `is_text`: what the prompt's ids spell is what counts; stored ids that spell the same may replace them.
    `guide` fits the options' grammar into an answer; `translate` turns each event into those to deliver.

    `prompt` may be a function; it is called again right before the request is queued, with no await between.
    Raises: `InvalidContent`, `ContextOverflow`, `InvalidOption`, `InvalidGrammar`, `StickyBusy`,
    `SeqCapacity`, `NotSupported` (a model that only embeds), and what `prompt` raises.
    """
    require_home(handle.home)
    if not handle.facts.generates:
        raise NotSupported(f"model {handle.model_id!r} only embeds, it cannot generate")
    if handle.deterministic and options.exact == "session":
        raise InvalidOption(
            'exact="session": the model was loaded with deterministic=True, so every answer has cold bits',
            detail={"key": "exact", "value": options.exact},
        )
    prompt_ids = prompt() if callable(prompt) else prompt
    check_prompt(prompt_ids, handle.facts)
    params = resolve_sampling(options, handle.facts.sampling_defaults, handle.facts.n_vocab, guide or Guide())
    buffer = EventBuffer(buffer_events, handle.actor.wake)
    sampler = await _make_sampler(handle, params) if purpose.samples else None
    try:
        if callable(prompt):
            prompt_ids = prompt()
            check_prompt(prompt_ids, handle.facts)
    except BaseException:
        if sampler is not None:
            sampler.close()
        raise
    seq = Sequence(
        request=Request(next(_request_ids), handle.model_id),
        prompt=prompt_ids,
        options=options,
        sampler=sampler,
        seed=params.seed,
        n_ctx=handle.facts.n_ctx,
        buffer=buffer,
        now=trio.current_time(),
        purpose=purpose,
        visible=params.guide.visible,
        exact=(options.exact or handle.exact) == "cold",
        is_text=is_text,
    )
    try:
        handle.actor.submit(seq)
    except BaseException:
        seq.fail(None)
        raise
    try:
        yield EventStream(seq, buffer, handle.actor.cancel, translate)
    finally:
        buffer.close()
        handle.actor.cancel(seq)


async def _make_sampler(handle: Handle, params: SamplingParams) -> Sampler:
    """A sampler chain; parsing a grammar may take milliseconds, so that happens off the event loop."""
    if params.grammar is None and not hasattr(handle.backend, "new_sampler"):
        return PlainSampler(params)
    make: Callable[[SamplingParams], Sampler] = handle.optional("new_sampler")
    if params.grammar is None:
        return make(params)
    return await trio.to_thread.run_sync(make, params)


def check_prompt(prompt: list[int], facts: BackendFacts) -> None:
    """Raise `InvalidContent` or `ContextOverflow` for a prompt that cannot run."""
    if not prompt:
        raise InvalidContent("the prompt has no tokens; give at least one")
    if min(prompt) < 0 or max(prompt) >= facts.n_vocab:
        at, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < facts.n_vocab)
        raise InvalidContent(
            f"token {token} at index {at} is not in the vocabulary of {facts.n_vocab}",
            detail={"index": at, "token": token, "n_vocab": facts.n_vocab},
        )
    if len(prompt) >= facts.n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens, and the context length is {facts.n_ctx}; shorten it, "
            f"or load the model with a larger n_ctx",
            detail={"n_prompt": len(prompt), "n_ctx": facts.n_ctx},
        )
