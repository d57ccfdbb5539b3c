"""All running file tiers: their state, their failures and recovery, and room made in them.

A tier that fails is switched off, counted, and started again with back-off; what it holds stays in the index
but is not handed out meanwhile. Other tiers are not touched.
Rule 1: files are removed only here, and only with the tier's removing lock held.
Rule 2: an evicted part is doomed before its file goes and dropped after; nobody leases it in between.
Rule 3: what the index drops for other reasons (damage, expiry) goes to the trash; the trash is emptied before
        anything is published, so that no dead file is adopted, and listings pass it over.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from erllama.errors import InvalidConfig

from .catalog import FileRef
from .header import Damaged
from .parts import RAM
from .planner import headroom
from .policy import TokenBucket
from .root import TierBusy
from .trie import NeedKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .catalog import Catalog
    from .filetier import FileTier
    from .meta import NodeMeta
    from .recover import PartId, Scan
    from .runner import Runner
    from .stats import Counters

log = logging.getLogger(__name__)
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
_INSERTS_PER_TURN = 100  # index inserts between two checkpoints of a scan: about 3 ms


@dataclass(slots=True, eq=False)
class TierState:
    """One tier and how it is doing. `retry_at` on trio's clock."""

    slot: int
    tier: FileTier
    bucket: TokenBucket
    on: bool = False
    failures: int = 0
    retry_at: float = 0.0
    error: str | None = None
    removing: trio.Lock = field(default_factory=trio.Lock)  # one eviction round of ours at a time

    @property
    def used_bytes(self) -> int:
        """What the tier holds, as this process last saw it."""
        return self.tier.root.last_used_bytes

    @property
    def writable(self) -> bool:
        """Whether it takes saves."""
        return self.on and not self.tier.root.read_only


