"""Saves, reads, evictions, damage, kills and restarts in any order: closure, budgets, no dark moment.

A longer run: `ERLLAMA_LONG=1 pytest tests/kvcache/test_machine.py` (a few minutes instead of seconds).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import trio
import trio.testing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from erllama.kvcache.key import Identity
from erllama.kvcache.kinds import PartKind
from erllama.kvcache.parts import RAM
from erllama.kvcache.recover import parse_file_name

from .faults import Died, DyingFiles
from .stores import PART_BYTES, Bench, Clock, bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from erllama.kvcache.check import Finding
    from erllama.kvcache.recover import PartId

RAM_BYTES = 80_000
DISK_BYTES = 14 * PART_BYTES
LONG = bool(os.environ.get("ERLLAMA_LONG"))
RECURRENT = Identity(shape_hash=b"recurrent")
HISTORIES = [[*range(4), *range(i, i + 3), *([i] * n)] for i in range(6) for n in (0, 2, 6)]


class Watch(DyingFiles):
    """Dies on demand; at every call, what was stored and not evicted must be at hand (no dark moment)."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.unlinked: set[bytes] = set()
        self.locks: set[int] = set()
        self.look: Callable[[], None] = lambda: None

    def try_lock(self, path: str, *, exclusive: bool) -> int | None:
        fd = super().try_lock(path, exclusive=exclusive)
        if fd is not None:
            self.locks.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.locks.discard(fd)
        super().close(fd)

    def before(self, call: str, path: str) -> None:
        super().before(call, path)
        part = parse_file_name(os.path.basename(path))
        if call in ("unlink", "rename") and part is not None:
            self.unlinked.add(part[0])
        self.look()


