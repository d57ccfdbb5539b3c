"""What the child processes of test_processes.py do."""

from __future__ import annotations

import os
import pathlib
import random
from typing import TYPE_CHECKING

import trio

from erllama.kvcache.columns import PartColumns
from erllama.kvcache.filetier import FileTier
from erllama.kvcache.tiers import DiskTier

from .stores import PART_BYTES, bench

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DISK_BYTES = 30 * (PART_BYTES + 500)


def history(rng: random.Random) -> list[int]:
    """One of many conversations that share heads."""
    return [*range(4), *([rng.randrange(4)] * 4), rng.randrange(20), *([7] * rng.randrange(4))]


def write_for_ever(root: str, seed: int, started: Connection) -> None:
    """Save conversations until killed; says so when the first one is durable."""

    async def main() -> None:
        rng = random.Random(seed)
        async with bench(pathlib.Path(root), disk_bytes=DISK_BYTES, run=None, clock=None) as b:
            said = False
            while True:
                saved = await b.save_path(history(rng), tier="kv")
                if saved and not said:
                    await saved[-1].wait_durable()
                    started.send("go")
                    said = True
                await trio.lowlevel.checkpoint()

    trio.run(main)


def work(root: str, seed: int, n: int, done: Connection) -> None:
    """Save and read n conversations, then report damage and false bytes (an assertion would say it)."""

    async def main() -> dict[str, int]:
        rng = random.Random(seed)
        async with bench(pathlib.Path(root), disk_bytes=DISK_BYTES, run=None) as b:
            for i in range(n):
                await b.save_path(history(rng), tier="kv")
                await b.read(history(rng))
                if i % 5 == 0:
                    await b.store.housekeeping()
            await b.store.flush()
            return dict(b.store.statistics().damage)

    done.send(trio.run(main))


def die_as_evictor(root: str, started: Connection) -> None:
    """Take the removing lock, say so, and wait to be killed."""
    tier = FileTier(DiskTier("kv", root, DISK_BYTES))
    tier.start(PartColumns(), 0.0)
    lock = tier.root.lock_removing()
    started.send(os.getpid())
    started.recv()
    os.close(lock)
