"""Stores for tests: a fake clock, an inline runner, and short ways to save and read."""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from erllama.kvcache.key import Prompt
from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.runner import InlineRunner
from erllama.kvcache.store import Draft, KvStore, Saved, open_store
from erllama.kvcache.tiers import DiskTier, RamTier

from .nodes import IDENTITY, node, payload, pieces

if TYPE_CHECKING:
    import pathlib
    from collections.abc import AsyncIterator, Mapping, Sequence

BLOCK = 4
PART_BYTES = 3000


@dataclass
class Clock:
    """Seconds since the epoch, moved by hand."""

    now: float = 1.75e9

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """One store and what a test does with it."""

    store: KvStore
    clock: Clock
    size: int = PART_BYTES
    history: dict[bytes, list[int]] = field(default_factory=dict)

    async def save(
        self,
        ids: Sequence[int],
        parent: Saved | None = None,
        *,
        tier: str = "ram",
        kinds: Sequence[PartKind] = (PartKind.BASE,),
        size: int | None = None,
        sizes: Mapping[PartKind, int] | None = None,
        text: bytes | None = None,
        **options: Any,
    ) -> Saved | None:
        """Save a node with known payloads; None if there was no buffer for it. `sizes`: by kind."""
        identity = options.setdefault("identity", IDENTITY)
        above = self.history[parent.name] if parent else []
        name = ROOT_NAME if parent is None else parent.name
        meta = node(ids, identity=identity)
        real = identity.node_name(name, meta.tokens.tobytes())
        self.history[real] = [*above, *ids]
        buffers = {}
        for kind in kinds:
            n_bytes = (sizes or {}).get(kind, self.size if size is None else size)
            buffer = await self.store.buffer(n_bytes)
            if buffer is None:
                for taken in buffers.values():
                    taken.release()
                return None
            buffer.view[:] = expected(real, n_bytes, kind)
            buffers[kind] = buffer
        if text is None:
            text = b"".join(pieces(ids))
        draft = Draft(tokens=ids, parts=buffers, parent=name, start=len(above), text=text, **options)
        return await self.store.save(draft, tier=tier)

    async def save_path(self, ids: Sequence[int], *, flush: bool = False, **options: Any) -> list[Saved]:
        """Save a history in blocks and a tail, as an engine would; what is there is not saved again."""
        made: list[Saved] = []
        for at in range(0, len(ids), BLOCK):
            saved = await self.save(ids[at : at + BLOCK], made[-1] if made else None, **options)
            if saved is None or not saved.stored:
                break
            made.append(saved)
            if flush:
                await self.store.flush()
        return made

    async def read(self, ids: Sequence[int], kind: PartKind = PartKind.BASE) -> int:
        """Find and load a history; checks every byte. Returns how many whole tokens could be loaded."""
        match = await self.store.find(IDENTITY, Prompt.of(ids, pieces(ids)))
        loaded = 0
        with self.store.lease(match) as lease:
            for i, found in enumerate(lease.nodes[: len(match.nodes)]):
                view = await lease.load(i, kind)
                if view is None:
                    break
                with view:  # as every reader must: nobody may look at a buffer that is given back
                    assert bytes(view) == expected(found.name, len(view), kind)
                loaded = found.end
        assert np.array_equal(match.ids[:loaded], list(ids[:loaded]))
        return loaded

    async def settle(self) -> None:
        """Wait for all writes; the store must then be consistent."""
        await self.store.flush()
        found = await self.store.check()
        assert found == [], found

    def tier(self, name: str = "kv") -> Any:
        """Statistics of one tier."""
        return next(tier for tier in self.store.list_tiers() if tier.name == name)


def expected(name: bytes, n_bytes: int, kind: PartKind) -> bytes:
    """What a part of a node holds."""

    class Named:
        pass

    named = Named()
    named.name = name  # type: ignore[attr-defined]
    return payload(named, n_bytes, kind)  # type: ignore[arg-type]


@asynccontextmanager
async def bench(
    root: pathlib.Path | None = None,
    *,
    clock: Clock | None = None,
    ram_bytes: int = 1 << 20,
    disk_bytes: int = 1 << 20,
    spill: bool = False,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A store with RAM and, given a root, a disk tier "kv"; consistent when the test leaves it."""
    clock = clock or Clock()
    tiers = [DiskTier("kv", str(root), disk_bytes)] if root is not None else []
    ram = RamTier(ram_bytes, spill="kv" if spill else None)
    async with open_store(ram=ram, tiers=tiers, clock=clock, **({"run": InlineRunner()} | options)) as store:
        yield Bench(store, clock)


NO_SPACE = errno.ENOSPC