class Process:
    """One life of a store, in a trio thread of its own; `call` runs an async function in it."""

    def __init__(self, root: pathlib.Path, clock: Clock, *, spill: bool) -> None:
        self.files = Watch()
        self._ready = threading.Event()
        self._stop: trio.Event
        self.bench: Bench
        self.died = False
        self._options: dict[str, Any] = {
            "spill": spill,
            "ram_bytes": RAM_BYTES,
            "disk_bytes": DISK_BYTES,
            "writer_max_concurrent": 1,  # so that a failing example fails again
        }
        self._root, self._clock = root, clock
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        async def main() -> None:
            self._stop = trio.Event()
            self._token = trio.lowlevel.current_trio_token()
            async with bench(
                self._root, clock=self._clock, files=self.files, shutdown_s=5.0, **self._options
            ) as made:
                self.bench = made
                self._ready.set()
                await self._stop.wait()

        try:
            trio.run(main, clock=trio.testing.MockClock())  # stands still: no upkeep behind our back
        except BaseExceptionGroup as group:
            if group.subgroup(Died) is None:
                raise
            self.died = True
        except Died:
            self.died = True
        finally:
            self._ready.set()

    def call(self, what: Callable[[Bench], Awaitable[Any]]) -> Any:
        """Run in the store's thread; None if the process died meanwhile."""
        with contextlib.suppress(trio.RunFinishedError, trio.Cancelled, Died):
            return trio.from_thread.run(what, self.bench, trio_token=self._token)
        return None

    def stop(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        self._thread.join()

    def kill(self) -> None:
        """Die at the next call that changes anything, at the latest when asked to stop."""
        self.files.k = 0
        self.files.dead = True
        self.stop()
        self.bury()

    def bury(self) -> None:
        """What the kernel does for the dead: their locks are free."""
        for fd in list(self.files.locks):
            self.files.close(fd)


class StoreMachine(RuleBasedStateMachine):
    """The rules; the model is what must be readable."""

    def __init__(self) -> None:
        super().__init__()
        self.base = pathlib.Path(tempfile.mkdtemp(prefix="erllama-machine-"))
        self.clock = Clock()
        self.durable: set[PartId] = set()
        self.settled = False

    @initialize(spill=st.booleans())
    def start(self, spill: bool) -> None:
        self.spill = spill
        self.process = Process(self.base / "root", self.clock, spill=spill)

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.process.stop()
        shutil.rmtree(self.base)

    # --- helpers ----------------------------------------------------------------------------------

    def do(self, what: Callable[[Bench], Awaitable[Any]]) -> Any:
        self.settled = False
        store = self.process.bench.store
        catalog = store._catalog
        names = {row: catalog.tree.names.name(row) for row in catalog.tree.rows()}
        evicted, damage = catalog.evicted.total(), sum(store.statistics().damage.values())

        def look() -> None:
            if catalog.evicted.total() == evicted and sum(store._counters.damage.values()) == damage:
                for name in names.values():
                    assert any(catalog.has(name, kind) for kind in PartKind), "a dark moment"

        async def run(b: Bench) -> Any:
            done = await what(b)
            await b.store.flush()
            return done

        self.process.files.look = look
        result = self.process.call(run)
        self.process.files.look = lambda: None
        if self.process.files.dead:
            self.recover()
        return result

    def recover(self) -> None:
        """The process died: start another on its files. What was durable and not removed is there."""
        dead = self.process
        dead.kill()
        self.start_again(without=dead.files.unlinked)

    def start_again(self, *, without: set[bytes]) -> None:
        """Another process on the same folder; `without`: names the former one may have removed."""
        self.process = Process(self.base / "root", self.clock, spill=self.spill)
        catalog = self.process.bench.store._catalog
        there = {(name, kind) for name, kind in self.durable if catalog.has(name, kind)}
        assert all(name in without for name, _ in self.durable - there), "a durable part is gone"
        self.durable = there

    def settle(self) -> None:
        """Flush and check; remember what is durable."""

        async def check(b: Bench) -> list[Finding]:
            await b.store.flush()
            return await b.store.check()

        found = self.do(check)
        if found is None:
            return
        assert found == []
        catalog = self.process.bench.store._catalog
        parts = [part for row in catalog.tree.rows() for part in catalog.tree.part_rows(row)]
        self.durable = {catalog.ref_of(part) for part in parts if catalog.tree.parts.home[part] != RAM}
        self.settled = True

    # --- rules ------------------------------------------------------------------------------------

    @rule(ids=st.sampled_from(HISTORIES), tier=st.sampled_from(["ram", "kv", "kv"]))
    def save(self, ids: list[int], tier: str) -> None:
        self.do(lambda b: b.save_path(ids, tier=tier))

    @rule(ids=st.sampled_from(HISTORIES), state=st.booleans())
    def save_with_state(self, ids: list[int], state: bool) -> None:
        kinds = (PartKind.BASE, PartKind.STATE) if state else (PartKind.BASE, PartKind.WINDOW)
        self.do(lambda b: b.save_path(ids, tier="kv", kinds=kinds, anchor=state))

    @rule(ids=st.sampled_from(HISTORIES), also=st.booleans())
    def save_later(self, ids: list[int], also: bool) -> None:
        """A part for nodes that may be there already, alone or with the base."""
        kinds = (PartKind.BASE, PartKind.STATE) if also else (PartKind.STATE,)
        self.do(lambda b: b.save_path(ids, tier="kv", kinds=kinds))

    @rule(ids=st.sampled_from(HISTORIES), state=st.booleans(), tier=st.sampled_from(["ram", "kv"]))
    def save_recurrent(self, ids: list[int], state: bool, tier: str) -> None:
        """Empty bases, of a model of their own."""
        kinds = (PartKind.BASE, PartKind.STATE) if state else (PartKind.BASE,)
        self.do(
            lambda b: b.save_path(
                ids, tier=tier, kinds=kinds, sizes={PartKind.BASE: 0}, identity=RECURRENT, anchor=len(ids) > 9
            )
        )

    @rule(ids=st.sampled_from(HISTORIES))
    def read(self, ids: list[int]) -> None:
        self.do(lambda b: b.read(ids))

    @rule(n=st.integers(1, 6), tier=st.sampled_from([["ram"], ["kv"], None]))
    def evict(self, n: int, tier: list[str] | None) -> None:
        self.do(lambda b: b.store.evict_bytes(n * PART_BYTES, tier))

    @rule()
    def collect(self) -> None:
        self.do(lambda b: b.store.gc())

    @rule(ids=st.sampled_from(HISTORIES), ttl_s=st.none() | st.integers(1, 100))
    def pin(self, ids: list[int], ttl_s: int | None) -> None:
        async def pin(b: Bench) -> None:
            made = await b.save_path(ids, tier="kv")
            if made:
                b.store.pin(made[-1].name, ttl_s=ttl_s)

        self.do(pin)

    @rule(seconds=st.sampled_from([1, 100, 10**6, -50]))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        self.do(lambda b: b.store.housekeeping())

    @rule()
    def restart(self) -> None:
        self.settle()
        former = self.process
        armed = former.files.k < 10**9
        former.stop()
        assert armed or not former.died
        former.bury()
        self.start_again(without=former.files.unlinked if former.died else set())

    @rule(k=st.integers(1, 40))
    def die_soon(self, k: int) -> None:
        self.settle()
        self.process.files.k = len(self.process.files.calls) + k

    @rule()
    def die_now(self) -> None:
        self.settle()
        self.recover()

    @rule(pick=st.integers(0, 1000), at=st.integers(0, 10**6))
    def damage(self, pick: int, at: int) -> None:
        """Somebody flips a bit of a file; from now on it may be missed, never served."""
        files = sorted((self.base / "root" / "nodes").glob("*.kvc"))
        if not files:
            return
        victim = files[pick % len(files)]
        content = bytearray(victim.read_bytes())
        content[at % len(content)] ^= 4
        victim.write_bytes(content)

        async def repair(b: Bench) -> list[Finding]:
            await b.store.check(fix=True)
            await b.store.flush()
            return await b.store.check()

        self.durable = set()
        while (found := self.do(repair)) is None:
            assert self.process.files.k == 10**9, "it died once; the next life is not armed"
        assert found == []
        self.settle()

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "process"):
            return
        stats = self.process.bench.store.statistics()
        assert stats.memory_bytes <= RAM_BYTES
        assert stats.arena.used_bytes + stats.arena.idle_bytes <= RAM_BYTES
        nodes = self.base / "root" / "nodes"
        assert sum(path.stat().st_size for path in nodes.iterdir()) <= DISK_BYTES
        assert stats.leases == 0


StoreMachine.TestCase.settings = settings(
    max_examples=300 if LONG else 25,
    stateful_step_count=40 if LONG else 20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestStoreMachine(StoreMachine.TestCase):
    """X1, K17, K35, K39: the state machine above."""
