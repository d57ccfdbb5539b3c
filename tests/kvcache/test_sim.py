"""The simulator against the store whose log it replays."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from erllama.kvcache.lookuplog import read_log
from erllama.kvcache.score import PrefillCost
from erllama.kvcache.sim import Simulation

from .nodes import IDENTITY
from .stores import PART_BYTES, Clock, bench

if TYPE_CHECKING:
    import pathlib

N_FINDS = 70


async def record(tmp_path: pathlib.Path, disk_bytes: int) -> tuple[str, float, int]:
    """Live traffic under a budget, with a measured cost: look up, then save, as an engine does."""
    clock, rng, log = Clock(), random.Random(3), str(tmp_path / "log")
    async with bench(tmp_path / "root", clock=clock, disk_bytes=disk_bytes, lookup_log=log) as b:
        for i in range(N_FINDS):
            if i == N_FINDS // 5:  # late parts of a prompt are worth more from here on
                b.store.set_cost(IDENTITY, PrefillCost(1e-6, 1e-3))
            clock.now += rng.randrange(1, 3000)
            chat = int(rng.paretovariate(0.7)) % 20
            ids = [*range(8), *([chat] * rng.randrange(1, 9))]
            await b.read(ids)
            await b.save_path(ids, tier="kv", flush=True)  # one by one, as the simulator stores
            await b.store.evict_bytes(1 << 30, ["ram"])
        stats = b.store.statistics()
        used = b.tier().used_bytes
    assert used <= disk_bytes
    assert stats.tokens_asked > 0
    return log, stats.tokens_matched / stats.tokens_asked, stats.evictions


@pytest.mark.parametrize("parts", [8, 14, 1000])
async def test_the_hit_rate_of_its_own_log_is_the_live_one(tmp_path: pathlib.Path, parts: int) -> None:
    """X25: at the budget the log was recorded under, simulated and live hit rates are equal."""
    budget = parts * (PART_BYTES + 400)
    log, live, evictions = await record(tmp_path, budget)
    result = Simulation(budget).replay(read_log(log))
    assert result.n_finds == N_FINDS
    assert result.hit_rate == pytest.approx(live, abs=1e-12)
    assert (result.evictions > 0) == (parts < 1000)
    assert evictions > 0


async def test_more_room_never_hurts_and_none_hits_nothing(tmp_path: pathlib.Path) -> None:
    """X25: the curve an operator sizes a tier by."""
    log, _, _ = await record(tmp_path, 10 * (PART_BYTES + 400))
    rates = [Simulation(n * PART_BYTES).replay(read_log(log)).hit_rate for n in (0, 5, 10, 20, 200)]
    assert rates[0] == 0.0
    assert rates == sorted(rates)
    assert rates[-1] > rates[1]


def tear(path: str) -> None:
    """What a crash does to the end of a file."""
    os.truncate(path, os.path.getsize(path) - 3)


async def test_a_torn_log_is_read_up_to_the_tear(tmp_path: pathlib.Path) -> None:
    """A crash while the log was written costs its last record."""
    log, _, _ = await record(tmp_path, 1 << 20)
    whole = len(list(read_log(log)))
    tear(log)
    assert len(list(read_log(log))) == whole - 1
