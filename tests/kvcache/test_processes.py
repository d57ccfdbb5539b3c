"""Real processes: killed while they write, and several on one folder."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import pickle
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from erllama.kvcache.check import check_files
from erllama.kvcache.columns import PartColumns
from erllama.kvcache.filetier import FileTier
from erllama.kvcache.tiers import DiskTier

from . import child
from .stores import bench, expected

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

KILLS = 50


@pytest.fixture(scope="module")
def spawn():
    """Starts children from a clean, preloaded process: quick, and no fork of a process with threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcache.child"])

    def start(run: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(*args, theirs))
        process.start()
        theirs.close()
        return process, ours

    return start


def recover(root: pathlib.Path, disk_bytes: int = child.DISK_BYTES) -> int:
    """Open the folder as the next process would; all in it must be whole. Returns the number of parts."""
    tier = FileTier(DiskTier("kv", str(root), disk_bytes))
    found, _, _ = tier.start(PartColumns(), 4e9)
    ids = {part.id for part in found.found}
    assert not found.rejected
    assert check_files(tier, ids) == []
    for part in found.found:
        into = memoryview(bytearray(part.payload_bytes))
        tier.read_part(*part.id, into)
        assert bytes(into) == expected(part.meta.name, len(into), part.kind)
    tier.close()
    return len(ids)


def test_killed_at_fifty_random_instants(tmp_path: pathlib.Path, spawn) -> None:
    """K16, K17: SIGKILL a writing, evicting child fifty times: the next process finds whole nodes."""
    rng, n_parts = random.Random(7), 0
    for i in range(KILLS):
        process, pipe = spawn(child.write_for_ever, str(tmp_path), i)
        assert pipe.recv() == "go"
        time.sleep(rng.random() * 0.04)  # the instant is the point: there is no event to wait for
        process.kill()
        process.join()
        pipe.close()
        n_parts = recover(tmp_path)
    assert n_parts > 0
    assert not list((tmp_path / "nodes").glob("*.tmp"))


def test_what_was_durable_survives_a_kill(tmp_path: pathlib.Path, spawn) -> None:
    """K16: groups of several kinds, spills, journals: what was called durable is there, and right.

    Killed at random moments, start-up among them, one life after the other on the same folder.
    """
    rng, promised = random.Random(11), []
    for i in range(KILLS // 2):
        process, pipe = spawn(child.keep_promises, str(tmp_path), i)
        if i % 5:
            assert pipe.recv() is None
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.join()
        promised += told_of(pipe)
        trio.run(read_all, tmp_path, promised[-8:])
        left = [path.name for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".new", ".lock")]
        assert left == ["publish.lock"]
        assert not list((tmp_path / "quarantine").iterdir())
    trio.run(read_all, tmp_path, promised)
    recover(tmp_path, child.LARGE_BYTES)
    kinds = {path.name.split(".")[1] for path in (tmp_path / "nodes").iterdir()}
    assert kinds == {"base", "window", "state"}
    assert len(promised) > 10


def told_of(pipe: Connection) -> list[list[int]]:
    """Histories that a child called durable before it was killed."""
    told = []
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):  # killed in the middle of a word
        while pipe.poll():
            told.append(pipe.recv())
    pipe.close()
    return [ids for ids in told if ids is not None]


async def read_all(root: pathlib.Path, histories: list[list[int]]) -> None:
    """A store opened on the folder has them all, whole."""
    async with bench(root, disk_bytes=child.LARGE_BYTES) as b:
        for ids in histories:
            assert await b.read(ids) == len(ids), ids
        assert b.store.statistics().damage == {}
        assert await b.store.check() == []


def test_three_processes_share_a_root(tmp_path: pathlib.Path, spawn) -> None:
    """X22: the evictor is killed holding the lock, three others go on: budget kept, no damage."""
    evictor, evictor_pipe = spawn(child.die_as_evictor, str(tmp_path))
    evictor_pipe.recv()
    workers = [spawn(child.work, str(tmp_path), seed, 60) for seed in range(3)]
    time.sleep(0.2)
    evictor.kill()
    evictor.join()
    evictor_pipe.close()
    most = 0
    while any(process.is_alive() for process, _ in workers):
        sizes = []
        for path in (tmp_path / "nodes").iterdir():
            try:
                sizes.append(path.stat().st_size if ".tmp" not in path.name else 0)
            except FileNotFoundError:
                continue
        most = max(most, sum(sizes))
        time.sleep(0.01)
    for process, pipe in workers:
        # Another's eviction between look-up and read is a clean miss, and the only thing that may be seen.
        assert set(pipe.recv()) <= {"missing"}
        process.join()
        assert process.exitcode == 0
        pipe.close()
    assert child.DISK_BYTES / 2 < most <= child.DISK_BYTES
    assert recover(tmp_path) > 0


async def test_after_a_rescan_nothing_is_missed(tmp_path: pathlib.Path, spawn) -> None:
    """X22: what is on disk after they all left is found by the next store, whoever wrote it."""
    workers = [spawn(child.work, str(tmp_path), seed, 10) for seed in range(2)]
    for process, pipe in workers:
        pipe.recv()
        process.join()
        pipe.close()
    async with bench(tmp_path, disk_bytes=child.DISK_BYTES) as b:
        n_files = len(list((tmp_path / "nodes").iterdir()))
        assert b.store.statistics().n_nodes == n_files > 0
        rng = random.Random(0)
        assert await b.read(child.history(rng)) >= 4
        assert await b.store.check() == []


def test_memory_stays_within_the_budget(tmp_path: pathlib.Path) -> None:
    """P12, FAULTS "budget after allocation": 150 conversations of 1 MiB through 32 MiB of RAM."""
    code = """
import resource, sys, trio, pathlib
from kvcache.stores import bench
async def main():
    async with bench(pathlib.Path(sys.argv[1]), ram_bytes=32 << 20, disk_bytes=64 << 20, run=None) as b:
        b.size = 1 << 20
        for i in range(20):
            await b.save_path([*range(4), i], tier="kv")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(150):
            await b.save_path([*range(4), i % 25, i // 25], tier="kv" if i % 2 else "ram")
            await b.read([*range(4), i % 7, 0])
            if i % 5 == 0:
                await b.store.flush()  # a slow disk would refuse what this test wants evicted
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert b.store.statistics().evictions > 20
        assert b.store.statistics().damage == {}
        print((after - before) * 1024)
trio.run(main)
"""
    tests = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    # 20 MiB were in use before; the tier may fill up, and little else may grow.
    assert int(done.stdout) <= (12 << 20) * 1.05 + (4 << 20)
