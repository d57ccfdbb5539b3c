"""The one way from a request of any dialect to events of the engine and back."""

from __future__ import annotations

import dataclasses
import logging
import math
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import trio

from erllama import Done, Thinking, ThinkingEnd, Token, TokenId, ToolCallDelta
from erllama.errors import (
    ContextOverflow,
    EngineUnresponsive,
    InvalidContent,
    NotSupported,
    ShuttingDown,
    StickyBusy,
)
from erllama.runtime.checking import RequestChecks

from .fit import without_oldest
from .late_system import PROBE, is_taken, needs_care, with_reminders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from erllama import Completion, Event, Model
    from erllama.engine.request import EventStream
    from erllama.middleware import Middleware
    from erllama.types import Stats

    from .metrics import Metrics, Op
    from .pool import Lease, Loading, Pool
    from .registry import Spec
    from .settings import LimitsTable, Settings

log = logging.getLogger("erllama.server")
END_SESSION_S = 5.0
SLOW_ADMISSION_S = 1.0  # rendering and handing over: longer says that the machine is overloaded
HELLO = ({"role": "user", "content": "Hello"},)
MUCH_REASONING = {"enable_thinking": True, "reasoning_effort": "high"}
LITTLE_REASONING = {"reasoning_effort": "low"}
LONGEST_TOKEN = 16  # characters
ROOM_FOR_ANSWER = 4  # a history that is cut leaves this part of the context to the answer, or max_tokens


