"""A served model with a store behind it, in one trio thread, and the watched fake that fills it."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
import trio.testing

from erllama.engine.cache_link import CacheLink
from erllama.engine.handle import Handle
from erllama.engine.sequence import Sequence
from erllama.engine.stream import EventBuffer
from erllama.kvcache.key import Identity
from erllama.kvcache.policy import SavePolicy
from erllama.kvcache.store import KvStore, open_store
from erllama.kvcache.tiers import RamTier
from erllama.options import ContextOptions, GenerationOptions
from erllama.types import Request

from runtime.watched import Watched  # isort: skip  # tests/ is on the path

from .scenes import Bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16, continued_interval=16)
BLOCK_BYTES = 4096  # what the arena takes for 16 tokens of the fake
_ids = itertools.count(1)


def seq_of(prompt: list[int], *, capacity: int = 64, **options: object) -> Sequence:
    """A request; later ones are younger."""
    return Sequence(
        request=Request(next(_ids), "m"),
        prompt=prompt,
        options=GenerationOptions(**options),
        sampler=None,
        seed=0,
        n_ctx=1000,
        buffer=EventBuffer(capacity, lambda: None),
        now=0.0,
    )


@dataclass
class WarmBench(Bench):
    """A bench with its store."""

    store: KvStore

    def __init__(self, handle: Handle, backend: Watched, store: KvStore) -> None:
        super().__init__(handle, backend)
        self.store = store

    async def saved(self) -> None:
        """Wait until everything planned is stored, and nothing is left over."""
        await self.actor.wait_saved()
        await self.store.flush()
        await self.wait_idle()
        counters = self.store.statistics()
        assert (counters.leases, counters.loads_in_flight) == (0, 0)
        assert self.actor._lanes.reading.total() == self.actor._lanes._n_reserved == 0
        assert self.actor._errands.n == 0
        assert await self.store.check() == []

    def forget_live(self) -> None:
        """Drop all residents: what comes next has only the store."""
        while self.actor._lanes.drop_resident():
            pass

    @property
    def n_computed(self) -> int:
        """Prompt tokens computed so far, their last ones not counted."""
        return self.actor.statistics().n_prefill_tokens

    def nodes(self) -> list[tuple[int, int]]:
        """Start and length of every stored node."""
        return sorted((node["start"], node["n_tokens"]) for node in self.store.dump())


@asynccontextmanager
async def warm(
    backend: Watched | None = None,
    *,
    ram_bytes: int = 1 << 24,
    policy: SavePolicy = POLICY,
    **context: object,
) -> AsyncIterator[WarmBench]:
    """A warm model for the block."""
    backend = backend or Watched()
    with trio.fail_after(240):
        async with open_store(ram=RamTier(max_bytes=ram_bytes)) as store, trio.open_nursery() as nursery:
            link = CacheLink(
                store=store,
                identity=Identity(shape_hash=b"fake"),
                cold_identity=Identity(shape_hash=b"fake, cold"),
                policy=policy,
                tier="ram",
                pieces=backend.key_pieces,
            )
            options = ContextOptions(**context).resolved()
            handle = await Handle.open("fake", backend, options, None, lambda _: link)
            backend.actor = handle.actor
            nursery.start_soon(handle.serve)
            try:
                yield WarmBench(handle, backend, store)
            finally:
                handle.stop()