class TierSet:
    """Starts, stops, heals tiers; makes room; removes files."""

    def __init__(self, catalog: Catalog, run: Runner, counters: Counters) -> None:
        self._catalog, self._run, self._counters = catalog, run, counters
        self._states: dict[int, TierState] = {}
        self._next_slot = RAM + 1
        self._trash: dict[FileRef, bool] = {}  # True: keep it in quarantine

    def __iter__(self) -> Iterator[TierState]:
        return iter(list(self._states.values()))

    def get(self, slot: int) -> TierState:
        """The tier in a slot."""
        return self._states[slot]

    def named(self, name: str) -> TierState:
        """The tier with a name. Raises: `InvalidConfig`."""
        for state in self._states.values():
            if state.tier.name == name:
                return state
        names = ", ".join(["ram", *(s.tier.name for s in self._states.values())])
        raise InvalidConfig(f"no tier {name!r}; there are: {names}", detail={"key": "tier", "value": name})

    # --- coming, going, failing -------------------------------------------------------------------

    async def add(self, tier: FileTier) -> TierState:
        """Start a tier. One that cannot start is added switched off, and tried again later.

        Raises: `InvalidConfig` if the name or the folder is taken.
        """
        for state in self._states.values():
            if state.tier.name == tier.name or state.tier.root.path == tier.root.path:
                raise InvalidConfig(f"{tier!r} clashes with {state.tier!r}", detail={"key": "tiers"})
        rate = tier.options.max_write_bytes_per_s
        state = TierState(self._next_slot, tier, TokenBucket(rate, rate * 60, self._catalog.clock))
        self._next_slot += 1
        self._states[state.slot] = state
        self._catalog.tier_max[state.slot] = tier.options.max_bytes
        self._catalog.off.add(state.slot)
        await self._start(state)
        return state

    async def _start(self, state: TierState) -> None:
        catalog = self._catalog
        try:
            found, hits, removed = await self._run(
                state.tier.start, catalog.known_parts(state.slot), catalog.clock()
            )
        except OSError as broken:
            self.fail(state, broken)
            return
        self._counters.leftovers_removed += removed
        await self.apply(state, found)
        catalog.add_hits(hits)
        state.on, state.failures, state.error = True, 0, None
        catalog.off.discard(state.slot)
        await self._measure(state)
        if state.used_bytes > state.tier.options.max_bytes:
            await self.make_room(state, 0)

    async def remove(self, state: TierState) -> None:
        """Stop a tier and forget what only it holds; its files stay. Copies in RAM live on there."""
        catalog = self._catalog
        tree = catalog.tree
        for row in list(tree.rows()):
            if tree.find(tree.names.name(row)) != row:
                continue  # went with its parent a moment ago
            for part in tree.part_rows(row):
                if tree.parts.home[part] != state.slot:
                    continue
                if tree.parts.hot[part]:
                    tree.parts.home[part] = RAM
                elif catalog.drop_part(part) and tree.find(tree.names.name(row)) != row:
                    break
        del self._states[state.slot]
        catalog.off.discard(state.slot)
        catalog.tier_max.pop(state.slot, None)
        await self._run(state.tier.close)

    def fail(self, state: TierState, error: BaseException) -> None:
        """Switch a tier off and set the time of the next try."""
        state.on = False
        state.failures += 1
        state.error = f"{type(error).__name__}: {error}"
        wait = min(FIRST_RETRY_S * 2 ** (state.failures - 1), LAST_RETRY_S)
        state.retry_at = trio.current_time() + wait
        self._counters.tier_failures += 1
        self._catalog.off.add(state.slot)
        log.warning("tier %s switched off, next try in %.0f s: %s", state.tier.name, wait, error)

    async def heal(self) -> None:
        """Try tiers whose waiting time is over."""
        for state in list(self._states.values()):
            if not state.on and trio.current_time() >= state.retry_at:
                await self._start(state)

    # --- what other processes did -----------------------------------------------------------------

    async def look(self) -> None:
        """Notice what other processes added and removed."""
        for state in list(self._states.values()):
            if not state.on:
                continue
            try:
                known = self._catalog.known_parts(state.slot)
                found = await self._run(state.tier.look, known, self._catalog.clock())
            except OSError as broken:
                self.fail(state, broken)
            except TierBusy:
                continue
            else:
                if found is not None:
                    await self.apply(state, found)

    async def apply(self, state: TierState, found: Scan) -> None:
        """Bring the index in line with a listing."""
        catalog = self._catalog
        for ref in found.vanished:
            part = catalog.part_of(ref)
            if part and catalog.tree.parts.home[part] == state.slot:
                self.discard(f for f in catalog.drop_part(part) if f.slot != state.slot)
        self._counters.rejected += found.rejected
        self._counters.orphans += len(found.orphans)
        heads: dict[bytes, NodeMeta] = {item.meta.name: item.meta for item in found.found}
        trash = {(ref.name, ref.kind) for ref in self._trash if ref.slot == state.slot}
        for i, item in enumerate(found.found):
            if item.id in trash:
                continue
            if i % _INSERTS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            while True:
                try:
                    catalog.add_found(state.slot, item, self.reader(heads))
                    break
                except NeedKey as need:
                    await self.fetch_head(need.node, heads)

    # --- heads ------------------------------------------------------------------------------------

    def reader(self, heads: dict[bytes, NodeMeta]) -> Callable[[int], NodeMeta]:
        """Heads from RAM copies and from `heads`; `NeedKey` for others."""
        catalog = self._catalog

        def read(row: int) -> NodeMeta:
            name = catalog.tree.names.name(row)
            meta = heads.get(name)
            if meta is not None:
                return meta
            for part in catalog.tree.part_rows(row):
                if part in catalog.ram:
                    return catalog.ram[part].meta
            raise NeedKey(row)

        return read

    async def fetch_head(self, row: int, heads: dict[bytes, NodeMeta]) -> bool:
        """Read a node's head into `heads`; a node whose head cannot be read is dropped. False then."""
        catalog = self._catalog
        name = catalog.tree.names.name(row)
        with contextlib.suppress(NeedKey):
            heads[name] = self.reader(heads)(row)
            return True
        for part in catalog.tree.part_rows(row):
            slot, kind = catalog.tree.parts.home[part], catalog.tree.parts.kind(part)
            state = self._states[slot]
            try:
                _, heads[name] = await self._run(state.tier.read_head, name, kind)
                return True
            except Damaged as damage:
                self.damaged((name, kind), damage)
            except OSError as broken:
                self.fail(state, broken)
        row_now = catalog.tree.find(name)
        if row_now is not None:  # its tier is off: it cannot be compared with, so it cannot stay
            catalog.drop_subtree(row_now)
        return False

    # --- removing ---------------------------------------------------------------------------------

    def damaged(self, ref: PartId, damage: Damaged, *, slot: int | None = None) -> None:
        """A part turned out not to be what it should: forget it and what needs it, quarantine its file.

        `slot`: the tier its file is on, where the index may not know it.
        """
        catalog, (name, kind) = self._catalog, ref
        self._counters.damage[damage.what] += 1
        log.warning("part %s %s is damaged: %s", name.hex()[:16], kind.name, damage)
        part = catalog.part_of(ref)
        if part:
            for file in catalog.drop_part(part):
                self._trash[file] = (file.name, file.kind) == ref and damage.what != "missing"
        elif slot is not None:
            self._trash[FileRef(slot, name, kind)] = True

    def discard(self, files: Iterable[FileRef]) -> None:
        """Have files removed that the index has dropped."""
        for file in files:
            self._trash.setdefault(file, False)

    async def empty_trash(self) -> None:
        """Remove or quarantine what the index has dropped; what cannot go now stays for the next time."""
        for slot in {ref.slot for ref in self._trash}:
            state = self._states.get(slot)
            mine = {ref: bad for ref, bad in self._trash.items() if ref.slot == slot}
            if state is None or state.tier.root.read_only:
                for ref in mine:
                    del self._trash[ref]
            elif state.on:
                await self._empty(state, mine)

    async def _empty(self, state: TierState, files: dict[FileRef, bool]) -> None:
        async with state.removing:
            try:
                await self._run(_remove_locked, state.tier, files)
            except TierBusy:
                return
            except OSError as broken:
                self.fail(state, broken)
                return
        for ref in files:
            self._trash.pop(ref, None)

    async def resync(self, state: TierState) -> None:
        """List a tier anew under its lock, sweep it, and bring the index in line."""
        catalog = self._catalog
        async with state.removing:
            try:
                lock = await self._run(state.tier.root.lock_removing)
            except TierBusy:
                return
            try:
                found = await self._run(state.tier.refresh, catalog.known_parts(state.slot), catalog.clock())
                await self.apply(state, found)
                await self._measure(state)
            except OSError as broken:
                self.fail(state, broken)
            finally:
                state.tier.root.files.close(lock)

    async def make_room(self, state: TierState, n_bytes: int, *, ceiling: float | None = None) -> bool:
        """Evict until `n_bytes` more fit the budget. False: nothing or not enough may go."""
        return await self._evict(state, n_bytes, absolute=False, force=False, ceiling=ceiling) is not None

    async def evict(self, state: TierState, n_bytes: int, *, force: bool) -> tuple[int, int]:
        """Evict at least `n_bytes` if possible; returns parts and bytes removed."""
        return await self._evict(state, n_bytes, absolute=True, force=force, ceiling=None) or (0, 0)

    async def _evict(
        self, state: TierState, n_bytes: int, *, absolute: bool, force: bool, ceiling: float | None
    ) -> tuple[int, int] | None:
        tier, catalog = state.tier, self._catalog
        async with state.removing:
            try:
                lock = await self._run(tier.root.lock_removing)
            except TierBusy:
                return None
            try:
                if await self._run(tier.root.has_foreign_changes):
                    found = await self._run(tier.refresh, catalog.known_parts(state.slot), catalog.clock())
                    await self.apply(state, found)
                used = await self._measure(state)
                need = n_bytes if absolute else used + n_bytes - tier.options.max_bytes
                if need <= 0:
                    return 0, 0
                goal = need if absolute else headroom(need, tier.options.max_bytes)
                plan = catalog.plan(state.slot, goal, force=force, ceiling=ceiling)
                if plan.freed_bytes < need and not absolute:
                    return None
                return await self._carry_out(state, plan.parts, n_forced=plan.n_forced)
            except OSError as broken:
                self.fail(state, broken)
                return None
            finally:
                tier.root.files.close(lock)

    async def _carry_out(self, state: TierState, parts: Sequence[int], *, n_forced: int) -> tuple[int, int]:
        catalog, tree = self._catalog, self._catalog.tree
        doomed = [(tree.names.name(tree.parts.node[p]), tree.parts.kind(p)) for p in parts]
        here = [ref for ref, p in zip(doomed, parts, strict=True) if tree.parts.home[p] == state.slot]
        for part in parts:
            catalog.count_eviction(part, state.slot)
        catalog.doomed.update(parts)
        freed = 0
        try:
            freed = await self._run(state.tier.remove, here)
        finally:
            catalog.doomed.difference_update(parts)
        for ref in here:
            part = catalog.part_of(ref)
            if part and tree.parts.home[part] == state.slot:
                self.discard(f for f in catalog.drop_part(part) if f.slot != state.slot)
        if n_forced:
            catalog.pins.n_forced += n_forced
        await self._measure(state)
        return len(here), freed

    async def _measure(self, state: TierState) -> int:
        if not state.tier.root.read_only:
            await self._run(state.tier.root.used_bytes)
        return state.used_bytes


def _remove_locked(tier: FileTier, files: dict[FileRef, bool]) -> None:
    with tier.root.removing():
        for ref, bad in files.items():
            if bad:
                tier.quarantine(ref.name, ref.kind)
        tier.remove((ref.name, ref.kind) for ref, bad in files.items() if not bad)
