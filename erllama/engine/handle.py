"""One model as `runtime` sees it: its backend, its thread, its actor, and what never needs the actor.

`Handle.open` loads the model on its own thread; `serve` is the actor's life; closing is the end of the
`serve` task, so whoever opened the nursery owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import outcome
import trio

from erllama.errors import InvalidOption, NotSupported

from .actor import Actor
from .bare import bare_errors
from .cold import ColdPromise
from .embedder import Embedder
from .home import current_home
from .opened import Opened
from .runner import InlineRunner, Runner, ThreadRunner

if TYPE_CHECKING:
    from erllama.backend import Backend, BackendFacts
    from erllama.options import ContextOptions

    from .cache_link import CacheLink

Progress = Callable[[float], None]
Exact = Literal["session", "cold"]
PROGRESS_INTERVAL_S = 0.1


class Handle:
    """A loaded model."""

    def __init__(
        self,
        opened: Opened,
        cache: CacheLink | None = None,
        flush_s: float = 30.0,
        exact: Exact = "session",
        deterministic: bool = False,
        cold: ColdPromise | None = None,
    ) -> None:
        self.model_id = opened.model_id
        self.facts = opened.facts
        self.backend = opened.backend
        self.home = current_home()
        self.exact = exact  # what requests get that do not say
        self.deterministic = deterministic  # whether they may not say anything else
        self.loaded_at = time.monotonic()
        self.actor = Actor(opened, cache, cold)
        self.embedder: Embedder | None = None  # None: this model gives no embeddings
        if opened.facts.embeddings is not None:
            self.embedder = Embedder(opened, self._is_generating, self.actor.pause)
        self.closed = trio.Event()
        self.stopping = False  # no new requests, no reads
        self.gone = "was unloaded"  # what became of it, once it is stopping
        self._runner = opened.runner
        self._flush_s = flush_s
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return repr(self.actor).replace("Actor", "Model", 1)

    @classmethod
    async def open(
        cls,
        model_id: str,
        backend: Backend,
        options: ContextOptions,
        on_progress: Progress | None,
        link: Callable[[BackendFacts], CacheLink | None] = lambda _: None,
        flush_s: float = 30.0,
        exact: Exact = "session",
        deterministic: bool = False,
    ) -> Handle:
        """Load the model. `on_progress` gets fractions from 0 to 1, in the trio thread.

        Raises: `NotSupported` for exact="cold" where that does not hold, and what `open` or `on_progress`
        raises, with nothing left behind.
        Cancellation: the load is told to stop, waited for, and leaves nothing behind.
        """
        runner = make_runner(backend, model_id)
        on_progress = _without_repeats(on_progress)
        try:
            with bare_errors():
                async with trio.open_nursery() as nursery:
                    fraction: Callable[[], float] | None = getattr(backend, "load_fraction", None)
                    if on_progress is not None and fraction is not None:
                        nursery.start_soon(_poll, fraction, on_progress)
                    cancel_open = getattr(backend, "cancel_open", None)
                    result = await outcome.acapture(runner.run, backend.open, on_cancel=cancel_open)
                    nursery.cancel_scope.cancel()
            facts: BackendFacts = result.unwrap()
            if facts.n_batch < facts.n_slots:
                raise InvalidOption(
                    f"n_batch={facts.n_batch} is less than n_seq_max={facts.n_slots}: "
                    f"a step could not give every sequence its row",
                    detail={"key": "n_batch", "value": facts.n_batch},
                )
            promise = ColdPromise(backend, facts)
            if not facts.generates:
                promise.learned("it only embeds")
            if exact == "cold":
                await _prove(promise, backend, runner, model_id)
            if on_progress is not None:
                on_progress(1.0)
        except BaseException:
            try:
                with trio.CancelScope(shield=True):
                    await runner.run(backend.close)
            finally:
                runner.close()
            await trio.lowlevel.checkpoint_if_cancelled()  # a load that was told to stop fails as told
            raise
        opened = Opened(model_id, backend, facts, options, runner)
        return cls(opened, link(facts), flush_s, exact, deterministic, promise)

    async def serve(self) -> None:
        """Run the actor until `stop`, or until the surrounding nursery is cancelled."""
        try:
            with self._scope, bare_errors():
                async with trio.open_nursery() as nursery:
                    if self.embedder is not None:
                        nursery.start_soon(self.embedder.run)
                    await self.actor.run(nursery)
        except BaseException:
            if not self.stopping:  # cancelled from outside, perhaps as a group
                self.gone = "ended with its engine; use it inside the engine's `async with` block"
            raise
        finally:
            self.stopping = True
            try:
                with trio.move_on_after(self._flush_s, shield=True):
                    await self.actor.flush()
                with trio.CancelScope(shield=True):
                    await self._runner.run(self.backend.close)
            finally:
                self._runner.close()
                self.closed.set()

    def stop(self) -> None:
        """End the actor; `closed` is set once everything is freed."""
        self.stopping = True
        self._scope.cancel()

    def optional(self, name: str) -> Callable[..., Any]:
        """A method the backend may lack. Raises `NotSupported`."""
        method: Callable[..., Any] | None = getattr(self.backend, name, None)
        if method is None:
            raise NotSupported(f"the backend of {self.model_id!r} has no {name}", detail=name)
        return method

    def _is_generating(self) -> bool:
        return bool(self.actor.n_requests)

    @property
    def phase(self) -> Literal["idle", "prefilling", "generating"]:
        """What the model is doing: a plain read."""
        s = self.actor.statistics()
        return "generating" if s.n_decoding else "prefilling" if s.n_prefilling else "idle"


async def _prove(promise: ColdPromise, backend: Backend, runner: Runner, model_id: str) -> None:
    """Have the promise tried. Raises: `NotSupported` if it does not hold."""
    if not promise.known:
        probe_cold: Callable[[], str | None] = backend.probe_cold  # type: ignore[attr-defined]  # it has one
        cancel_open = getattr(backend, "cancel_open", None)
        promise.learned(await runner.run(probe_cold, on_cancel=cancel_open))
    if (refusal := promise.refusal(model_id)) is not None:
        raise refusal


def _without_repeats(on_progress: Progress | None) -> Progress | None:
    """The same callback, called only when the fraction has changed."""
    if on_progress is None:
        return None
    last: float | None = None

    def report(fraction: float) -> None:
        nonlocal last
        if fraction != last:
            last = fraction
            on_progress(fraction)

    return report


async def _poll(fraction: Callable[[], float], on_progress: Progress) -> None:
    while True:
        on_progress(fraction())
        await trio.sleep(PROGRESS_INTERVAL_S)


def make_runner(backend: Backend, model_id: str) -> Runner:
    """A thread of its own, unless the backend asks to be called inline (`inline_delay_s`)."""
    delay: Callable[[], float] | None = getattr(backend, "inline_delay_s", None)
    return ThreadRunner(f"erllama {model_id}") if delay is None else InlineRunner(delay)
