"""The models that are loaded: on demand, shared, kept for a while, freed when idle.

Rule 1: one load at a time for each model; whoever needs it meanwhile waits for that one.
Rule 2: a model with a lease is never unloaded; its time to live begins when the last lease ends.
Rule 3: deciding to unload and beginning to has no await in between, so no request can slip in.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from erllama.engine.free_memory import free_memory
from erllama.errors import ErllamaError, LoadFailed, ModelWouldOom, QueueFull, QueueTimeout

from .embedding_models import context_of
from .memory import check_room, need_of

if TYPE_CHECKING:
    import erllama
    from erllama.engine.free_memory import FreeMemory

    from .registry import Resolver, Spec
    from .settings import Settings

log = logging.getLogger("erllama.server")

Progress = Callable[[float], None]
Load = Callable[["Spec", Progress], Awaitable["erllama.Model"]]


@dataclass(eq=False)
class Entry:
    """One model of the pool."""

    spec: Spec
    lanes: trio.CapacityLimiter
    keep_alive_s: float
    model: erllama.Model | None = None
    loading: Loading | None = None
    unloading: trio.Event | None = None
    n_inside: int = 0  # leases and those who wait for one
    n_in_line: int = 0  # of these, who has a place or wants one
    last_active: float = 0.0
    loaded_at: float = 0.0
    expires_at: float = math.inf
    is_let_go: bool = False  # it is freed as soon as nobody needs it

    @property
    def is_loaded(self) -> bool:
        """Whether a request could run at once."""
        return self.model is not None and not self.model.handle.stopping

    @property
    def is_idle(self) -> bool:
        """Loaded, and nobody needs it."""
        return self.is_loaded and not self.n_inside and self.unloading is None

    @property
    def n_running(self) -> int:
        """Requests that hold a place."""
        return int(self.lanes.borrowed_tokens)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a place."""
        return int(self.lanes.statistics().tasks_waiting)


@dataclass(eq=False)
class Loading:
    """A load in flight, and its outcome."""

    over: trio.Event = field(default_factory=trio.Event)
    fraction: float = 0.0
    takes_bytes: int = 0  # estimated; 0 until it is known
    error: ErllamaError | None = None

    def report(self, fraction: float) -> None:
        """Progress, 0 to 1."""
        self.fraction = fraction


