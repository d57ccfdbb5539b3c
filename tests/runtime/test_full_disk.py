"""A disk that is really full under a running engine: a small tmpfs, and a file of somebody else's on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import DiskTier, SavePolicy
from erllama.testing import FakeBackend

from .scenes import HANGS_S, loaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from erllama.kvcache.stats import TierStatistics

POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=64)
N_BYTES = 1 << 20
N_TOKENS = 300


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [shutil.which("mount") or "false", "-t", "tmpfs", "-o", f"size={N_BYTES}", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


class Disk:
    """What others put on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self) -> None:
        """Until nothing fits any more."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(self.folder).f_bavail == 0

    def clear(self) -> None:
        """Somebody tidied up."""
        self._filler.unlink()


class Kept:
    """A model whose tier may grow far beyond the disk."""

    def __init__(self, engine: erllama.Engine, model: erllama.Model, calm: erllama.Model) -> None:
        self.engine, self.model, self._calm = engine, model, calm

    async def ask(self, i: int) -> int:
        """A conversation of its own: the answer is right, its beginning is saved. Returns what was reused."""
        prompt = [i % 200, i // 200, *[7] * (N_TOKENS - 2)]
        answer, right = [
            await model.complete(prompt, max_tokens=4, temperature=0.0) for model in (self.model, self._calm)
        ]
        assert answer.generated == right.generated
        await self.engine.cache.flush()
        return answer.stats.n_cached

    async def evict_ram(self) -> None:
        """What only RAM has is gone, and no sequence holds anything."""
        await self.engine.cache.evict_bytes(1 << 30, ["ram"])
        await self.model.complete([250] * 20, max_tokens=1, cache="off")

    @property
    def tier(self) -> TierStatistics:
        """How the tier is doing."""
        return next(tier for tier in self.engine.cache.counters().tiers if tier.name == "kv")


@asynccontextmanager
async def keeping(folder: Path) -> AsyncIterator[Kept]:
    """An engine on that disk."""
    tier = DiskTier("kv", str(folder / "kv"), max_bytes=1 << 30)
    with trio.fail_after(HANGS_S):
        async with loaded() as calm, erllama.open_engine(ram_max_bytes=1 << 17, tiers=[tier]) as engine:
            model = await engine.load_model(backend=FakeBackend(), model_id="m", policy=POLICY, tier="kv")
            yield Kept(engine, model, calm)


async def test_a_full_disk_costs_what_is_kept_and_nothing_else(disk: Path) -> None:
    """Its own files make room for new ones; with nothing left to evict, saves are refused, and counted."""
    device = Disk(disk)
    async with keeping(disk) as kept:
        await kept.ask(0)
        device.fill()
        for i in range(1, 40):  # several times what is left
            await kept.ask(i)
        counters = kept.engine.cache.counters()
        assert kept.tier.on
        assert kept.tier.evictions + counters.refusals.get("no_room", 0) > 0
        assert (counters.tier_failures, sum(counters.damage.values())) == (0, 0)
        assert await kept.engine.cache.check() == []
        await kept.engine.cache.evict_bytes(1 << 30)
        device.fill()
        before = kept.engine.cache.counters().refusals.get("no_room", 0)
        assert await kept.ask(50) == 0
        assert kept.engine.cache.counters().refusals["no_room"] > before
        assert kept.tier.n_parts == 0
        device.clear()
        await kept.ask(60)
        assert kept.tier.n_parts > 0
        await kept.evict_ram()
        assert await kept.ask(60) == N_TOKENS - 1
        assert await kept.engine.cache.check() == []


async def test_a_full_disk_is_served_and_written_again_after_a_restart(disk: Path) -> None:
    """What is there is found; without a free byte to begin with, the tier makes room for what comes."""
    device = Disk(disk)
    async with keeping(disk) as kept:
        for i in range(20):
            await kept.ask(i)
        device.fill()
    device.fill()
    async with keeping(disk) as kept:
        assert (kept.tier.on, kept.tier.error) == (True, None)
        assert await kept.ask(19) >= 256
        n = kept.tier.evictions
        for i in range(100, 103):
            await kept.ask(i)
        assert kept.tier.evictions > n
        await kept.evict_ram()
        assert max([await kept.ask(i) for i in (102, 101, 100)]) >= 64
        assert await kept.engine.cache.check() == []


async def test_a_tier_that_finds_no_room_to_start_starts_when_there_is_some(disk: Path) -> None:
    """Until then requests go on without it, and its state says why."""
    device = Disk(disk)
    device.fill()
    async with keeping(disk) as kept:
        assert not kept.tier.on
        assert kept.tier.error is not None
        assert "No space left" in kept.tier.error
        await kept.ask(0)
        device.clear()
        while not kept.tier.on:
            await kept.engine.cache.flush()
            await trio.sleep(0.1)  # nobody tells when a tier is back
        await kept.ask(1)
        await kept.evict_ram()
        assert await kept.ask(1) == N_TOKENS - 1
        assert kept.tier.error is None
