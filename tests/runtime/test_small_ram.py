"""Prompts larger than the RAM budget: all of them comes back from disk, as often as they return."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import DiskTier, SavePolicy
from erllama.backend import MemoryKind
from erllama.kvcache.filetier import FileTier
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

    from erllama.types import PartKind

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


async def test_a_long_restore_leaves_threads_to_a_short_one(tmp_path: Path, monkeypatch) -> None:
    """Of a prompt of many blocks a few are read at once: who wants one block is not behind all of them."""
    short = [1, *PROMPT[: BLOCK + 4]]
    tier = DiskTier("kv", str(tmp_path))
    sizes = {"n_ctx": 1 << 15, "n_slots": 3, "n_batch": BLOCK}
    order: list[bytes] = []
    began = threading.Event()
    read = FileTier.read_part

    def slowly(self: FileTier, name: bytes, kind: PartKind, into: memoryview) -> object:
        order.append(name)
        began.set()
        time.sleep(0.01)
        return read(self, name, kind, into)

    async with erllama.open_engine(tiers=[tier]) as engine:
        model = await engine.load_model(backend=FakeBackend(**sizes), tier="kv", policy=POLICY)
        await model.complete(PROMPT, max_tokens=1)
        await engine.cache.flush()
        of_long = {bytes.fromhex(node["name"]) for node in engine.cache.dump()}
        await model.complete(short, max_tokens=1)
    async with erllama.open_engine(tiers=[tier]) as engine, trio.open_nursery() as nursery:
        monkeypatch.setattr(FileTier, "read_part", slowly)
        model = await engine.load_model(backend=FakeBackend(**sizes), tier="kv", policy=POLICY)
        nursery.start_soon(lambda: model.complete([2] * 70, max_tokens=500, cache="off"))
        await trio.sleep(0.01)
        nursery.start_soon(lambda: model.complete(PROMPT, max_tokens=1))
        await trio.to_thread.run_sync(began.wait)
        await model.complete(short, max_tokens=1)
        nursery.cancel_scope.cancel()
    first = next(i for i, name in enumerate(order) if name not in of_long)
    assert 0 < first < N_BLOCKS // 2, f"{first} blocks of the long prompt were read first"
