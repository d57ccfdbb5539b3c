"""What the child processes of test_processes.py do."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
from typing import TYPE_CHECKING, Any

import trio

from erllama.kvcache.columns import PartColumns
from erllama.kvcache.filetier import FileTier
from erllama.kvcache.kinds import PartKind
from erllama.kvcache.tiers import DiskTier

from .stores import BLOCK, PART_BYTES, bench

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DISK_BYTES = 30 * (PART_BYTES + 500)
LARGE_BYTES = 1 << 30


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


def all_kinds(rng: random.Random) -> dict[str, Any]:
    """Options of a save: which parts a node has, and how large they are; large ones take several writes."""
    kinds = (PartKind.BASE, *rng.choice([(), (PartKind.WINDOW,), (PartKind.STATE,)]))
    sizes = {kind: rng.choice([0, 900, 9_000, 150_000]) for kind in kinds}
    return {"kinds": kinds, "sizes": sizes}


def keep_promises(root: str, seed: int, told: Connection) -> None:
    """Save, spill, read and tidy up until killed; tells of each history that is durable.

    Nothing is evicted from the folder: it has room for all that a test's children write.
    """

    async def main() -> None:
        rng = random.Random(seed)
        async with bench(
            pathlib.Path(root), ram_bytes=2 << 20, disk_bytes=LARGE_BYTES, spill=True, run=None, clock=None
        ) as b:
            told.send(None)
            for i in itertools.count():
                ids = [*history(rng), i % 50]
                saved = await b.save_path(ids, tier="kv" if i % 3 else "ram", **all_kinds(rng))
                await b.read(ids[:8])
                if i % 5 == 4:
                    await b.store.housekeeping()
                if i % 7 == 6:
                    await b.store.flush()  # writes the hit journal too
                if i % 2 and saved and await saved[-1].wait_durable():
                    told.send(ids[: BLOCK * len(saved)])

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
