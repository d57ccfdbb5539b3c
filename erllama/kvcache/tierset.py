"""All running file tiers: their state, their failures and recovery, and the trash they empty.

A tier that fails is switched off, counted, and started again with back-off; what it holds stays in the index
but is not handed out meanwhile. Other tiers are not touched.
Rule 1: files are removed only here and by the evictor, and only with the tier's removing lock held.
Rule 2: what the index drops for other reasons than room (damage, expiry) goes to the trash; the trash is
        emptied before anything is published, so that no dead file is adopted, and listings pass it over.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from erllama.errors import InvalidConfig

from .catalog import FileRef
from .files import WRONG_PLACE
from .header import Damaged
from .parts import RAM
from .policy import TokenBucket
from .root import TierBusy
from .trie import NeedKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

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
    closing: bool = False
    failures: int = 0
    retry_at: float = 0.0
    error: str | None = None
    removing: trio.Lock = field(default_factory=trio.Lock)  # one round of removals of ours at a time
    _removed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @asynccontextmanager
    async def removal(self) -> AsyncIterator[None]:
        """A round of removals: no publish of this process begins meanwhile."""
        try:
            async with self.removing:
                yield
        finally:
            self._removed.unpark_all()

    async def wait_publishable(self) -> None:
        """Wait until no round of removals is going on: a publish would only hold a thread and wait there."""
        while self.removing.locked():
            await self._removed.park()

    @property
    def used_bytes(self) -> int:
        """What the tier holds, as this process last saw it."""
        return self.tier.root.last_used_bytes

    @property
    def writable(self) -> bool:
        """Whether it can be written."""
        return self.on and not self.tier.root.read_only

    @property
    def accepts(self) -> bool:
        """Whether it takes new saves: not while it is being removed."""
        return self.writable and not self.closing


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
        """Start a tier. One whose device fails is added switched off, and tried again later.

        Raises: `InvalidConfig` if the name or the folder is taken, or there can be no such folder.
        """
        for state in self._states.values():
            if state.tier.name == tier.name:
                places = f"{state.tier.root.path} and {tier.root.path}"
                why = f"tiers: two are named {tier.name!r}, at {places}; each needs a name of its own"
                raise InvalidConfig(why, detail={"key": "tiers"})
            if state.tier.root.path == tier.root.path:
                names = f"{state.tier.name!r} and {tier.name!r}"
                why = f"tiers: {names} have the same folder, {tier.root.path}; each needs one of its own"
                raise InvalidConfig(why, detail={"key": "tiers"})
        rate = tier.options.max_write_bytes_per_s
        state = TierState(self._next_slot, tier, TokenBucket(rate, rate * 60, self._catalog.clock))
        self._next_slot += 1
        self._states[state.slot] = state
        self._catalog.pins.tier_max[state.slot] = tier.options.max_bytes
        self._catalog.off.add(state.slot)
        try:
            await self._start(state)
        except OSError as broken:
            if broken.errno in WRONG_PLACE:
                await self.remove(state)
                raise _no_folder(tier, broken) from broken
            self.fail(state, broken)
        return state

    async def _start(self, state: TierState) -> None:
        """Raises: OSError, with the tier as it was."""
        catalog = self._catalog
        known = catalog.known_parts(state.slot)
        found, hits, removed = await self._run(state.tier.start, known, catalog.clock())
        self._counters.leftovers_removed += removed
        await self.apply(state, found)
        catalog.add_hits(hits)
        state.on, state.failures, state.error = True, 0, None
        catalog.off.discard(state.slot)
        if not state.tier.root.read_only:
            await self._run(state.tier.root.used_bytes)

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
        catalog.pins.tier_max.pop(state.slot, None)
        for other in self._states.values():
            other.tier.root.distrust()  # it may hold files of nodes that were served from here
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
        log.warning("tier %s switched off, next try in %.0f s: %s", state.tier.name, wait, str(error))

    async def heal(self) -> None:
        """Try tiers whose waiting time is over."""
        for state in list(self._states.values()):
            if not state.on and trio.current_time() >= state.retry_at:
                try:
                    await self._start(state)
                except OSError as broken:
                    self.fail(state, broken)

    # --- what other processes did -----------------------------------------------------------------

    async def look(self) -> None:
        """Notice what other processes added and removed."""
        for state in list(self._states.values()):
            if not state.on:
                continue
            try:
                if not await self._run(state.tier.root.has_foreign_changes):
                    continue
                known = self._catalog.known_parts(state.slot)
                found = await self._run(state.tier.look, known, self._catalog.clock())
            except OSError as broken:
                self.fail(state, broken)
            except TierBusy:
                continue
            else:
                await self.apply(state, found)

    async def apply(self, state: TierState, found: Scan) -> None:
        """Bring the index in line with a listing."""
        catalog = self._catalog
        if state.slot not in self._states:
            return  # removed while it was being listed
        for ref in found.vanished:
            part = catalog.part_of(ref)
            if part and catalog.tree.parts.home[part] == state.slot:
                self.discard(f for f in catalog.drop_part(part) if f.slot != state.slot)
        self._counters.rejected += found.rejected
        self._counters.orphans += len(found.orphans)
        heads: dict[bytes, NodeMeta] = {item.meta.name: item.meta for item in reversed(found.found)}
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
                if part in catalog.ram and catalog.tree.bytes_match(row, catalog.ram[part].meta.text):
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
                _, meta = await self._run(state.tier.read_head, name, kind)
                row_now = catalog.tree.find(name)
                if row_now is not None and catalog.tree.bytes_match(row_now, meta.text):
                    heads[name] = meta
                    return True
            except Damaged as damage:
                now = catalog.part_of((name, kind))
                if now and now not in catalog.doomed:  # otherwise it was evicted while we read
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
        # As text: a record that kept the exception would keep its frames, and with them a buffer.
        log.warning("part %s %s is damaged: %s", name.hex()[:16], kind.name, str(damage))
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
        async with state.removal():
            try:
                await self._run(_remove_locked, state.tier, files)
            except TierBusy:
                return
            except OSError as broken:
                self.fail(state, broken)
                return
        for ref in files:
            self._trash.pop(ref, None)


def _no_folder(tier: FileTier, why: OSError) -> InvalidConfig:
    root = tier.root.path
    where = f" ({why.filename})" if why.filename not in (None, root) else ""
    return InvalidConfig(
        f"tier {tier.name!r}: {root} cannot be its folder: {why.strerror}{where}; "
        "give a root that this user can make and write",
        detail={"key": "root", "value": root},
    )


def _remove_locked(tier: FileTier, files: dict[FileRef, bool]) -> None:
    with tier.root.removing():
        for ref, bad in files.items():
            if bad:
                tier.quarantine(ref.name, ref.kind)
        tier.remove((ref.name, ref.kind) for ref, bad in files.items() if not bad)
