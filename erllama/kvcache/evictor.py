"""Making room in file tiers: one process at a time, leaves first.

Rule 1: an evicted part is doomed before its file goes and dropped after; nobody leases it in between.
Rule 2: what other processes did is listed first, so that no child is overlooked and no byte counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .planner import headroom
from .root import TierBusy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .catalog import Catalog
    from .runner import Runner
    from .tierset import TierSet, TierState


class Evictor:
    """Removes what the planner chooses."""

    def __init__(self, catalog: Catalog, tiers: TierSet, run: Runner) -> None:
        self._catalog, self._tiers, self._run = catalog, tiers, run

    async def keep_budgets(self) -> None:
        """Evict where a tier holds more than it may: its budget was lowered, or others filled it."""
        for state in self._tiers:
            if state.writable and state.used_bytes > state.tier.options.max_bytes:
                await self.make_room(state, 0)

    async def resync(self, state: TierState) -> None:
        """List a tier anew under its lock, sweep it, and bring the index in line."""
        catalog = self._catalog
        async with state.removal():
            try:
                lock = await self._run(state.tier.root.lock_removing)
            except TierBusy:
                return
            try:
                found = await self._run(state.tier.refresh, catalog.known_parts(state.slot), catalog.clock())
                await self._tiers.apply(state, found)
                await self._measure(state)
            except OSError as broken:
                self._tiers.fail(state, broken)
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
        async with state.removal():
            try:
                lock = await self._run(tier.root.lock_removing)
            except TierBusy:
                return None
            try:
                if await self._run(tier.root.has_foreign_changes):
                    found = await self._run(tier.refresh, catalog.known_parts(state.slot), catalog.clock())
                    await self._tiers.apply(state, found)
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
                self._tiers.fail(state, broken)
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
                self._tiers.discard(f for f in catalog.drop_part(part) if f.slot != state.slot)
        if n_forced:
            catalog.pins.n_forced += n_forced
        await self._measure(state)
        return len(here), freed

    async def _measure(self, state: TierState) -> int:
        if not state.tier.root.read_only:
            await self._run(state.tier.root.used_bytes)
        return state.used_bytes
