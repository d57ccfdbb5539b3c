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
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from .arena import Arena
from .catalog import Catalog, RamPart
from .check import Finding, check_store
from .filetier import FileTier
from .finder import Finder
from .header import Damaged
from .key import Identity, Prompt, Tokens, as_tokens
from .kinds import ROOT_NAME, NodeFlag, PartKind, Provenance, Refusal, SaveReason
from .loader import Loader
from .lookuplog import LookupLog
from .match import Lease, Match
from .meta import NodeMeta
from .parts import RAM
from .policy import SavePolicy, SecondSighting
from .room import RamRoom
from .runner import Runner, ThreadRunner
from .score import PrefillCost
from .stats import Counters, StoreStatistics, TierStatistics
from .tiers import RAM_TIER, FileTierOptions, RamTier, TierKind
from .tierset import TierSet
from .trie import NeedKey
from .writer import Job, Writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from .arena import Buffer
    from .files import Files
    from .tierset import TierState

log = logging.getLogger(__name__)
HOUSEKEEPING_S = 1.0
JOURNAL_EVERY_S = 30.0
_ALL_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store runs. `clock`: seconds since the epoch. `run`, `files`: for tests."""

    ram: RamTier = field(default_factory=RamTier)
    tiers: Sequence[FileTierOptions] = ()
    writer_max_concurrent: int = 2
    writer_max_bytes: int = 256 << 20
    n_threads: int = 4
    shutdown_s: float = 30.0
    pin_fraction: float = 0.25
    cost: PrefillCost = field(default_factory=PrefillCost)
    lookup_log: str | None = None
    clock: Callable[[], float] = time.time
    run: Runner | None = None
    files: Files | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A node to be saved behind `parent` (its name; the root's for a first block).

    `parts`: pooled buffers, filled; the store owns them from the call of `save` on, whatever it answers.
    `text`: key bytes of the tokens. `private`: never on a file tier. `policy`: gates; None saves anything.
    """

    identity: Identity
    tokens: Sequence[int] | Tokens
    parts: Mapping[PartKind, Buffer]
    parent: bytes = ROOT_NAME
    start: int = 0
    text: bytes = b""
    reason: SaveReason = SaveReason.COLD
    provenance: Provenance = Provenance.PREFILL
    anchor: bool = False
    private: bool = False
    ttl_s: float | None = None
    policy: SavePolicy | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of a save.

    `stored`: the node can be found now. `jobs`: what is on its way to a file tier. `refusal`: why it was
    not stored, or stored in RAM only.
    """

    name: bytes
    stored: bool
    jobs: tuple[Job, ...] = ()
    refusal: Refusal | None = None

    async def wait_durable(self) -> bool:
        """Wait for the file tier; True if all parts of this save are on it. Cancellation: harmless."""
        return all([await job.wait() for job in self.jobs]) and bool(self.jobs)


@dataclass(frozen=True, slots=True)
class Evicted:
    """Parts and bytes that left."""

    n_parts: int = 0
    n_bytes: int = 0

    def __add__(self, other: Evicted) -> Evicted:
        return Evicted(self.n_parts + other.n_parts, self.n_bytes + other.n_bytes)


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
        self._room = RamRoom(self._catalog, self._tiers)
        self._writer = Writer(
            self._catalog,
            self._tiers,
            run=self._run,
            counters=self._counters,
            max_bytes=options.writer_max_bytes,
        )
        self._loader = Loader(self._catalog, self._tiers, self._room, run=self._run, counters=self._counters)
        self._finder = Finder(self._catalog, self._tiers, self._counters)
        self._sightings = SecondSighting()
        self._log = LookupLog(options.lookup_log) if options.lookup_log else None
        self._closed = False
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
        canonical: bool = False,
        resume_key: bytes | None = None,
    ) -> Match:
        """The longest stored beginning of a prompt, over all tiers. Counts as a use of what it finds.

        `canonical`: only nodes made by canonical prefill. `resume_key`: a name the caller expects on the way;
        it decides nothing, it only says what kind of hit this was.
        """
        if self._log is not None:
            self._log.find(self._catalog.clock(), identity, prompt.tokens)
        return await self._finder.find(identity, prompt, canonical=canonical, resume_key=resume_key)

    def peek(self, identity: Identity, prompt: Prompt) -> tuple[int, int]:
        """Tokens and bytes of the longest stored beginning, in whole nodes. A plain read, without I/O."""
        return self._finder.peek(identity, prompt)

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
        """A pooled buffer for an export, or None if RAM has no room for it right now."""
        return self._room.take_nowait(n_bytes)

    async def buffer(self, n_bytes: int) -> Buffer | None:
        """A pooled buffer, after spilling if need be; None if there is no room."""
        return await self._room.take(n_bytes)

    async def save(self, draft: Draft, *, tier: str = RAM_TIER) -> Saved:
        """Store a node. It is readable at once; its jobs say when it is durable.

        A child of a node on a file tier goes to that tier. Raises: `InvalidConfig` for an unknown tier, and
        nothing else. Cancellation: the node is either stored or not; its buffers are released then.
        """
        meta = self._meta(draft)
        buffers = dict(draft.parts)
        try:
            refusal = self._gate(draft, meta)
            if refusal is None:
                row = await self._insert(meta)
                refusal = Refusal.NO_PARENT if row is None else None
            if refusal is not None or row is None:
                return self._refuse(meta, refusal or Refusal.NO_PARENT)
            return self._keep(draft, meta, row, buffers, tier)
        finally:
            for buffer in buffers.values():
                buffer.release()

    def _meta(self, draft: Draft) -> NodeMeta:
        tokens = as_tokens(draft.tokens).copy()
        ttl_s = draft.ttl_s if draft.ttl_s is not None else draft.policy.ttl_s if draft.policy else None
        flags = NodeFlag.ANCHOR if draft.anchor else NodeFlag.NONE
        return NodeMeta(
            name=draft.identity.node_name(draft.parent, tokens.tobytes()),
            parent=draft.parent,
            identity=draft.identity,
            start=draft.start,
            tokens=tokens,
            text=bytes(draft.text),
            provenance=draft.provenance,
            reason=draft.reason,
            flags=flags | (NodeFlag.PRIVATE if draft.private else NodeFlag.NONE),
            created_ns=max(0, int(self._catalog.clock() * 1e9)),
            expires_ns=None if ttl_s is None else int((self._catalog.clock() + ttl_s) * 1e9),
            facts=draft.facts,
        )

    def _gate(self, draft: Draft, meta: NodeMeta) -> Refusal | None:
        if self._closed:
            return Refusal.CLOSED
        policy = draft.policy
        if policy is None:
            return None
        refusal = policy.gate(
            draft.reason, meta.start + len(meta.tokens), whole=PartKind.WHOLE in draft.parts
        )
        known = self._catalog.tree.find(meta.name) is not None
        if refusal is None and policy.second_sighting and not known:
            return None if self._sightings.seen_before(meta.name) else Refusal.FIRST_SIGHTING
        return refusal

    async def _insert(self, meta: NodeMeta) -> int | None:
        heads: dict[bytes, NodeMeta] = {}
        while True:
            try:
                return self._catalog.ensure_node(meta, self._tiers.reader(heads))
            except NeedKey as need:
                await self._tiers.fetch_head(need.node, heads)

    def _refuse(self, meta: NodeMeta, refusal: Refusal) -> Saved:
        self._counters.refusals[refusal] += 1
        return Saved(name=meta.name, stored=False, refusal=refusal)

    def _keep(
        self, draft: Draft, meta: NodeMeta, row: int, buffers: dict[PartKind, Buffer], tier: str
    ) -> Saved:
        """Put parts that are new into RAM and queue them for their file tier. No awaits."""
        catalog = self._catalog
        new = {kind: buffer for kind, buffer in buffers.items() if not catalog.tree.part(row, kind)}
        state, refusal = self._target(row, tier, draft)
        n_bytes = sum(buffer.n_bytes for buffer in new.values())
        if state is not None and new and not self._writer.has_room(n_bytes):
            self._drop_if_empty(row)
            return self._refuse(meta, Refusal.BACK_PRESSURE)
        for kind, buffer in new.items():
            del buffers[kind]
            catalog.add_copy(row, kind, RamPart(buffer, meta))
            if self._log is not None:
                self._log.save(catalog.clock(), meta, kind, buffer.n_bytes)
        if new:
            self._counters.saves[draft.reason] += 1
        if draft.reason is SaveReason.AGENT_PREFIX:
            catalog.pin(("agent", meta.name), meta.name)
        if state is not None and new and not state.bucket.try_take(n_bytes):
            state, refusal = None, Refusal.WRITE_RATE
        jobs = self._writer.submit(row, state.slot) if state is not None and new else []
        if refusal is not None:
            self._counters.refusals[refusal] += 1
        return Saved(name=meta.name, stored=True, jobs=tuple(jobs), refusal=refusal)

    def _drop_if_empty(self, row: int) -> None:
        if not self._catalog.tree.part_rows(row) and self._catalog.tree.is_leaf(row):
            self._catalog.drop_subtree(row)

    def _target(self, row: int, tier: str, draft: Draft) -> tuple[TierState | None, Refusal | None]:
        """The file tier a save goes to (None: it stays in RAM), and why it cannot go there."""
        if tier == RAM_TIER:
            return None, None
        state = self._tiers.named(tier)
        tree, parent = self._catalog.tree, self._catalog.tree.parent[row]
        path = tree.path(parent)
        if draft.private or any(tree.flags(node) & NodeFlag.PRIVATE for node in path):
            return None, None
        slots = [slot for node in path if (slot := self._catalog.slot_of(node)) is not None]
        if slots:
            state = self._tiers.get(slots[-1])
        return (state, None) if state.writable else (None, Refusal.TIER_OFF)

    async def _spill(self, parts: Sequence[int]) -> bool:
        """Publish RAM parts on the spill tier (`room.Spill`)."""
        assert self._options.ram.spill is not None
        state = self._tiers.named(self._options.ram.spill)
        if not state.writable:
            return False
        rows = {self._catalog.tree.parts.node[part] for part in parts}
        jobs = [job for row in sorted(rows) for job in self._writer.submit(row, self._spill_slot(row, state))]
        return all([await job.wait() for job in jobs])

    def _spill_slot(self, row: int, state: TierState) -> int:
        for node in reversed(self._catalog.tree.path(row)):
            slot = self._catalog.slot_of(node)
            if slot is not None:
                return slot
        return state.slot

    # --- pins -------------------------------------------------------------------------------------

    def pin(self, name: bytes, *, key: Hashable = None, ttl_s: float | None = None) -> bool:
        """Keep the path to a node from eviction; False if that is over the pin budget or the node is gone.

        `key` names the pin for `unpin` (default: the node's name); the oldest pins give way to new ones.
        """
        return self._catalog.pin(("user", name if key is None else key), name, ttl_s)

    def unpin(self, key: Hashable) -> bool:
        """End a pin; False if there was none."""
        return self._catalog.pins.remove(("user", key))

    def set_live_key(self, owner: Hashable, name: bytes | None) -> bool:
        """Pin what a live sequence stands on; replaces the owner's former one. None: release it."""
        self._catalog.pins.remove(("live", owner))
        return name is None or self._catalog.pin(("live", owner), name)

    # --- making room ------------------------------------------------------------------------------

    async def evict_bytes(self, n_bytes: int, tiers: Collection[str] | None = None) -> Evicted:
        """Free at least `n_bytes` if possible, RAM first; pinned paths only when nothing else suffices.

        `tiers`: names or kinds ("ram", "ram_file", "disk") to take from; None: all.
        """
        freed = Evicted()
        for force in (False, True):
            if freed.n_bytes < n_bytes and self._chosen(RAM_TIER, TierKind.RAM, tiers):
                freed += await self._evict_ram(n_bytes - freed.n_bytes, force=force)
            for state in self._tiers:
                if freed.n_bytes < n_bytes and state.writable and self._chosen(*_labels(state), tiers):
                    freed += Evicted(*await self._tiers.evict(state, n_bytes - freed.n_bytes, force=force))
        return freed

    async def _evict_ram(self, n_bytes: int, *, force: bool) -> Evicted:
        if self._room.spill is None:
            return Evicted(*self._room.evict(n_bytes, force=force))
        return Evicted(*await self._room.evict_spilling(n_bytes, force=force))

    @staticmethod
    def _chosen(name: str, kind: TierKind, tiers: Collection[str] | None) -> bool:
        return tiers is None or name in tiers or kind in tiers

    async def gc(self) -> int:
        """Remove everything that is not pinned, live, leased or being written; returns how many parts."""
        n_parts = self._room.evict(_ALL_BYTES, force=False)[0]
        for state in self._tiers:
            if state.writable:
                n_parts += (await self._tiers.evict(state, _ALL_BYTES, force=False))[0]
        return n_parts

    # --- tiers ------------------------------------------------------------------------------------

    async def add_tier(self, options: FileTierOptions) -> None:
        """Start a file tier: scan what it holds, then use it. One that fails to start is tried again later.

        Raises: `InvalidConfig` if its name or folder is taken.
        """
        await self._tiers.add(FileTier(options, self._options.files))

    async def remove_tier(self, name: str) -> None:
        """Flush, then stop a tier. Its files stay and are found again when it is added again."""
        state = self._tiers.named(name)
        await self.flush()
        await self._tiers.remove(state)

    def list_tiers(self) -> tuple[TierStatistics, ...]:
        """All tiers, RAM first."""
        columns = self._catalog.tree.parts.columns()
        home, node = columns["home"], columns["node"]
        pinned = self._catalog.pinned_bytes()

        def n_parts(slot: int) -> int:
            return int(((home == slot) & (node != 0)).sum())

        ram = TierStatistics(
            name=RAM_TIER,
            kind=TierKind.RAM,
            max_bytes=self._arena.max_bytes,
            used_bytes=self._arena.used_bytes,
            n_parts=n_parts(RAM),
            pinned_bytes=pinned.get(RAM, 0),
            evictions=self._catalog.evicted[RAM],
        )
        return ram, *(
            TierStatistics(
                name=state.tier.name,
                kind=state.tier.kind,
                max_bytes=state.tier.options.max_bytes,
                used_bytes=state.used_bytes,
                n_parts=n_parts(state.slot),
                pinned_bytes=pinned.get(state.slot, 0),
                evictions=self._catalog.evicted[state.slot],
                on=state.on,
                read_only=state.tier.root.read_only,
                error=state.error,
            )
            for state in self._tiers
        )

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
                self._tiers.fail(state, broken)
        await self._write_lookups()

    async def _write_lookups(self) -> None:
        if self._log is None:
            return
        try:
            await self._run(self._log.write, self._log.take())
        except OSError as broken:
            log.warning("look-up log switched off: %s", broken)
            self._log = None

    async def check(self, *, fix: bool = False) -> list[Finding]:
        """Every inconsistency between index, RAM and files; payloads are read. `fix`: repair them."""
        return await check_store(self._catalog, self._tiers, run=self._run, fix=fix)

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

    async def close(self) -> None:
        """Take no more saves, flush, give up the tiers' locks. What is in RAM only is gone after."""
        self._closed = True
        await self.flush()
        for state in self._tiers:
            await self._run(state.tier.close)

    # --- numbers ----------------------------------------------------------------------------------

    def set_cost(self, cost: PrefillCost) -> None:
        """The engine measured what prefill costs; evictions go by it from now on."""
        self._catalog.cost = cost

    def count_pack(self, elapsed_ns: int) -> None:
        """The engine spent this long exporting KV."""
        self._counters.pack_total_ns += elapsed_ns

    def dump(self) -> Iterator[dict[str, Any]]:
        """One plain dictionary per node, parents before children."""
        tree = self._catalog.tree
        for row in tree.rows():
            yield {
                "name": tree.names.name(row).hex(),
                "parent": tree.names.name(tree.parent[row]).hex(),
                "start": tree.start[row],
                "n_tokens": tree.n_tokens[row],
                "provenance": tree.provenance(row).name.lower(),
                "reason": tree.reason(row).name.lower(),
                "anchor": bool(tree.flags(row) & NodeFlag.ANCHOR),
                "parts": {
                    tree.parts.kind(part).name.lower(): {
                        "bytes": int(tree.parts.size[part]),
                        "tier": self._tier_name(tree.parts.home[part]),
                        "in_ram": bool(tree.parts.hot[part]),
                        "hits": round(tree.parts.hits[part], 3),
                    }
                    for part in tree.part_rows(row)
                },
            }

    def _tier_name(self, slot: int) -> str:
        return RAM_TIER if slot == RAM else self._tiers.get(slot).tier.name

    def statistics(self) -> StoreStatistics:
        """All counters and sizes, at one instant."""
        counters, catalog, tree = self._counters, self._catalog, self._catalog.tree
        copied = {
            f.name: getattr(counters, f.name)
            for f in dataclasses.fields(counters)
            if not isinstance(getattr(counters, f.name), dict)
        }
        return StoreStatistics(
            **copied,
            n_nodes=tree.n_nodes,
            n_parts=tree.parts.n_parts,
            index_bytes=tree.nbytes,
            memory_bytes=self._arena.used_bytes,
            saves={reason.name.lower(): n for reason, n in counters.saves.items()},
            saves_dropped=counters.refusals[Refusal.BACK_PRESSURE],
            refusals={str(refusal): n for refusal, n in counters.refusals.items()},
            evictions=catalog.evicted.total(),
            evicted_unused_bytes=catalog.evicted_unused_bytes,
            damage=dict(counters.damage),
            rejected=dict(counters.rejected),
            bytes_read=dict(counters.bytes_read),
            bytes_written=dict(counters.bytes_written),
            published=dict(counters.outcomes),
            loads_in_flight=self._loader.n_in_flight,
            writes_queued=self._writer.n_queued,
            write_queue_bytes=self._writer.queued_bytes,
            leases=len(catalog.leases),
            pins=len(catalog.pins),
            pins_forced=catalog.pins.n_forced,
            arena=self._arena.statistics(),
            tiers=self.list_tiers(),
        )


def _labels(state: TierState) -> tuple[str, TierKind]:
    return state.tier.name, state.tier.kind


@asynccontextmanager
async def open_store(options: StoreOptions | None = None, **overrides: Any) -> AsyncIterator[KvStore]:
    """A running store; leaving the block flushes it, for at most `shutdown_s`.

    Raises: `InvalidConfig`, `InvalidOption` for tiers that cannot be.
    """
    options = dataclasses.replace(options or StoreOptions(), **overrides)
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