@dataclass(frozen=True, slots=True)
class Plain:
    """A prompt without a template."""

    prompt: str
    generation: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants, in no dialect: a prompt (text or token ids) or messages with `chat` options.

    `plain` is asked instead where the model has no template for messages.
    """

    model: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    plain: Plain | None = None
    session_id: Hashable = None
    cache_key: str | None = None  # OpenAI's `prompt_cache_key`
    salt: bytes = b""  # whose it is; see `tenants`
    keep_alive_s: float | None = None
    may_cut: bool | None = None  # what is too long is cut; None: conversations are, if the settings say so
    notes: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()  # names of the fields that ask for it


class Answer:
    """An answer that is being generated: read it in batches. `completion` is there once it is over."""

    def __init__(
        self,
        lease: Lease,
        events: EventStream,
        limits: LimitsTable,
        scope: trio.CancelScope,
        *,
        session_id: Hashable = None,
        n_dropped: int = 0,
        n_cut: int = 0,
        one_call: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.lease = lease
        self.session_id = session_id  # None where it runs without the one that was asked for
        self.n_dropped = n_dropped
        self.n_cut = n_cut
        self.ignored = ignored  # names of fields without an effect on this model
        self._one_call = one_call
        self.completion: Completion | None = None
        self.stats: Stats | None = None  # once its block is left, however that was
        self.signature = b""  # of the last thinking block
        self.n_reasoning = 0  # tokens whose text was thinking
        self._n_textless = 0  # tokens whose text has not been seen yet
        self._events = events
        self._scope = scope
        self._limit = "prefill_s"
        self._limits = limits
        self._ahead: list[Event] = []  # read, not handed out yet
        self._has_begun = False
        self._due = math.inf  # when whoever reads has waited for too long
        self._now = trio.lowlevel.current_clock().current_time  # asked for every token
        self._ends_at = self._now() + limits.total_s

    @property
    def model(self) -> Model:
        """Who answers."""
        return self.lease.model

    async def usage(self) -> tuple[int, int]:
        """Tokens of the prompt and how many of them were reused; right once the first event was seen."""
        mine = self._events.request.id
        info = next((r for r in self.model.requests() if r.id == mine), None)
        if info is not None:
            await trio.lowlevel.checkpoint()
            return info.n_prompt, info.n_cached
        while self.completion is None:  # it is over, and all of its events are there
            self._ahead += await self._more()
        return self.completion.stats.n_prompt, self.completion.stats.n_cached

    def count(self) -> Stats:
        """The block is being left: what was computed, also for an answer that does not end."""
        self.stats = self._events.so_far() if self.completion is None else self.completion.stats
        return self.stats

    @property
    def is_over(self) -> bool:
        """Whether every event was seen."""
        return self.completion is not None and not self._ahead

    async def batch(self) -> list[Event]:
        """The events that are there, at least one; a `TokenId` only if it has a log-probability to tell.

        A limit of time ends the answer's block, if `watch` runs. Cancellation: loses nothing.
        """
        if not self._ahead:
            return await self._more()
        events, self._ahead = self._ahead, []
        return events

    async def _more(self) -> list[Event]:
        shown: list[Event] = []
        while not shown:
            self._set_limit()
            try:
                events = await self._events.receive_all()
            finally:
                self._due = math.inf
            assert events, "an answer ends with its completion or an error"
            self._has_begun = True
            for event in events:
                # Most events are of these two kinds, so they are told apart without a call.
                if type(event) is Token:
                    self._n_textless = 0
                elif isinstance(event, TokenId):
                    self._n_textless += 1
                    if event.logprob is None:
                        continue
                elif not self._is_shown(event):
                    continue
                shown.append(event)
        return shown

    def _is_shown(self, event: Event) -> bool:
        match event:
            case Done(completion):
                self.completion = _with_one_call(completion) if self._one_call else completion
            case Thinking():
                self.n_reasoning += self._n_textless
                self._n_textless = 0
            case ToolCallDelta(index=index):
                self._n_textless = 0
                return not (index and self._one_call)
            case ThinkingEnd(signature):
                self.signature = signature
        return True

    def _set_limit(self) -> None:
        limits, now = self._limits, self._now()
        self._limit = "generation_idle_s" if self._has_begun else "prefill_s"
        due = now + (limits.generation_idle_s if self._has_begun else limits.prefill_s)
        if self._ends_at < due:
            self._limit, due = "total_s", self._ends_at
        self._due = due
        if due <= now:
            self._scope.cancel()

    async def watch(self) -> None:
        """End the answer's block when a limit of time is reached: a task beside the one that reads.

        It looks as often as the shortest limit: a deadline that moves with every token costs more than one.
        """
        limits = self._limits
        pace = min(limits.prefill_s, limits.generation_idle_s)
        while (now := trio.current_time()) < self._due:
            total = self._ends_at if now < self._ends_at else math.inf
            await trio.sleep_until(min(self._due, total, now + pace))
        self._scope.cancel()

    def overdue(self) -> EngineUnresponsive:
        """The limit that was reached."""
        return EngineUnresponsive(
            f"the limit limits.{self._limit} was reached",
            # The answer took long, which says nothing of the engine.
            reason="timeout" if self._limit == "total_s" else None,
            detail={"limit": self._limit},
        )


def _with_one_call(completion: Completion) -> Completion:
    """Not every template can be told to call one tool only."""
    message = completion.message
    if message is None:
        return completion
    message = dataclasses.replace(message, tool_calls=message.tool_calls[:1])
    return dataclasses.replace(completion, message=message)


class Generator:
    """Answers requests with the models of a pool."""

    def __init__(self, pool: Pool, settings: Settings, metrics: Metrics) -> None:
        self.pool = pool
        self.settings = settings
        self._metrics = metrics
        self._checks = RequestChecks()
        self._scopes: set[trio.CancelScope] = set()  # of answers in flight
        self._is_ending = False
        self._takes_late: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()
        self._reasons: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()

    @asynccontextmanager
    async def answer(
        self, ask: Ask, *, on_loading: Callable[[Loading], None] = lambda _: None
    ) -> AsyncIterator[Answer]:
        """The answer, for the block. Leaving it early ends the request wherever it is, and its session.

        It was looked at before. Raises: `ModelNotFound`, `QueueFull`, `QueueTimeout`, what loading raises, as
        `Model.chat`, `EngineUnresponsive` when a limit of time ends it, and `ShuttingDown` after
        `end_answers`. Cancellation: as leaving the block.
        """
        spec = self.pool.resolver.resolve(ask.model)
        with self._until_the_end() as scope:
            async with self._leased(spec, ask, on_loading) as answer:
                yield answer
        if scope.cancelled_caught:
            raise ShuttingDown("the server is ending")

    async def look_at(self, ask: Ask) -> None:
        """Raises: what can be said without a model: `ModelNotFound`, as `check`. Cancellation: as there."""
        spec = self.pool.resolver.resolve(ask.model)
        await self.check(spec, ask.messages, ask.chat, ask.generation)

    def end_answers(self) -> None:
        """End all answers in flight, and those that come, with `ShuttingDown`."""
        self._is_ending = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def _until_the_end(self) -> Iterator[trio.CancelScope]:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            if self._is_ending:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    @asynccontextmanager
    async def _leased(
        self, spec: Spec, ask: Ask, on_loading: Callable[[Loading], None]
    ) -> AsyncIterator[Answer]:
        async with (
            self.pool.lease(spec, keep_alive_s=ask.keep_alive_s, on_loading=on_loading) as lease,
            self._opened(lease, ask) as answer,
        ):
            self._metrics.begun(spec.name)
            try:
                yield answer
            finally:
                self._metrics.ended(spec.name, answer.count(), answer.completion)
                if answer.completion is None and answer.session_id is not None:
                    with trio.move_on_after(END_SESSION_S, shield=True):
                        await lease.model.end_session(answer.session_id, salt=ask.salt)

    async def check(
        self,
        spec: Spec,
        messages: list[dict[str, Any]] | None,
        chat: Mapping[str, Any],
        generation: Mapping[str, Any] = {},
    ) -> None:
        """Look at a request before it waits for its model; if that is there, rendering says the same at once.

        Raises: as `Model.chat`, as far as no model is needed. Cancellation: leaves a thread to itself.
        """
        if self.pool.is_ready(spec):
            await trio.lowlevel.checkpoint()
            return
        await trio.to_thread.run_sync(self._checks.check, messages, chat, generation, abandon_on_cancel=True)

    @asynccontextmanager
    async def _opened(self, lease: Lease, asked: Ask) -> AsyncIterator[Answer]:
        limits = self.settings.limits
        async with AsyncExitStack() as stack:
            if asked.messages is not None:
                asked = dataclasses.replace(
                    asked,
                    messages=await self.spoken(lease.model, asked.messages),
                    chat={**asked.chat, "lazy_tool_grammar": lease.entry.spec.table.lazy_tool_grammar},
                )
            started, ask, n_cut = trio.current_time(), asked, 0
            actor = lease.model.handle.actor
            held = asked.session_id is not None and actor.holds(asked.session_id, asked.salt)
            watch = (self._metrics.watch_chat,)
            while True:
                try:
                    with trio.fail_after(limits.engine_call_s):
                        events = await stack.enter_async_context(_stream(lease.model, ask, watch))
                    break
                except trio.TooSlowError:
                    raise EngineUnresponsive(
                        f"the engine did not take the request within {limits.engine_call_s:g} s",
                        detail={"limit": "engine_call_s", "seconds": limits.engine_call_s},
                    ) from None
                except StickyBusy:
                    if self.settings.session_busy == "refuse" or ask.session_id is None:
                        raise
                    ask = dataclasses.replace(ask, session_id=None)
                except NotSupported as why:
                    if why.reason != "chat_not_supported" or ask.plain is None:
                        raise
                    asked = ask = _without_template(ask, ask.plain)
                except ContextOverflow as why:
                    if ask.messages is not None:
                        ask = self._shorter(ask, why)
                    else:
                        ask, n_cut = await _cut(lease.model, ask, why)
            op: Op = "continue" if held and ask.session_id is not None else "infer"
            self._admitted(lease, op, trio.current_time() - started)
            can_reason = not ask.reasoning or (
                ask.messages is not None and await self._can_reason(lease.model)
            )
            scope = trio.CancelScope()
            answer = Answer(
                lease,
                events,
                limits,
                scope,
                session_id=ask.session_id,
                n_dropped=len(asked.messages or ()) - len(ask.messages or ()),
                n_cut=n_cut,
                one_call=ask.chat.get("parallel_tool_calls") is False,
                ignored=() if can_reason else ask.reasoning,
            )
            with scope:
                yield answer
            if scope.cancelled_caught:
                raise answer.overdue()

    async def spoken(self, model: Model, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the model's template takes them: see `late_system`."""
        if not needs_care(messages):
            return messages
        taken = self._takes_late.get(model)
        if taken is None:
            try:
                taken = is_taken((await model.chat_apply(PROBE)).prompt)
            except InvalidContent:
                taken = False
            self._takes_late[model] = taken
        return messages if taken else with_reminders(messages)

    async def _can_reason(self, model: Model) -> bool:
        """Whether the model's template has thinking, or shows in any way that it was asked for."""
        found = self._reasons.get(model)
        if found is None:
            try:
                much = await model.chat_apply(HELLO, template_kwargs=MUCH_REASONING)
                less = await model.chat_apply(HELLO, reasoning="off", template_kwargs=LITTLE_REASONING)
            except InvalidContent:  # it looks at how much is asked for
                found = True
            else:
                has_marks = much.applied.supports_thinking or bool(much.applied.thinking_ends)
                found = has_marks or much.prompt != less.prompt
            self._reasons[model] = found
        return found

    def _admitted(self, lease: Lease, op: Op, seconds: float) -> None:
        self._metrics.admitted(op, seconds)
        if seconds >= SLOW_ADMISSION_S:
            log.warning("handing a request to %s took %.1f s", lease.model.model_id, seconds)

    def _shorter(self, ask: Ask, why: ContextOverflow) -> Ask:
        may_cut = self.settings.fit_history if ask.may_cut is None else ask.may_cut
        if not may_cut or not isinstance(why.detail, dict):
            raise why
        n_prompt, n_wanted = int(why.detail["n_prompt"]), _room(ask, why)
        shorter = without_oldest(ask.messages or (), n_prompt=n_prompt, n_wanted=n_wanted)
        if shorter is None:
            raise why
        return dataclasses.replace(ask, messages=[dict(message) for message in shorter])


