"""Room in RAM: buffers from the arena, and what leaves RAM to make them possible.

Without a spill tier everything evictable simply goes. With one, a part that lives only in RAM is published
there first and is readable all the while: there is no moment at which it is nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from .arena import class_bytes
from .parts import RAM
from .planner import headroom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arena import Buffer
    from .catalog import Catalog
    from .kinds import PartKind
    from .tierset import TierSet

HEAD_SPARE = (
    8192  # left free beside each buffer: the node's head and its share of the index are charged later
)
_LOOK_AGAIN_S = 0.05
_SPILL_TRIES = 3  # other takers may be faster; after this many rounds the tier is simply too busy


class Spill(Protocol):
    """Publishes parts that live in RAM on the spill tier."""

    async def __call__(self, parts: Sequence[int]) -> bool:
        """True when all of them are there."""
        ...


class Holders:
    """The leases that are open: what they hold cannot make room until they let go of it."""

    def __init__(self) -> None:
        self.n = 0
        self._let_go = trio.Event()

    def have_let_go(self) -> None:
        """One of them holds less than before."""
        self._let_go.set()
        self._let_go = trio.Event()

    async def wait(self) -> None:
        """Until one lets go of something, or a moment: what a write lets go of is not announced."""
        with trio.move_on_after(_LOOK_AGAIN_S):
            await self._let_go.wait()


class RamRoom:
    """Takes buffers from the arena, evicting as needed."""

    def __init__(self, catalog: Catalog, tiers: TierSet) -> None:
        self._catalog, self._tiers = catalog, tiers
        self.spill: Spill | None = None
        self.holders = Holders()

    def take_nowait(self, n_bytes: int, *, ceiling: float | None = None) -> Buffer | None:
        """A buffer now, or None: no room, or only by evicting what is worth more than `ceiling`.

        With a spill tier only copies of what file tiers hold may go; `take` can do more.
        """
        arena = self._catalog.arena
        buffer = arena.try_take(n_bytes, HEAD_SPARE)
        if buffer is not None or class_bytes(n_bytes) > arena.max_bytes:
            return buffer
        if not self._evict(
            arena.shortfall(n_bytes, HEAD_SPARE), ceiling=ceiling, copies_only=self.spill is not None
        ):
            return None
        return arena.try_take(n_bytes, HEAD_SPARE)

    async def take(self, n_bytes: int, *, ceiling: float | None = None) -> Buffer | None:
        """A buffer, after spilling if need be; None if there is no room."""
        arena = self._catalog.arena
        for _ in range(_SPILL_TRIES):
            buffer = self.take_nowait(n_bytes, ceiling=ceiling)
            if buffer is not None or self.spill is None or class_bytes(n_bytes) > arena.max_bytes:
                return buffer
            plan = self._catalog.plan(RAM, arena.shortfall(n_bytes, HEAD_SPARE), ceiling=ceiling)
            if not plan.enough or not await self._spill(plan.parts):
                return None
        return self.take_nowait(n_bytes, ceiling=ceiling)

    def fit(self) -> bool:
        """Evict what a head larger than the spare has pushed over the budget; False if that cannot be."""
        over = self._catalog.arena.used_bytes - self._catalog.arena.max_bytes
        return over <= 0 or self._evict(over, ceiling=None, copies_only=self.spill is not None)

    def evict(self, n_bytes: int, *, force: bool) -> tuple[int, int]:
        """Drop at least `n_bytes` from RAM if possible; returns parts and bytes."""
        catalog = self._catalog
        plan = catalog.plan(RAM, n_bytes, force=force)
        catalog.pins.n_forced += plan.n_forced
        self._drop(plan.parts)
        return len(plan.parts), plan.freed_bytes

    async def evict_spilling(self, n_bytes: int, *, force: bool) -> tuple[int, int]:
        """The same, moving to the spill tier what lives only in RAM; what cannot move stays."""
        plan = self._catalog.plan(RAM, n_bytes, force=force)
        refs = [self._ref(part) for part in plan.parts]
        if not await self._spill(plan.parts):
            return 0, 0
        parts = [part for part in map(self._catalog.part_of, refs) if part and part in self._catalog.ram]
        freed = sum(map(self._catalog.ram_cost, parts))
        self._drop(parts)
        return len(parts), freed

    def _evict(self, n_bytes: int, *, ceiling: float | None, copies_only: bool) -> bool:
        goal = headroom(n_bytes, self._catalog.arena.max_bytes)
        plan = self._catalog.plan(RAM, goal, ceiling=ceiling, copies_only=copies_only)
        if plan.freed_bytes < n_bytes:
            return False
        self._drop(plan.parts)
        return True

    def _drop(self, parts: Sequence[int]) -> None:
        catalog = self._catalog
        refs = [self._ref(part) for part in parts]
        for part, ref in zip(parts, refs, strict=True):
            if catalog.part_of(ref) != part:
                continue  # went with a part before it
            catalog.count_eviction(part, RAM)
            if catalog.tree.parts.home[part] != RAM:
                catalog.drop_copy(part)
            else:
                self._tiers.discard(catalog.drop_part(part))

    async def _spill(self, parts: Sequence[int]) -> bool:
        """Publish the parts that live only in RAM; private ones may not be published and go."""
        assert self.spill is not None
        tree = self._catalog.tree
        lone = [part for part in parts if tree.parts.home[part] == RAM]
        private = [part for part in lone if self._catalog.is_private(tree.parts.node[part])]
        self._drop(private)
        movable = [part for part in lone if part not in private]
        return not movable or await self.spill(movable)

    def _ref(self, part: int) -> tuple[bytes, PartKind]:
        tree = self._catalog.tree
        return tree.names.name(tree.parts.node[part]), tree.parts.kind(part)
