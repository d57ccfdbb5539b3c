"""Prompts larger than the RAM budget: all of them comes back from disk, as often as they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import DiskTier, SavePolicy
from erllama.backend import MemoryKind
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 1024
BLOCK_BYTES = 8 * BLOCK
POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=BLOCK)
N_BLOCKS = 12
PROMPT = [(i * 7919 + i // 251) % 256 for i in range(N_BLOCKS * BLOCK + 5)]
INDEX_BYTES = 27_000  # and what is left free beside a buffer


async def reads(root: Path, ram_bytes: int, n_rounds: int, kind: MemoryKind) -> tuple[list[int | None], int]:
    """Tokens read for the prompt each time it comes; and how often a block got no buffer."""
    n_read = []
    tier = DiskTier("kv", str(root))
    async with erllama.open_engine(tiers=[tier], ram_max_bytes=ram_bytes) as engine:
        backend = FakeBackend(n_ctx=1 << 14, n_slots=1, n_batch=BLOCK, memory_kind=kind)
        model = await engine.load_model(backend=backend, tier="kv", policy=POLICY)
        for _ in range(n_rounds):
            answer = await model.complete(PROMPT, max_tokens=1)
            await engine.cache.flush()
            await model.complete([1] * 70, max_tokens=1, cache="off")  # nothing of it stays in live cells
            n_read.append(answer.cache_delta.read)
        assert await engine.cache.check() == []
        return n_read, engine.cache.counters().loads_no_room


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.HYBRID])
async def test_it_is_read_whole_every_time(tmp_path: Path, kind: MemoryKind) -> None:
    """Whether RAM has buffers for one block, two, or nearly all; fewer are read at once then."""
    await reads(tmp_path, 1 << 24, 1, kind)
    lacked = {}
    for n_buffers in (1, 2, 10):
        n_read, lacked[n_buffers] = await reads(tmp_path, INDEX_BYTES + n_buffers * BLOCK_BYTES, 4, kind)
        assert n_read == [N_BLOCKS * BLOCK + 4] * 4, f"{n_buffers} buffers"
    assert lacked[1]
    assert not lacked[10]


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.HYBRID])
async def test_so_are_several_at_once(tmp_path: Path, kind: MemoryKind) -> None:
    """Who finds no buffer waits for one that another restore gives back, instead of computing it all."""
    prompts = [[(i * 7919 + i // 251 + k) % 256 for i in range(4 * BLOCK + 5)] for k in range(4)]
    tier = DiskTier("kv", str(tmp_path))

    async def answers(ram_bytes: int) -> tuple[list[int | None], int]:
        async with erllama.open_engine(tiers=[tier], ram_max_bytes=ram_bytes) as engine:
            backend = FakeBackend(n_ctx=1 << 16, n_slots=4, n_batch=BLOCK, memory_kind=kind)
            model = await engine.load_model(backend=backend, tier="kv", policy=POLICY)
            n_read: list[int | None] = [None] * len(prompts)

            async def ask(k: int) -> None:
                n_read[k] = (await model.complete(prompts[k], max_tokens=1)).cache_delta.read

            async with trio.open_nursery() as nursery:
                for k in range(len(prompts)):
                    nursery.start_soon(ask, k)
            await engine.cache.flush()
            return n_read, engine.cache.counters().loads_no_room

    await answers(1 << 24)
    n_read, n_lacked = await answers(INDEX_BYTES + 2 * BLOCK_BYTES)
    assert n_read == [4 * BLOCK + 4] * 4
    assert n_lacked