def _without_template(ask: Ask, plain: Plain) -> Ask:
    return dataclasses.replace(
        ask, messages=None, chat={}, plain=None, prompt=plain.prompt, generation=plain.generation
    )


def _room(ask: Ask, why: ContextOverflow) -> int:
    """Tokens that a prompt may have, so that an answer fits behind it."""
    assert isinstance(why.detail, dict)
    n_ctx = int(why.detail["n_ctx"])
    return max(1, n_ctx - 1 - int(min(ask.generation.get("max_tokens", math.inf), n_ctx // ROOM_FOR_ANSWER)))


async def _cut(model: Model, ask: Ask, why: ContextOverflow) -> tuple[Ask, int]:
    """A prompt without its beginning, where that is wanted; how many tokens went."""
    if not ask.may_cut or not isinstance(ask.prompt, str) or not isinstance(why.detail, dict):
        raise why
    n_wanted = _room(ask, why)
    # Its last part only: tokenizers are slow on what is long, and longer tokens than that are rare.
    ids = await model.tokenize_async(ask.prompt[-n_wanted * LONGEST_TOKEN :], add_special=False)
    head = model.tokenize("")  # what the model wants before every prompt
    kept = ids[-max(1, n_wanted - len(head)) :]
    return dataclasses.replace(ask, prompt=[*head, *kept]), int(why.detail["n_prompt"]) - len(head) - len(
        kept
    )


def _stream(model: Model, ask: Ask, watch: Sequence[Middleware]) -> AbstractAsyncContextManager[EventStream]:
    """`watch`: middleware of chats; a prompt that is text or ids is not rendered."""
    # Those who wait for a sequence do so in the pool's queue; what is left is the step in which one ends.
    options: dict[str, Any] = {
        **ask.generation,
        "salt": ask.salt,
        "session_id": ask.session_id,
        "on_full": "block",
    }
    if ask.messages is not None:
        return model.chat_stream(ask.messages, **ask.chat, **options, middleware=watch)
    assert ask.prompt is not None, "an ask has messages or a prompt"
    return model.stream(ask.prompt, **options)