@dataclass(frozen=True, slots=True)
class Lease:
    """A model that stays loaded, and a place in it. `load_s`: what waiting for the load took."""

    entry: Entry
    model: erllama.Model
    load_s: float
    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Counts since the start."""

    n_loads: int = 0
    n_failed_loads: int = 0
    n_unloads: int = 0


class Pool:
    """Models by name. `run` owns its tasks. `look`: what memory is free; called in a worker thread."""

    def __init__(
        self,
        settings: Settings,
        resolver: Resolver,
        load: Load,
        look: Callable[[], FreeMemory] = free_memory,
    ) -> None:
        self.resolver = resolver
        self._settings = settings
        self._load = load
        self._look = look
        self._entries: dict[str, Entry] = {}
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._left = trio.Event()
        self._n_loads = self._n_failed = self._n_unloads = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load and unload until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self._expire()

    # --- reads ---

    def entries(self) -> list[Entry]:
        """Models that are loaded or being loaded, the latest used first."""
        there = [e for e in self._entries.values() if e.is_loaded or e.loading is not None]
        return sorted(there, key=lambda e: -e.last_active)

    def all_entries(self) -> list[Entry]:
        """Every model that was ever asked for."""
        return list(self._entries.values())

    def entry_of(self, spec: Spec) -> Entry | None:
        """The entry of a model; None before it was first asked for."""
        return self._entries.get(spec.name)

    def is_ready(self, spec: Spec) -> bool:
        """Whether a lease would begin at once."""
        entry = self.entry_of(spec)
        return entry is not None and entry.is_loaded and entry.lanes.available_tokens > 0

    def statistics(self) -> PoolStatistics:
        """Counts since the start."""
        return PoolStatistics(n_loads=self._n_loads, n_failed_loads=self._n_failed, n_unloads=self._n_unloads)

    # --- leases ---

    @asynccontextmanager
    async def lease(
        self,
        spec: Spec,
        *,
        keep_alive_s: float | None = None,
        on_loading: Callable[[Loading], None] = lambda _: None,
        with_place: bool = True,
    ) -> AsyncIterator[Lease]:
        """The model, loaded, for the block, and a place among those who run, first come first served.

        `keep_alive_s`: how long it stays afterwards; 0 frees it before the block is left. Raises: `QueueFull`
        before anything begins, `QueueTimeout`, and what loading raises. Cancellation: the place is given
        back; a load goes on.
        """
        entry = self._entry(spec)
        depth = spec.table.queue_depth if spec.table.queue_depth is not None else self._settings.queue.depth
        if with_place and entry.n_in_line >= int(entry.lanes.total_tokens) + depth:
            raise QueueFull(
                f"the line for {spec.name!r} is full, {entry.n_in_line} in it or running; try again later"
            )
        if keep_alive_s:  # said later than whoever let it go
            entry.is_let_go = False
        entry.n_inside += 1
        entry.n_in_line += with_place
        try:
            started = trio.current_time()
            model = await self._loaded(entry, on_loading)
            loaded = trio.current_time()
            place = object()
            if with_place:
                await self._queue(entry, place)
            try:
                yield Lease(entry, model, loaded - started, trio.current_time() - loaded)
            finally:
                if with_place:
                    entry.lanes.release_on_behalf_of(place)
        finally:
            entry.n_inside -= 1
            entry.n_in_line -= with_place
            self._used(entry, keep_alive_s)
        if entry.is_idle and entry.keep_alive_s == 0:
            await self.unload(entry)

    def _entry(self, spec: Spec) -> Entry:
        entry = self._entries.get(spec.name)
        if entry is None:
            entry = self._entries[spec.name] = Entry(
                spec=spec,
                lanes=trio.CapacityLimiter(spec.concurrency),
                keep_alive_s=self._default_s(spec),
            )
        return entry

    def _default_s(self, spec: Spec) -> float:
        own = spec.table.keep_alive_s
        return self._settings.keep_alive_s if own is None else own

    async def _queue(self, entry: Entry, place: object) -> None:
        table = entry.spec.table.queue_timeout_s
        patience = self._settings.queue.timeout_s if table is None else table
        with trio.move_on_after(patience) as scope:
            await entry.lanes.acquire_on_behalf_of(place)
        if scope.cancelled_caught:
            raise QueueTimeout(f"no place in {entry.spec.name!r} within {patience:g} s; try again later")

    def _used(self, entry: Entry, keep_alive_s: float | None) -> None:
        """The last one to say how long it stays is obeyed; who says nothing means the default."""
        entry.last_active = trio.current_time()
        keep = self._default_s(entry.spec) if keep_alive_s is None else keep_alive_s
        entry.keep_alive_s = keep = 0 if entry.is_let_go else keep
        entry.expires_at = math.inf if keep < 0 else entry.last_active + keep
        self._wake()

    async def wait_unused(self) -> None:
        """Until no request has a lease or waits for one."""
        while any(entry.n_inside for entry in self._entries.values()):
            await self._left.wait()

    # --- loading ---

    async def _loaded(self, entry: Entry, on_loading: Callable[[Loading], None]) -> erllama.Model:
        if entry.unloading is not None:
            await entry.unloading.wait()
        if entry.is_loaded and entry.model is not None:
            await trio.lowlevel.checkpoint()
            return entry.model
        if entry.loading is None:
            assert self._nursery is not None, "the pool does not run"
            entry.loading = Loading()
            self._nursery.start_soon(self._work, entry, entry.loading)
        loading = entry.loading
        on_loading(loading)
        await loading.over.wait()
        if loading.error is not None:
            raise copy.copy(loading.error)
        if entry.model is None:
            raise LoadFailed(f"{entry.spec.name!r} was unloaded as soon as it was loaded")
        return entry.model

    async def _work(self, entry: Entry, loading: Loading) -> None:
        """One load, supervised: whatever happens, those who wait hear of it, once."""
        log.info("loading %s", entry.spec.name)
        try:
            entry.model = await self._load_with_room(entry, loading)
            entry.loaded_at = trio.current_time()
            self._n_loads += 1
        except ErllamaError as why:
            loading.error = why
        except Exception:
            log.exception("loading %s failed", entry.spec.name)
            loading.error = LoadFailed(f"loading {entry.spec.name!r} failed; the server's log has it")
        finally:
            entry.loading = None
            if loading.error is not None:
                self._n_failed += 1
            if not entry.n_inside:
                self._used(entry, None)
            loading.over.set()

    async def _load_with_room(self, entry: Entry, loading: Loading) -> erllama.Model:
        while True:
            try:
                if self._settings.memory_aware_loading:
                    await self._check_room(entry, loading)
                return await self._load(entry.spec, loading.report)
            except ModelWouldOom:
                idle = [e for e in self._entries.values() if e.is_idle and e is not entry]
                going = [e.unloading for e in self._entries.values() if e.unloading is not None]
                if not self._settings.memory_aware_loading or not (idle or going):
                    raise
                if going:
                    await going[0].wait()
                    continue
                victim = min(idle, key=lambda e: e.last_active)
                log.info("unloading %s: %s needs the memory", victim.spec.name, entry.spec.name)
                await self.unload(victim)

    async def _check_room(self, entry: Entry, loading: Loading) -> None:
        """Whether the model will fit, as far as its file tells. Raises: `ModelWouldOom`."""
        need = await need_of(entry.spec.table, await entry.spec.find_file(loading.report))
        if need is None:
            return
        others = self._loadings()
        free = await trio.to_thread.run_sync(self._look)
        others |= self._loadings()  # one that ended meanwhile may not have had its memory when we looked
        check_room(
            need,
            free,
            taken_bytes=sum(other.takes_bytes for other in others - {loading}),
            margin_bytes=self._settings.model_load_memory_margin,
        )
        loading.takes_bytes = need.total_bytes

    def _loadings(self) -> set[Loading]:
        return {entry.loading for entry in self._entries.values() if entry.loading is not None}

    # --- unloading ---

    async def unload(self, entry: Entry) -> bool:
        """Free an idle model; False if it is in use or not loaded. Cancellation: it is freed all the same."""
        if not entry.is_idle or entry.model is None:
            await trio.lowlevel.checkpoint()
            return False
        model, entry.model = entry.model, None
        entry.is_let_go = False
        entry.unloading = trio.Event()
        try:
            await model.unload()
        finally:
            entry.unloading.set()
            entry.unloading = None
            self._n_unloads += 1
        log.info("unloaded %s", entry.spec.name)
        return True

    async def let_go(self, spec: Spec) -> bool:
        """Free a model as soon as nobody needs it; False if meanwhile a request asked for it to stay.

        Cancellation: it is freed all the same.
        """
        entry = self._entries.get(spec.name)
        if entry is None:
            await trio.lowlevel.checkpoint()
            return True
        entry.is_let_go = True
        while entry.is_let_go and (entry.is_loaded or entry.loading is not None):
            left = self._left  # the last one may leave while `unload` looks
            if not await self.unload(entry):
                await left.wait()
        if entry.unloading is not None:
            await entry.unloading.wait()
        entry.is_let_go = False
        return not entry.is_loaded

    def _wake(self) -> None:
        self._changed.set()
        self._left.set()
        self._left = trio.Event()

    async def _expire(self) -> None:
        """Unload what has been idle for long enough."""
        while True:
            self._changed = trio.Event()
            idle = [e for e in self._entries.values() if e.is_idle]
            due = min((e.expires_at for e in idle), default=math.inf)
            if due <= trio.current_time():
                await self.unload(min(idle, key=lambda e: e.expires_at))
                continue
            with trio.move_on_at(due):
                await self._changed.wait()


def loader(engine: erllama.Engine, *, tier: str, policy: erllama.SavePolicy) -> Load:
    """How a pool loads models into an engine."""

    async def load(spec: Spec, progress: Progress) -> erllama.Model:
        while (old := engine.whereis(spec.name)) is not None:  # it crashed, or is still being freed
            await old.wait_closed()
            await trio.lowlevel.checkpoint()
        file = await spec.find_file(progress)
        return await engine.load_model(
            file,
            model_id=spec.name,
            model=spec.table.model_options(),
            context=await context_of(spec.table, file),
            policy=policy,
            tier=tier,
            chat_template=await _template(spec),
            progress=progress,
            exact=spec.table.exact,
            deterministic=spec.table.deterministic,
        )

    return load


async def _template(spec: Spec) -> str | None:
    """The text of the file that the settings name. Raises: `LoadFailed`, without its path."""
    if spec.table.chat_template_file is None:
        return None
    try:
        return await trio.Path(spec.table.chat_template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        log.error("models.%s.chat_template_file: %s", spec.name, why)
        raise LoadFailed(f"the file with the chat template of {spec.name!r} cannot be read") from None
