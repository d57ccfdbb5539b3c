"""`engine.cache`: what operators and applications ask of the store behind all models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from erllama.engine.actor import Actor
    from erllama.kvcache.check import Finding
    from erllama.kvcache.stats import StoreStatistics, TierStatistics
    from erllama.kvcache.store import Evicted, KvStore
    from erllama.kvcache.tiers import DiskTier, RamFileTier


class Cache:
    """The prefix cache of one engine."""

    def __init__(self, store: KvStore, actors: Callable[[], Iterable[Actor]]) -> None:
        self.store = store
        self._actors = actors

    def __repr__(self) -> str:
        return repr(self.store)

    def counters(self) -> StoreStatistics:
        """Every counter and size, at one instant."""
        return self.store.statistics()

    def info(self) -> StoreStatistics:
        """The same as `counters`: sizes and counters are read together, so that they fit each other."""
        return self.store.statistics()

    def dump(self) -> Iterator[dict[str, Any]]:
        """One plain dictionary per node, parents before children."""
        return self.store.dump()

    async def flush(self) -> None:
        """Wait until everything computed so far is saved, and durable where its tier is.

        Cancellation: what is left is saved in the background.
        """
        for actor in list(self._actors()):
            await actor.wait_saved()
        await self.store.flush()

    async def gc(self) -> int:
        """Remove everything that is not pinned or in use; returns the number of parts removed."""
        return await self.store.gc()

    async def evict_bytes(self, n_bytes: int, tiers: Collection[str] | None = None) -> Evicted:
        """Free at least `n_bytes` where possible; `tiers`: names or kinds to take from, None for all."""
        return await self.store.evict_bytes(n_bytes, tiers)

    async def add_tier(self, tier: DiskTier | RamFileTier) -> None:
        """Start a tier: scan what it holds, then use it. Raises: `InvalidConfig`."""
        await self.store.add_tier(tier)

    async def remove_tier(self, name: str) -> None:
        """Flush and stop a tier; its files stay. Raises: `InvalidConfig`."""
        await self.store.remove_tier(name)

    def list_tiers(self) -> tuple[TierStatistics, ...]:
        """All tiers, RAM first."""
        return self.store.list_tiers()

    async def check(self, *, fix: bool = False) -> list[Finding]:
        """Every inconsistency between index, RAM and files; `fix` repairs them."""
        return await self.store.check(fix=fix)
