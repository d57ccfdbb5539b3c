"""The store's asynchronous face: find, lease, save, pin, evict, flush, check.

Deciding is done in the catalog, synchronously, so every change is atomic between two awaits; file work is
done in worker threads. A save is readable as soon as `save` returns; it is durable when its jobs are done.

Rule 1: a look-up or save never raises for what the store is made of (damage, full or failing tiers): it is a
        miss or a refusal, counted and logged.
Rule 2: look up and lease first, save after; nothing leased is evicted.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from .arena import Arena, class_bytes
from .catalog import Catalog
from .check import Finding, check_store
from .evictor import Evictor
from .files import NO_SPACE
from .filetier import FileTier
from .finder import Finder
from .header import Damaged
from .kinds import PartKind, Refusal
from .loader import Loader
from .lookuplog import LookupLog
from .match import Lease, Match, MatchedNode
from .options import StoreOptions
from .report import dump_nodes, store_statistics, tier_statistics
from .room import RamRoom
from .runner import Runner, ThreadRunner
from .saver import Draft, Saved, Saver
from .stats import Counters, StoreStatistics, TierStatistics
from .tiers import RAM_TIER, FileTierOptions, TierKind
from .tierset import TierSet
from .writer import Writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Hashable, Iterator, Sequence

    from .arena import Buffer
    from .key import Identity, Prompt
    from .score import PrefillCost
    from .tierset import TierState

log = logging.getLogger(__name__)
HOUSEKEEPING_S = 1.0
JOURNAL_EVERY_S = 30.0
_ALL_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Evicted:
    """Parts and bytes that left; `n_nodes` are gone altogether."""

    n_parts: int = 0
    n_bytes: int = 0
    n_nodes: int = 0


class KvStore:
    """An exact, tiered store of KV parts. Made by `open_store`; one per process and set of tiers."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._counters = Counters()
        self._run: Runner = options.run or ThreadRunner(options.n_threads)
        self._arena = Arena(options.ram.max_bytes)
        self._catalog = Catalog(
            self._arena, options.clock, cost=options.cost, pin_fraction=options.pin_fraction
        )
        self._tiers = TierSet(self._catalog, self._run, self._counters)
        self._evictor = Evictor(self._catalog, self._tiers, self._run)
        self._room = RamRoom(self._catalog, self._tiers)
        self._writer = Writer(
            self._catalog,
            self._tiers,
            self._evictor,
            run=self._run,
            counters=self._counters,
            max_bytes=options.writer_max_bytes,
        )
        self._loader = Loader(self._catalog, self._tiers, self._room, run=self._run, counters=self._counters)
        self._finder = Finder(self._catalog, self._tiers, self._counters)
        self._log = LookupLog(options.lookup_log) if options.lookup_log else None
        self._saver = Saver(
            self._catalog, self._tiers, self._writer, self._room, counters=self._counters, log=self._log
        )
        if options.ram.spill is not None:
            self._room.spill = self._spill

    def __repr__(self) -> str:
        tree, queued = self._catalog.tree, self._writer.n_queued
        return f"<KvStore {tree.n_nodes} nodes, {self._arena.used_bytes} B in RAM, {queued} writes queued>"

    # --- finding and reading ----------------------------------------------------------------------

    async def find(
        self,
        identity: Identity,
        prompt: Prompt,
        *,
        resume_key: bytes | None = None,
    ) -> Match:
        """The longest stored beginning of a prompt, over all tiers. Counts as a use of what it finds.

        `resume_key`: a name the caller expects on the way; it decides nothing, it only says what kind of hit
        this was.
        """
        await trio.lowlevel.checkpoint()
        match = await self._finder.find(identity, prompt, resume_key=resume_key)
        if self._log is not None:
            self._log.find(self._catalog.clock(), identity, prompt.tokens, match.tip)
        return match

    def peek(self, identity: Identity, prompt: Prompt) -> tuple[int, int]:
        """Tokens and bytes of the longest stored beginning, in whole nodes. A plain read, without I/O."""
        return self._finder.peek(identity, prompt)

    def path(self, identity: Identity, prompt: Prompt) -> list[MatchedNode]:
        """The whole nodes that a prompt begins with and their parts. A plain read, without I/O."""
        return self._finder.path(identity, prompt)

    def lease(self, match: Match) -> Lease:
        """Hold a match's nodes while they are read: `with store.lease(match) as lease: …`."""
        return Lease(self._catalog, self._loader, match)

    def has(self, name: bytes, kind: PartKind = PartKind.BASE) -> bool:
        """Whether a part is stored: then there is no need to export it."""
        return self._catalog.has(name, kind)

    async def wait_saved(self, name: bytes) -> bool:
        """Wait until a node's pending writes are over; True if it is stored. Cancellation: harmless."""
        for kind in PartKind:
            job = self._writer.pending((name, kind))
            if job is not None:
                await job.wait()
        return any(self._catalog.has(name, kind) for kind in PartKind)

    def quarantine(self, name: bytes, what: str) -> None:
        """The engine found a node unusable (a decode failed right behind it): never serve it again."""
        for kind in PartKind:
            if self._catalog.part_of((name, kind)):
                self._tiers.damaged((name, kind), Damaged(what, "reported by the engine"))

    # --- saving -----------------------------------------------------------------------------------

    def buffer_nowait(self, n_bytes: int) -> Buffer | None:
        """A pooled buffer for an export, or None if RAM has no room for it right now; that is counted."""
        return self._counted(n_bytes, self._room.take_nowait(n_bytes))

    async def buffer(self, n_bytes: int) -> Buffer | None:
        """A pooled buffer, after spilling if need be; None if there is no room, which is counted."""
        await trio.lowlevel.checkpoint()
        return self._counted(n_bytes, await self._room.take(n_bytes))

    def _counted(self, n_bytes: int, buffer: Buffer | None) -> Buffer | None:
        """Without a buffer there will be no save: what refuses one is known here."""
        if buffer is None:
            never = class_bytes(n_bytes) > self._arena.max_bytes
            self._counters.refusals[Refusal.TOO_LARGE if never else Refusal.NO_ROOM] += 1
        return buffer

    async def save(self, draft: Draft, *, tier: str = RAM_TIER) -> Saved:
        """Store a node. It is readable at once; its jobs say when it is durable.

        A child of a node on a file tier goes to that tier. Raises: `InvalidConfig` for an unknown tier,
        ValueError for a draft without tokens or parts; nothing for what the store is made of.
        Cancellation: the node is either stored or not; its buffers are released then.
        """
        return await self._saver.save(draft, tier)

    async def _spill(self, parts: Sequence[int]) -> bool:
        """Publish RAM parts on the spill tier (`room.Spill`)."""
        assert self._options.ram.spill is not None
        state = self._tiers.named(self._options.ram.spill)
        if not state.accepts:
            return False
        rows = {self._catalog.tree.parts.node[part] for part in parts}
        catalog = self._catalog
        jobs = [
            job
            for row in sorted(rows)
            for job in self._writer.submit(row, catalog.durable_slot(row) or state.slot)
        ]
        return all([await job.wait() for job in jobs])

    # --- pins -------------------------------------------------------------------------------------

    def pin(
        self,
        name: bytes,
        *,
        key: Hashable = None,
        ttl_s: float | None = None,
        fraction: float | None = None,
    ) -> bool:
        """Keep the path to a node from eviction; False if that is over the pin budget or the node is gone.

        `key` names the pin for `unpin` (default: the node's name); the oldest pins give way to new ones.
        `fraction`: the share of a tier that pins of this share or a smaller one may take, if it is not the
        store's.
        """
        chosen = ("user", name if key is None else key)
        return self._catalog.pins.pin(chosen, name, ttl_s=ttl_s, fraction=fraction)

    def unpin(self, key: Hashable) -> bool:
        """End a pin; False if there was none."""
        return self._catalog.pins.remove(("user", key))

    def list_pins(self) -> list[tuple[Hashable, bytes, float | None]]:
        """Key, node name and end (seconds since the epoch, None: never) of each pin, longest unused first.

        Keys are pairs of what made the pin ("user", "agent", "live") and its own key.
        """
        return [(key, pin.name, pin.until) for key, pin in self._catalog.pins.items()]

    def set_live_key(self, owner: Hashable, name: bytes | None) -> bool:
        """Pin what a live sequence stands on; replaces the owner's former one. None: release it."""
        self._catalog.pins.remove(("live", owner))
        return name is None or self._catalog.pins.pin(("live", owner), name)

    def set_anchor(self, name: bytes) -> bool:
        """Its window parts and state are evicted last from now on; False if the node is gone.

        A save with `anchor` does the same. In a file that is there already nothing changes.
        """
        return self._catalog.set_anchor(name)

    # --- making room ------------------------------------------------------------------------------

    async def evict_bytes(self, n_bytes: int, tiers: Collection[str] | None = None) -> Evicted:
        """Free at least `n_bytes` if possible, RAM first; pinned paths only when nothing else suffices.

        `tiers`: names or kinds ("ram", "ram_file", "disk") to take from; None: all.
        """
        before, n_parts, freed = self._catalog.tree.n_nodes, 0, 0
        for force in (False, True):
            if freed < n_bytes and self._chosen(RAM_TIER, TierKind.RAM, tiers):
                n, size = await self._evict_ram(n_bytes - freed, force=force)
                n_parts, freed = n_parts + n, freed + size
            for state in self._tiers:
                if freed < n_bytes and state.writable and self._chosen(*_labels(state), tiers):
                    n, size = await self._evictor.evict(state, n_bytes - freed, force=force)
                    n_parts, freed = n_parts + n, freed + size
        return Evicted(n_parts, freed, before - self._catalog.tree.n_nodes)

    async def _evict_ram(self, n_bytes: int, *, force: bool) -> tuple[int, int]:
        if self._room.spill is None:
            return self._room.evict(n_bytes, force=force)
        return await self._room.evict_spilling(n_bytes, force=force)

    @staticmethod
    def _chosen(name: str, kind: TierKind, tiers: Collection[str] | None) -> bool:
        return tiers is None or name in tiers or kind in tiers

    async def gc(self) -> int:
        """Remove everything that is not pinned, live, leased or being written; returns how many nodes."""
        before = self._catalog.tree.n_nodes
        self._room.evict(_ALL_BYTES, force=False)
        for state in self._tiers:
            if state.writable:
                await self._evictor.evict(state, _ALL_BYTES, force=False)
        return before - self._catalog.tree.n_nodes

    # --- tiers ------------------------------------------------------------------------------------

    async def add_tier(self, options: FileTierOptions) -> None:
        """Start a file tier: scan what it holds, then use it. One whose device fails is tried again later.

        Raises: `InvalidConfig` if its name or folder is taken, or there can be no such folder.
        """
        await self._tiers.add(FileTier(options, self._options.files))
        await self._evictor.keep_budgets()

    async def remove_tier(self, name: str) -> None:
        """Flush, then stop a tier. Its files stay and are found again when it is added again."""
        state = self._tiers.named(name)
        state.closing = True
        await self.flush()
        await self._tiers.remove(state)

    def list_tiers(self) -> tuple[TierStatistics, ...]:
        """All tiers, RAM first."""
        return tier_statistics(self._catalog, self._tiers)

    # --- upkeep -----------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until all saves are on their tiers, dead files are gone and hit counts are written."""
        await self._writer.flush()
        await self._tiers.empty_trash()
        await self._write_journals()

    async def housekeeping(self) -> None:
        """One round of upkeep: failed tiers, other processes' changes, expired nodes, dead files."""
        await self._tiers.heal()
        await self._tiers.look()
        await self._evictor.keep_budgets()
        for row in self._catalog.expired():
            if row in self._catalog.expires:
                self._tiers.discard(self._catalog.drop_subtree(row))
        await self._tiers.empty_trash()
        await self._write_lookups()

    async def _run_housekeeping(self) -> None:
        last_journal = trio.current_time()
        while True:
            await trio.sleep(HOUSEKEEPING_S)
            await self.housekeeping()
            if trio.current_time() - last_journal >= JOURNAL_EVERY_S:
                last_journal = trio.current_time()
                await self._write_journals()

    async def _write_journals(self) -> None:
        for state in self._tiers:
            if not state.writable:
                continue
            try:
                await self._run(state.tier.touch, self._catalog.take_touched(state.slot))
                await self._run(state.tier.write_journal, self._catalog.hits_on(state.slot))
            except OSError as broken:
                if broken.errno not in NO_SPACE:  # then the counts have to wait; the tier still serves
                    self._tiers.fail(state, broken)
        await self._write_lookups()

    async def _write_lookups(self) -> None:
        if self._log is None:
            return
        try:
            await self._run(self._log.write, self._log.take())
        except OSError as broken:
            log.warning("look-up log switched off: %s", str(broken))
            self._log = None

    async def check(self, *, fix: bool = False) -> list[Finding]:
        """Every inconsistency between index, RAM and files; payloads are read. `fix`: repair them."""
        return await check_store(self._catalog, self._tiers, self._evictor, run=self._run, fix=fix)

    async def start(self) -> None:
        """Start the tiers; `open_store` does this. Raises: `InvalidConfig`."""
        for options in self._options.tiers:
            await self.add_tier(options)
        if self._options.ram.spill is not None:
            self._tiers.named(self._options.ram.spill)

    async def run(self) -> None:
        """Write and look after things until cancelled; `open_store` does this."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._options.writer_max_concurrent):
                nursery.start_soon(self._writer.run_worker)
            nursery.start_soon(self._run_housekeeping)
            nursery.start_soon(self._loader.run)

    async def close(self) -> None:
        """Take no more saves, flush, give up the tiers' locks. What is in RAM only is gone after."""
        self._saver.closed = True
        try:
            await self.flush()
        finally:
            for state in self._tiers:
                state.tier.close()  # two quick calls; a thread could not be waited for any more

    # --- numbers ----------------------------------------------------------------------------------

    def set_cost(self, identity: Identity, cost: PrefillCost) -> None:
        """The engine measured what prefill costs this model; evictions go by it from now on."""
        self._catalog.set_cost(identity, cost)
        if self._log is not None:
            self._log.cost(identity, cost)

    def count_pack(self, elapsed_ns: int) -> None:
        """The engine spent this long exporting KV."""
        self._counters.pack_total_ns += elapsed_ns

    def dump(self) -> Iterator[dict[str, Any]]:
        """One plain dictionary per node, parents before children."""
        return dump_nodes(self._catalog, self._tiers)

    def statistics(self) -> StoreStatistics:
        """All counters and sizes, at one instant."""
        return store_statistics(
            self._catalog, self._tiers, self._counters, loader=self._loader, writer=self._writer
        )


def _labels(state: TierState) -> tuple[str, TierKind]:
    return state.tier.name, state.tier.kind


@asynccontextmanager
async def open_store(options: StoreOptions | None = None, **overrides: Any) -> AsyncIterator[KvStore]:
    """A running store; leaving the block flushes it, for at most `shutdown_s`.

    Raises: `InvalidConfig`, `InvalidOption` for tiers that cannot be.
    """
    options = StoreOptions(**overrides) if options is None else dataclasses.replace(options, **overrides)
    store = KvStore(options)
    await store.start()
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        try:
            yield store
        except Exception as raised:  # raised again below, as itself and not as a group of one
            error = raised
        finally:
            with trio.move_on_after(options.shutdown_s, shield=True):
                await store.close()
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error


__all__ = [
    "Draft",
    "Evicted",
    "KvStore",
    "Saved",
    "StoreOptions",
    "open_store",
]
