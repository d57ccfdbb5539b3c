"""The store as its users see it: saves, hits, restarts, leases, pins, damage, failing tiers."""

from __future__ import annotations

import errno
import math
import os
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
import trio.testing

from erllama.errors import InvalidConfig, InvalidOption, MissingOption, UnknownOption
from erllama.kvcache.files import Files
from erllama.kvcache.key import Identity, Prompt
from erllama.kvcache.kinds import PartKind, Provenance, Refusal, SaveReason
from erllama.kvcache.loader import N_READY
from erllama.kvcache.policy import SavePolicy
from erllama.kvcache.runner import InlineRunner
from erllama.kvcache.store import open_store
from erllama.kvcache.tiers import DiskTier, RamFileTier, RamTier

from .faults import FailingFiles
from .nodes import IDENTITY, pieces
from .stores import PART_BYTES, Bench, Clock, bench

if TYPE_CHECKING:
    import pathlib
    from collections.abc import AsyncIterator

CHAT = list(range(14))


def files_of(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted((root / "nodes").iterdir())


async def test_save_and_load_in_ram() -> None:
    """K4: what was saved is what is loaded, byte for byte, tails included."""
    async with bench() as b:
        assert len(await b.save_path(CHAT)) == 4
        assert await b.read(CHAT) == 14
        assert await b.read([*CHAT, 20, 21]) == 14
        assert await b.read([5, *CHAT]) == 0
        await b.settle()


@pytest.mark.parametrize("kind", [DiskTier, RamFileTier])
async def test_files_survive_a_restart(tmp_path: pathlib.Path, kind: type) -> None:
    """K4, P4: a new process finds everything; the first read passes through, later ones stay in RAM."""
    async with open_store(tiers=[kind("kv", str(tmp_path))], run=InlineRunner()) as store:
        b = Bench(store, Clock())
        assert all([await s.wait_durable() for s in await b.save_path(CHAT, tier="kv")])
    async with open_store(tiers=[kind("kv", str(tmp_path))], run=InlineRunner()) as store:
        b, n_copies = Bench(store, Clock()), []
        for _ in range(4):
            await trio.testing.wait_all_tasks_blocked()
            assert await b.read(CHAT) == 14
            n_copies.append(len(store._catalog.ram))
        assert n_copies == [0, N_READY - 1, 4, 4], "one used buffer is always left to go on with"
        assert store.statistics().bytes_read == {"kv": (4 + 4 + 1) * PART_BYTES}, (
            "the fourth time does no I/O"
        )
        await b.settle()


@pytest.mark.parametrize("n_buffers", [1, 3, 6, 9])
async def test_a_path_larger_than_ram_is_read_every_time(tmp_path: pathlib.Path, n_buffers: int) -> None:
    """Copies that stayed of its end, and are leased, give way to its beginning."""
    history = list(range(40))
    async with bench(tmp_path) as b:
        await b.save_path(history, tier="kv")
        await b.settle()
    async with bench(tmp_path, ram_bytes=24_576 + n_buffers * 4096) as b:
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked()
            match = await b.store.find(IDENTITY, Prompt.of(history))
            with b.store.lease(match) as lease:
                for index in range(10):
                    view = await lease.load(index)
                    assert view is not None, f"block {index}"
                    view.release()
                    lease.release(index)
        assert b.store.statistics().loads_no_room == 0
        await b.settle()


async def test_a_copy_that_somebody_looks_at_stays(tmp_path: pathlib.Path) -> None:
    """Leased copies give way, the one being read does not."""
    async with bench(tmp_path, ram_bytes=60_000) as b:
        await b.save_path(CHAT, tier="kv")
        await b.store.flush()
        match = await b.store.find(IDENTITY, Prompt.of(CHAT))
        with b.store.lease(match) as lease:
            view = await lease.load(2)
            assert view is not None
            with view:
                taken = []
                while (buffer := b.store.buffer_nowait(PART_BYTES)) is not None:
                    taken.append(buffer)
                copies = {b.store._catalog.ref_of(part)[0] for part in b.store._catalog.ram}
                assert copies == {lease.nodes[2].name}
                for buffer in taken:
                    buffer.release()
        await b.settle()


async def test_leased_copies_stay_while_their_tier_is_off(tmp_path: pathlib.Path) -> None:
    """Then they are all there is."""
    async with bench(tmp_path, ram_bytes=60_000) as b:
        await b.save_path(CHAT, tier="kv")
        await b.store.flush()
        [part, *_] = b.store._catalog.ram
        with b.store.lease(await b.store.find(IDENTITY, Prompt.of(CHAT))) as lease:
            b.store._catalog.off.add(b.store._catalog.tree.parts.home[part])
            while (buffer := b.store.buffer_nowait(PART_BYTES)) is not None:
                lease._buffers[0].append((PartKind.BASE, buffer))  # released with the lease
            assert len(b.store._catalog.ram) == 4
            b.store._catalog.off.clear()


async def test_what_does_not_fit_with_its_head_is_read_and_not_kept(tmp_path: pathlib.Path) -> None:
    """A head may be larger than what is left free for it."""
    async with bench(tmp_path, ram_bytes=1 << 20) as b:
        await b.save_path(CHAT, tier="kv", text=b"x" * 20_000)
        await b.settle()
    async with bench(tmp_path, ram_bytes=26_000) as b:
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            with b.store.lease(await b.store.find(IDENTITY, Prompt.of(CHAT))) as lease:
                assert len(lease.nodes) == 4
                for index in range(4):
                    view = await lease.load(index)
                    assert view is not None
                    view.release()
                    lease.release(index)
        await b.settle()


async def test_one_buffer_at_a_time_is_made_ready(tmp_path: pathlib.Path) -> None:
    """They count as used while they are touched, and somebody may want the room."""
    used: list[int] = []
    inline = InlineRunner()

    async def run(fn: Any, *args: Any) -> Any:
        if fn.__name__ == "_touch":
            used.append(b.store._arena.used_bytes)
        return await inline(fn, *args)

    async with bench(tmp_path, run=run) as b:
        await b.save_path(CHAT, tier="kv")
        await b.settle()
        assert used == []
        before = b.store._arena.used_bytes
        b.store._loader._wanted[4096] = 3
        b.store._loader._wants_more.set()
        await trio.testing.wait_all_tasks_blocked()
    assert used == [before + 4096] * 3


async def test_no_memory_for_what_nobody_waits_for_is_no_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are not made ready then; what is wanted later is read as soon as there is memory."""
    async with bench(tmp_path) as b:
        await b.save_path(CHAT, tier="kv")
        await b.settle()

    def refuse(size: int) -> None:
        raise OSError(errno.ENOMEM, "no addresses")

    async with bench(tmp_path) as b:
        with monkeypatch.context() as patch:
            patch.setattr("erllama.kvcache.arena._map", refuse)
            await trio.testing.wait_all_tasks_blocked()
        assert b.store._arena.statistics().made == 0
        assert await b.read(CHAT) == len(CHAT)


async def test_buffers_for_the_first_reads_after_a_restart_are_ready(tmp_path: pathlib.Path) -> None:
    """D8: before anybody asks, buffers of the files' size were touched; a first read makes none."""
    async with bench(tmp_path) as b:
        await b.save_path(CHAT, tier="kv")
        await b.settle()
    async with open_store(tiers=[DiskTier("kv", str(tmp_path))], run=InlineRunner()) as store:
        await trio.testing.wait_all_tasks_blocked()
        ready = store.statistics().arena
        assert (ready.made, ready.idle_bytes > 0, ready.lost) == (N_READY, True, 0)
        match = await store.find(IDENTITY, Prompt.of(CHAT))
        with store.lease(match) as lease:
            for index in range(len(lease.nodes)):
                data = await lease.load(index)
                assert data is not None
                data.release()
                lease.release(index)
        assert store.statistics().arena.made == N_READY


async def test_a_shared_prefix_is_stored_once(tmp_path: pathlib.Path) -> None:
    """X1: fifty conversations with one head write it once."""
    async with bench(tmp_path) as b:
        for i in range(50):
            await b.save_path([*range(8), 10 + i % 16, i], tier="kv")
        await b.settle()
        assert b.store.statistics().bytes_written["kv"] == 52 * PART_BYTES
        assert b.store.statistics().n_nodes == 52


async def test_the_diverging_block_is_reported(tmp_path: pathlib.Path) -> None:
    """D6: a prompt that parts inside a block learns how far it goes, from RAM and from disk."""
    for turn in range(2):
        async with bench(tmp_path) as b:
            if turn == 0:
                await b.save_path([*range(4), 4, 5, 6, 7], tier="kv")
                await b.save_path([*range(4), 4, 5, 8, 9], tier="kv")
            match = await b.store.find(IDENTITY, Prompt.of([*range(4), 4, 5, 6, 1]))
            assert match.n_tokens == 4
            assert match.partial is not None
            assert match.partial.n_tokens == 3
            assert match.partial.node.ids.tolist() == [4, 5, 6, 7]
            with b.store.lease(match) as lease:
                assert lease.partial
                assert await lease.load(1) is not None
            await b.settle()


async def test_other_tokens_with_equal_bytes_hit_with_their_own_ids(tmp_path: pathlib.Path) -> None:
    """K2, K25: found by bytes, read with the stored ids, going on with the caller's."""
    async with bench(tmp_path) as b:
        await b.save_path([26, 27, 3, 4], tier="kv")  # "aa" "ab" "d" "e"
        asked = [0, 0, 0, 1, 3, 4, 9]
        match = await b.store.find(IDENTITY, Prompt.of(asked, pieces(asked)))
        assert match.ids.tolist() == [26, 27, 3, 4]
        assert (match.token_pos, match.byte_pos) == (6, 6)
        assert match.nodes[0].by_bytes
        with b.store.lease(match) as lease:
            assert await lease.load(0) is not None
        plain = await b.store.find(IDENTITY, Prompt.of(asked))
        assert plain.n_tokens == 0


async def test_peek_counts_nothing() -> None:
    """K37: tokens and bytes of the longest stored beginning, as a plain read."""
    async with bench() as b:
        await b.save_path([26, 1, 2, 3, 4])
        before = b.store.statistics().hits_exact
        asked = [26, 1, 2, 3, 9]
        assert b.store.peek(IDENTITY, Prompt.of(asked, pieces(asked))) == (4, 5)
        assert b.store.peek(IDENTITY, Prompt.of([9])) == (0, 0)
        assert b.store.statistics().hits_exact == before


async def test_counters_tell_hits_apart() -> None:
    """K36: exact, resume, longest prefix, miss, and saves by reason, with exact deltas."""
    async with bench() as b:
        saved = await b.save_path(range(8), reason=SaveReason.FINISH)
        await b.save([1], saved[-1], reason=SaveReason.AGENT_PREFIX)
        await b.read(range(8))
        await b.store.find(IDENTITY, Prompt.of([*range(8), 20]), resume_key=saved[-1].name)
        await b.read([*range(4), 20])
        await b.read([20])
        stats = b.store.statistics()
        assert (stats.hits_exact, stats.hits_resume, stats.hits_longest_prefix, stats.misses) == (1, 1, 1, 1)
        assert stats.saves == {"finish": 2, "agent_prefix": 1}
        assert stats.longest_prefix_probes > 0
        assert stats.longest_prefix_ns > 0
        assert (stats.tokens_matched, stats.tokens_asked) == (8 + 8 + 4, 8 + 9 + 5 + 1)
        b.store.count_pack(5)
        assert b.store.statistics().pack_total_ns == 5


async def test_a_payload_larger_than_the_budget_is_refused() -> None:
    """K4: before memory is taken; the rest of the store is untouched."""
    async with bench(ram_bytes=1 << 16) as b:
        await b.save_path(range(4))
        assert b.store.buffer_nowait(1 << 20) is None
        assert await b.store.buffer(1 << 20) is None
        assert b.store.statistics().refusals["too_large"] == 2
        assert await b.read(range(4)) == 4


async def test_ram_evicts_suffixes_and_keeps_its_budget() -> None:
    """K35, P12: memory stays within the budget, nodes go leaves first, every prefix still loads."""
    async with bench(ram_bytes=1 << 17) as b:
        for i in range(40):
            await b.save_path([*range(8), 10 + i % 16, i % 26, i])
            stats = b.store.statistics()
            assert stats.memory_bytes <= 1 << 17
        assert stats.evictions > 0
        assert await b.read(range(8)) == 8, "the shared head outlives the tails"
        await b.settle()


async def test_a_lease_holds_what_it_names() -> None:
    """K27, law 4: leased nodes are not evicted, and go back when the lease ends, whatever was raised."""
    async with bench(ram_bytes=1 << 16) as b:
        await b.save_path(range(8))
        match = await b.store.find(IDENTITY, Prompt.of(range(8)))
        with pytest.raises(RuntimeError), b.store.lease(match) as lease:  # noqa: PT012 - what it holds meanwhile
            assert b.store.statistics().leases == 2
            assert await b.store.gc() == 0
            for i in range(20):
                await b.save_path([20, i])
            assert await lease.load(1) is not None
            raise RuntimeError
        assert b.store.statistics().leases == 0
        assert await b.store.gc() > 0
        assert await b.read(range(8)) == 0


async def test_a_lease_sees_what_left_before_it() -> None:
    """A match is names: what was evicted since is simply not in the lease."""
    async with bench() as b:
        await b.save_path(range(8))
        match = await b.store.find(IDENTITY, Prompt.of(range(8)))
        await b.store.gc()
        with b.store.lease(match) as lease:
            assert lease.nodes == ()


async def test_concurrent_readers_share_one_read(tmp_path: pathlib.Path) -> None:
    """X21: eight readers of one stored block cause one read of the tier."""
    async with bench(tmp_path) as b:
        await b.save_path(range(4), tier="kv")
        await b.store.flush()
    async with bench(tmp_path, run=None) as b, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(b.read, range(4))
        await trio.lowlevel.checkpoint()
        while nursery.child_tasks:
            await trio.testing.wait_all_tasks_blocked()
            break
    assert b.store.statistics().bytes_read == {"kv": PART_BYTES}
    assert b.store.statistics().loads_in_flight == 0


async def test_saves_twice_the_same_are_one() -> None:
    """K14: a second save of a node is taken for stored; its buffers go back."""
    async with bench() as b:
        first = await b.save(range(4))
        used = b.store.statistics().memory_bytes
        again = await b.save(range(4))
        assert first is not None
        assert again is not None
        assert again.stored
        assert again.name == first.name
        assert b.store.statistics().memory_bytes == used
        assert b.store.has(first.name)
        assert not b.store.has(first.name, PartKind.STATE)


async def test_parts_are_stored_and_dropped_each_on_its_own(tmp_path: pathlib.Path) -> None:
    """X4: window and state beside the base; under pressure those away from anchors go first."""
    async with bench(tmp_path, ram_bytes=1 << 20) as b:
        kinds = (PartKind.BASE, PartKind.WINDOW, PartKind.STATE)
        saved = None
        for i in range(4):
            saved = await b.save([i] * 4, saved, tier="kv", kinds=kinds, anchor=i == 3)
        await b.settle()
        history = [i for i in range(4) for _ in range(4)]
        assert await b.read(history, PartKind.STATE) == 16
        await b.store.evict_bytes(5 * PART_BYTES, ["disk"])
        match = await b.store.find(IDENTITY, Prompt.of(history))
        kept = [sorted(kind.name for kind in found.parts) for found in match.nodes]
        assert match.n_tokens == 16, "bases stay"
        assert kept[3] == ["BASE", "STATE", "WINDOW"], "the anchor keeps its parts"
        assert sum(map(len, kept)) < 12
        await b.settle()


async def test_orphans_cannot_be_saved() -> None:
    """Closure: a node whose parent is gone is refused."""
    async with bench() as b:
        saved = await b.save(range(4))
        await b.store.gc()
        child = await b.save([9], saved)
        assert child is not None
        assert child.refusal is Refusal.NO_PARENT
        assert not child.stored


async def test_gates(tmp_path: pathlib.Path) -> None:
    """K19, K39: boundaries of the policy; infinity suppresses saves altogether."""
    policy = SavePolicy(min_tokens=4, cold_min_tokens=6)
    async with bench(tmp_path) as b:
        for n, reason, stored in [(3, 5, False), (4, 5, True), (5, 1, False), (6, 1, True)]:
            saved = await b.save(range(n), policy=policy, reason=SaveReason(reason))
            assert saved is not None
            assert saved.stored is stored
        never = await b.save(range(20), policy=SavePolicy(min_tokens=math.inf))
        assert never is not None
        assert never.refusal is Refusal.BELOW_GATE
        assert b.store.statistics().refusals["below_gate"] == 3


async def test_traffic_seen_once_is_not_stored() -> None:
    """X11: with second sighting, a node is stored when it comes again."""
    policy = SavePolicy(min_tokens=0, cold_min_tokens=0, second_sighting=True)
    async with bench() as b:
        outcomes = [await b.save(range(4), policy=policy) for _ in range(2)]
        assert [o.stored for o in outcomes if o] == [False, True]


async def test_write_rate_is_limited(tmp_path: pathlib.Path) -> None:
    """X11: a burst above the tier's rate stays in RAM; later saves are written again."""
    clock = Clock()
    tier = DiskTier("kv", str(tmp_path), 1 << 24, max_write_bytes_per_s=100.0)
    async with bench(clock=clock) as b:
        await b.store.add_tier(tier)
        refusals = []
        for i in range(4):
            saved = await b.save([i], tier="kv")
            assert saved is not None
            assert saved.stored
            refusals.append(saved.refusal)
        assert refusals == [None, None, Refusal.WRITE_RATE, Refusal.WRITE_RATE]
        clock.now += 60
        saved = await b.save([9], tier="kv")
        assert saved is not None
        assert saved.refusal is None
        await b.settle()


async def test_private_nodes_never_reach_a_file(tmp_path: pathlib.Path) -> None:
    """X26: neither they nor what hangs behind them, by saving or by spilling."""
    async with bench(tmp_path, ram_bytes=1 << 16, spill=True) as b:
        secret = await b.save(range(4), tier="kv", private=True)
        await b.save([7], secret, tier="kv")
        for i in range(30):
            await b.save([20, i])
        await b.settle()
        written = {path.name.split(".")[0] for path in files_of(tmp_path)}
        assert written
        assert secret is not None
        assert secret.name.hex() not in written
        assert all(meta[:4] != [0, 1, 2, 3] for name, meta in b.history.items() if name.hex() in written)


async def test_time_to_live(tmp_path: pathlib.Path) -> None:
    """X26: an expired node is not served, is removed by housekeeping, and does not come back at a restart."""
    clock = Clock()
    async with bench(tmp_path, clock=clock) as b:
        await b.save(range(4), tier="kv", ttl_s=100)
        await b.save([20], tier="kv", ttl_s=500)
        await b.settle()
        clock.now += 200
        assert await b.read(range(4)) == 0
        await b.store.housekeeping()
        assert len(files_of(tmp_path)) == 1
    clock.now += 1000
    async with bench(tmp_path, clock=clock) as b:
        assert b.store.statistics().n_nodes == 0
        assert files_of(tmp_path) == []


# --- pins -----------------------------------------------------------------------------------------


async def test_pins_survive_floods_and_expire() -> None:
    """X7: pin, flood, hit; after its time the pin is gone."""
    clock = Clock()
    async with bench(clock=clock, ram_bytes=1 << 17) as b:
        saved = await b.save_path([*range(4), 5])
        assert b.store.pin(saved[-1].name, ttl_s=60)
        for i in range(60):
            await b.save([20, i])
        assert await b.read([*range(4), 5]) == 5
        assert await b.store.gc() > 0
        assert await b.read([*range(4), 5]) == 5
        clock.now += 61
        await b.store.gc()
        assert await b.read([*range(4), 5]) == 0
        assert not b.store.unpin(saved[-1].name)


async def test_gc_leaves_pins_and_live_keys_and_force_takes_them_last() -> None:
    """K30: gc leaves exactly those; a huge eviction takes them last; live keys replace each other."""
    async with bench() as b:
        pinned, first, second = [await b.save([i]) for i in (1, 2, 3)]
        for i in range(5, 9):
            await b.save([i])
        assert pinned
        assert first
        assert second
        b.store.pin(pinned.name)
        b.store.set_live_key("sequence", first.name)
        b.store.set_live_key("sequence", second.name)
        assert await b.store.gc() == 5
        assert [await b.read([i]) for i in (1, 2, 3)] == [1, 0, 1]
        b.store.set_live_key("sequence", None)
        assert await b.store.gc() == 1
        evicted = await b.store.evict_bytes(1 << 30)
        assert evicted.n_nodes == 1
        assert b.store.statistics().pins_forced == 1


async def test_pins_are_budgeted() -> None:
    """K33: four tool sets fit the budget; the fifth unpins the oldest used, and is counted."""
    async with bench(ram_bytes=20 * PART_BYTES, pin_fraction=0.2) as b:
        names = []
        for i in range(5):
            saved = await b.save([i], tier="ram")
            assert saved is not None
            names.append(saved.name)
            assert b.store.pin(saved.name)
            await b.read([0])  # the first stays in use
        stats = b.store.statistics()
        assert (stats.pins, stats.pins_forced) == (4, 1)
        await b.store.gc()
        assert [await b.read([i]) for i in range(5)] == [1, 0, 1, 1, 1]
        big = await b.save([9], size=5 * PART_BYTES)
        assert big is not None
        assert not b.store.pin(big.name), "over the budget on its own"
        assert not b.store.pin(bytes(32))


async def test_agent_prefixes_are_pinned_again_after_a_restart(tmp_path: pathlib.Path) -> None:
    """K34: from the stored save reason."""
    async with bench(tmp_path) as b:
        await b.save(range(4), tier="kv", reason=SaveReason.AGENT_PREFIX)
        await b.save([20], tier="kv")
        await b.settle()
    async with bench(tmp_path) as b:
        assert await b.store.gc() == 1
        assert await b.read(range(4)) == 4


# --- eviction -------------------------------------------------------------------------------------


async def test_hits_survive_a_restart_and_decide_who_goes(tmp_path: pathlib.Path) -> None:
    """K29, K31: with equal recency the one hit more stays; the counts come back from the journal."""
    clock = Clock()
    async with bench(tmp_path, clock=clock) as b:
        for i in (1, 2):
            await b.save([i], tier="kv")
        for _ in range(20):
            await b.read([1])
        await b.read([2])
        await b.settle()
    before = [path.read_bytes() for path in files_of(tmp_path)]
    async with bench(tmp_path, clock=clock) as b:
        for i in range(3):
            await b.read([2 if i == 0 else 1])
        await b.store.evict_bytes(1, ["kv"])
        assert await b.read([1]) == 1
        assert await b.read([2]) == 0
    assert before[0] == files_of(tmp_path)[0].read_bytes() or before[1] == files_of(tmp_path)[0].read_bytes()


async def test_recency_is_the_file_s_mtime(tmp_path: pathlib.Path) -> None:
    """K31, K11: a hit touches the file, at most once a minute, and changes not a byte of it."""
    clock = Clock()
    async with bench(tmp_path, clock=clock) as b:
        await b.save([1], tier="kv")
        await b.settle()
        path = files_of(tmp_path)[0]
        content, inode = path.read_bytes(), path.stat().st_ino
        clock.now += 1000
        for _ in range(1000):
            await b.store.find(IDENTITY, Prompt.of([1]))
        await b.store.flush()
        assert path.stat().st_mtime == int(clock.now)
        assert (path.read_bytes(), path.stat().st_ino) == (content, inode)


async def test_disk_evicts_to_its_budget(tmp_path: pathlib.Path) -> None:
    """K4, K35: bytes on disk never exceed the budget; the shared head stays; reports match."""
    async with bench(tmp_path, disk_bytes=20 * PART_BYTES) as b:
        for i in range(40):
            await b.save_path([*range(8), 10 + i % 16, i % 26, i], tier="kv")
            await b.settle()
            assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 20 * PART_BYTES
        assert b.tier().evictions > 0
        assert await b.read(range(8)) == 8
        before = b.tier().used_bytes
        evicted = await b.store.evict_bytes(2 * PART_BYTES, ["kv"])
        assert evicted.n_bytes >= 2 * PART_BYTES
        assert b.tier().used_bytes == before - evicted.n_bytes
        await b.settle()


async def test_a_full_cache_is_not_rewritten_for_ever(tmp_path: pathlib.Path) -> None:
    """FAULTS "store, then evict": six chats with one head, room for three: the head stays, writes are few."""
    clock = Clock()
    budget = 16 * (PART_BYTES + 600)
    async with bench(tmp_path, clock=clock, disk_bytes=budget) as b:
        for turn in range(5):
            for chat in range(6):
                clock.now += 60
                ids = [*range(8), *([chat + 10] * 8)]
                await b.read(ids)
                await b.save_path(ids, tier="kv")
                await b.settle()
            if turn == 0:
                first_round = b.store.statistics().bytes_written["kv"]
        assert await b.read(range(8)) == 8
        assert first_round < 2 * budget


async def test_what_cannot_fit_is_refused_not_looped(tmp_path: pathlib.Path) -> None:
    """FAULTS: one entry larger than the tier evicts nobody and is refused."""
    async with bench(tmp_path, disk_bytes=4 * PART_BYTES) as b:
        await b.save([1], tier="kv")
        await b.settle()
        big = await b.save([2], tier="kv", size=8 * PART_BYTES)
        assert big is not None
        assert not await big.wait_durable()
        assert big.jobs[0].outcome is Refusal.TOO_LARGE
        assert len(files_of(tmp_path)) == 1
        await b.settle()


# --- spilling and moving --------------------------------------------------------------------------


async def test_spilling_keeps_everything_readable(tmp_path: pathlib.Path) -> None:
    """K39, no dark moment: what RAM evicts is on the spill tier, and readable at every stage of the move."""
    stages: list[int] = []

    class Watching(Files):
        def sync(self, fd: int) -> None:
            if store_box:
                stages.append(store_box[0].store.peek(IDENTITY, Prompt.of([0, 1, 2, 3]))[0])
            super().sync(fd)

    store_box: list[Bench] = []
    async with bench(tmp_path, ram_bytes=1 << 16, spill=True, files=Watching()) as b:
        store_box.append(b)
        await b.save_path(range(4))
        chats = [[*range(4), 20, i] for i in range(20)]
        for chat in chats:
            await b.save_path(chat)
        assert [await b.read(chat) for chat in chats] == [6] * 20
        assert b.store.statistics().memory_bytes <= 1 << 16
        await b.settle()
    assert stages
    assert set(stages) == {4}
    async with bench(tmp_path) as b:
        assert await b.read(range(4)) == 4


async def test_a_stalled_write_is_readable_from_ram(tmp_path: pathlib.Path) -> None:
    """K39: stall the writer, look up: a hit."""
    async with bench(tmp_path, writer_max_concurrent=0, shutdown_s=0.01) as b:
        saved = await b.save_path(CHAT, tier="kv")
        assert saved[-1].jobs
        assert await b.read(CHAT) == 14
        assert await b.store.gc() == 0, "what is being written is not evicted"
        assert b.store.statistics().writes_queued == 4


async def test_back_pressure_drops_saves_and_counts_them(tmp_path: pathlib.Path) -> None:
    """K28: the queue is bounded in bytes; a refused save costs nothing and fails nothing."""
    limit = 2 * PART_BYTES
    async with bench(tmp_path, writer_max_concurrent=0, writer_max_bytes=limit, shutdown_s=0.01) as b:
        outcomes = [await b.save([i], tier="kv") for i in range(4)]
        assert [o.refusal for o in outcomes if o] == [None, None] + [Refusal.BACK_PRESSURE] * 2
        stats = b.store.statistics()
        assert (stats.saves_dropped, stats.writes_queued, stats.write_queue_bytes) == (2, 2, limit)
        assert (stats.n_nodes, stats.arena.lost) == (2, 0)


async def test_waiting_for_a_save_is_a_scope(tmp_path: pathlib.Path) -> None:
    """K8, K23: ten thousand waits given up leave nothing; a finished save wakes its waiter."""
    async with bench(tmp_path, writer_max_concurrent=0, shutdown_s=0.01) as b:
        saved = await b.save([1], tier="kv")
        assert saved is not None
        for _ in range(10_000):
            with trio.CancelScope() as scope:
                scope.cancel()
                await b.store.wait_saved(saved.name)
        assert b.store.statistics().writes_queued == 1
        assert saved.jobs[0].done.statistics().tasks_waiting == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.store._writer.run_worker)
            assert await b.store.wait_saved(saved.name)
            nursery.cancel_scope.cancel()


async def test_removing_a_tier_flushes_and_keeps_the_files(tmp_path: pathlib.Path) -> None:
    """X23, K5: nothing is lost by taking a tier away and adding it again."""
    async with bench(tmp_path) as b:
        await b.save_path(CHAT, tier="kv")
        await b.store.remove_tier("kv")
        assert len(files_of(tmp_path)) == 4
        assert [tier.name for tier in b.store.list_tiers()] == ["ram"]
        with pytest.raises(InvalidConfig, match="no tier 'kv'"):
            await b.save([1], tier="kv")
        assert await b.read(CHAT) == 14, "copies in RAM live on"
        await b.store.gc()
        await b.store.add_tier(DiskTier("kv", str(tmp_path), 1 << 20))
        assert await b.read(CHAT) == 14
        await b.settle()
        with pytest.raises(InvalidConfig, match="'kv' and 'other' have the same folder"):
            await b.store.add_tier(DiskTier("other", str(tmp_path)))
        with pytest.raises(InvalidConfig, match=r"two are named 'kv'.* needs a name of its own"):
            await b.store.add_tier(DiskTier("kv", str(tmp_path / "b")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiskTier("", "/x"),
        lambda: DiskTier("kv", ""),
        lambda: DiskTier("kv", "a\0b"),
        lambda: DiskTier("ram", "/x"),
        lambda: DiskTier("kv", "/x", -1),
        lambda: DiskTier("kv", "/x", True),
        lambda: DiskTier("kv", "/x", 1, 0.0),
        lambda: DiskTier("kv", "/x", 1, "fast"),  # type: ignore[arg-type]
        lambda: DiskTier("kv", 5),  # type: ignore[arg-type]
        lambda: RamTier(1.5),  # type: ignore[arg-type]
        lambda: RamTier(1, None, "ram", 2),  # type: ignore[call-arg]
        lambda: DiskTier("kv", "/x", root="/y"),  # type: ignore[misc]
    ],
)
def test_tiers_check_their_options(make) -> None:
    """M3: wrong values are refused before anything is touched."""
    with pytest.raises(InvalidOption):
        make()


def test_tiers_name_what_is_wrong_with_their_arguments() -> None:
    """By the name of the class that was typed, as option classes do; copies are made as of any dataclass."""
    with pytest.raises(MissingOption, match=r"DiskTier needs root, as in DiskTier\(root=…\)") as missing:
        DiskTier("kv")  # type: ignore[call-arg]
    assert missing.value.detail == {"key": "root"}
    with pytest.raises(UnknownOption, match="DiskTier has no option 'maxbytes'; did you mean 'max_bytes'"):
        DiskTier("kv", "/x", maxbytes=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownOption, match="RamFileTier has no option 'size'; known options: max_bytes, "):
        RamFileTier(name="kv", root="/x", size=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownOption, match="RamTier has no option 'spil'; did you mean 'spill'"):
        RamTier(spil="kv")  # type: ignore[call-arg]
    assert replace(DiskTier("kv", root="/x", max_bytes=2), root="/y") == DiskTier("kv", "/y", 2)


async def test_an_unknown_spill_tier_is_refused() -> None:
    """M3: spilling to a tier that is not there."""
    with pytest.raises(InvalidConfig):
        async with bench(spill=True):
            raise AssertionError("must not open")


# --- damage ---------------------------------------------------------------------------------------


async def test_a_damaged_payload_is_quarantined_on_first_use(tmp_path: pathlib.Path) -> None:
    """K40: a miss, a counter, the file out of the way; what hung behind it is gone too."""
    async with bench(tmp_path) as b:
        saved = await b.save_path(CHAT, tier="kv")
        await b.settle()
    victim = tmp_path / "nodes" / f"{saved[1].name.hex()}.base.kvc"
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    async with bench(tmp_path) as b:
        assert await b.read(CHAT) == 4
        assert b.store.statistics().damage == {"payload": 1}
        assert await b.read(CHAT) == 4
        assert b.store.statistics().damage == {"payload": 1}, "found once"
        await b.settle()
        assert len(files_of(tmp_path)) == 1
        assert [path.name for path in (tmp_path / "quarantine").iterdir()] == [victim.name]
        await b.save_path(CHAT, tier="kv")
        await b.settle()
        assert len(files_of(tmp_path)) == 4


async def test_the_start_up_scan_refuses_what_it_does_not_know(tmp_path: pathlib.Path) -> None:
    """K10, K40: corrupt heads, foreign versions and names are rejected, counted and never served."""
    async with bench(tmp_path) as b:
        for i in range(4):
            await b.save([i], tier="kv")
        await b.settle()
    paths = files_of(tmp_path)
    contents = [bytearray(path.read_bytes()) for path in paths]
    contents[0][3] = 9  # version
    contents[1][60] ^= 255  # metadata
    del contents[2][-1]  # truncated
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    (tmp_path / "nodes" / "README").write_text("not ours")
    async with bench(tmp_path) as b:
        stats = b.store.statistics()
        assert stats.n_nodes == 1
        assert stats.rejected == {"version": 1, "metadata": 1, "size": 1, "name": 1}
        await b.settle()


async def test_a_file_removed_behind_our_back_is_a_miss(tmp_path: pathlib.Path) -> None:
    """K9: somebody deleted it; the index forgets it."""
    async with bench(tmp_path) as b:
        await b.save_path(range(8), tier="kv")
        await b.settle()
    async with bench(tmp_path) as b:
        for path in files_of(tmp_path):
            path.unlink()
        assert await b.read(range(8)) == 0
        assert b.store.statistics().damage == {"missing": 1}
        assert b.store.statistics().n_nodes == 0


async def test_a_node_the_engine_calls_unusable_is_never_served_again(tmp_path: pathlib.Path) -> None:
    """FAULTS "poison entry": quarantined with everything behind it."""
    async with bench(tmp_path) as b:
        saved = await b.save_path(range(8), tier="kv")
        await b.settle()
        b.store.quarantine(saved[0].name, "decode")
        assert await b.read(range(8)) == 0
        await b.settle()
        assert files_of(tmp_path) == []
        assert b.store.statistics().damage == {"decode": 1}


async def test_check_finds_and_fixes(tmp_path: pathlib.Path) -> None:
    """Every kind of disorder has a name, and `fix` leaves none."""
    async with bench(tmp_path) as b:
        saved = await b.save_path(CHAT, tier="kv")
        await b.settle()
        nodes = tmp_path / "nodes"
        (nodes / "foreign").write_bytes(b"x")
        (nodes / f"{'ab' * 32}.base.kvc.{'0' * 16}.tmp").write_bytes(b"x")
        last = nodes / f"{saved[3].name.hex()}.base.kvc"
        last.write_bytes(last.read_bytes()[:-1] + b"\0")
        (nodes / f"{saved[2].name.hex()}.base.kvc").unlink()
        kinds = {finding.kind for finding in await b.store.check()}
        assert kinds == {"foreign", "temporary", "damaged", "missing", "usage"}
        await b.store.check(fix=True)
        assert await b.store.check() == []
        await b.store.gc()
        assert await b.read(CHAT) == 0


# --- failing tiers --------------------------------------------------------------------------------


@asynccontextmanager
async def failing_tier(root: pathlib.Path) -> AsyncIterator[tuple[Bench, FailingFiles]]:
    """A history of eight tokens on disk only, and no write that succeeds from now on."""
    files = FailingFiles(errno.EIO, call="write")
    files.on = False
    async with bench(root, files=files) as b:
        await b.save_path(range(8), tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        files.on = True
        yield b, files


async def test_a_failing_tier_is_switched_off_and_comes_back(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    """K6: errors switch it off, others serve on; it is tried again later and its content is there."""
    async with failing_tier(tmp_path) as (b, files):
        failed = await b.save([20], tier="kv")
        assert failed is not None
        assert not await failed.wait_durable()
        assert not b.tier().on
        assert "EIO" in b.tier().error or "Input/output" in b.tier().error
        assert await b.read(range(8)) == 0, "not handed out while off"
        assert await b.read([20]) == 1, "still in RAM"
        refused = await b.save([21], tier="kv")
        assert refused is not None
        assert refused.refusal is Refusal.TIER_OFF
        files.on = False
        await trio.sleep(5)
        assert b.tier().on
        assert await b.read(range(8)) == 8
        assert b.store.statistics().tier_failures == 1
        await b.settle()


async def test_a_full_device_evicts_once_then_degrades(tmp_path: pathlib.Path) -> None:
    """FAULTS "physically full disk": evict and retry once; without use, drop the save and go on."""
    files = FailingFiles(errno.ENOSPC, call="write")
    files.on = False
    async with bench(tmp_path, files=files) as b:
        for i in range(4):
            await b.save([i], tier="kv")
        await b.settle()

        def recover_after_unlink(path: str) -> None:
            files.on = False
            Files.unlink(files, path)

        files.on = True
        files.unlink = recover_after_unlink  # type: ignore[method-assign]
        saved = await b.save([20], tier="kv")
        assert saved is not None
        assert await saved.wait_durable(), "room was made on the device"
        del files.unlink
        files.on = True
        saved = await b.save([21], tier="kv")
        assert saved is not None
        assert not await saved.wait_durable()
        assert saved.jobs[0].outcome is Refusal.NO_ROOM
        assert await b.read([21]) == 1
        assert b.tier().on
        files.on = False
        await b.settle()


async def test_a_read_only_root_serves(tmp_path: pathlib.Path) -> None:
    """A root that cannot be written is read; saves stay in RAM."""
    async with bench(tmp_path) as b:
        await b.save_path(range(8), tier="kv")
        await b.settle()

    class ReadOnly(Files):
        def try_lock(self, path: str, *, exclusive: bool) -> int | None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    async with bench(tmp_path, files=ReadOnly()) as b:
        assert b.tier().read_only
        assert await b.read(range(8)) == 8
        saved = await b.save([20], tier="kv")
        assert saved is not None
        assert saved.refusal is Refusal.TIER_OFF
        assert await b.read([20]) == 1


async def test_a_root_that_cannot_be_made_is_refused(tmp_path: pathlib.Path) -> None:
    """A plain file where the folder should be: no start without what was asked for."""
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "file", tmp_path / "file" / "root", tmp_path / "/proc/nope"):
        with pytest.raises(InvalidConfig, match=r"tier 'kv': .* cannot be its folder") as caught:
            async with bench(wrong):
                raise AssertionError("must not open")
        assert caught.value.detail == {"key": "root", "value": str(wrong)}
    async with bench(tmp_path / "right") as b:
        with pytest.raises(InvalidConfig, match="tier 'other'"):
            await b.store.add_tier(DiskTier("other", str(tmp_path / "file")))
        assert [tier.name for tier in b.store.list_tiers()] == ["ram", "kv"]
        await b.store.add_tier(DiskTier("other", str(tmp_path / "other")))
        await b.save([1], tier="other")
        assert await b.read([1]) == 1
        await b.settle()


async def test_a_root_on_a_broken_device_is_off(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The place is right and the device is not: the store runs on RAM, says so, and tries again."""
    files = FailingFiles(errno.EIO, call="make_folder")
    async with bench(tmp_path / "root", files=files) as b:
        assert not b.tier().on
        assert "Input/output" in b.tier().error
        await b.save([1], tier="kv")
        assert await b.read([1]) == 1
        files.on = False
        await trio.sleep(5)
        assert b.tier().on


async def test_a_root_removed_while_running(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The folder vanishes: off, then made anew; nothing that is gone is served."""
    import shutil

    root = tmp_path / "root"
    async with bench(root) as b:
        await b.save_path(range(8), tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        shutil.rmtree(root)
        await b.save([20], tier="kv")
        await b.store.flush()
        await trio.sleep(10)
        assert b.tier().on
        assert await b.read(range(8)) == 0
        again = await b.save([21], tier="kv")
        assert again is not None
        assert await again.wait_durable()
        await b.settle()


@pytest.mark.parametrize("step", [-1e6, 1e6, 1e9])
async def test_clock_steps(tmp_path: pathlib.Path, step: float) -> None:
    """A wall clock that jumps changes no answer, breaks no file and never sorts into the future."""
    clock = Clock()
    async with bench(tmp_path, clock=clock, disk_bytes=12 * PART_BYTES) as b:
        await b.save_path(range(8), tier="kv")
        await b.settle()
        clock.now += step
        for i in range(12):
            await b.read(range(8))
            await b.save_path([*range(8), 20, i], tier="kv")
            await b.settle()
        assert await b.read(range(8)) == 8
    clock.now -= step
    async with bench(tmp_path, clock=clock, disk_bytes=12 * PART_BYTES) as b:
        assert await b.read(range(8)) == 8
        await b.settle()


# --- other processes ------------------------------------------------------------------------------


async def test_two_stores_on_one_root_see_each_other(tmp_path: pathlib.Path) -> None:
    """X22: what one publishes the other finds after a look; what one evicts the other misses cleanly."""
    async with bench(tmp_path) as a, bench(tmp_path) as b:
        await a.save_path(range(8), tier="kv")
        await a.settle()
        assert await b.read(range(8)) == 0
        await b.store.housekeeping()
        assert await b.read(range(8)) == 8
        await b.save([20], None, tier="kv")
        await b.store.flush()
        await a.store.gc()
        await a.store.flush()
        await b.store.housekeeping()
        assert await b.read([20]) == 0
        await b.settle()
        await a.store.housekeeping()
        await a.settle()


# --- races ----------------------------------------------------------------------------------------


async def test_cancelled_saves_and_loads_leak_nothing(tmp_path: pathlib.Path) -> None:
    """R7: cancel a save, a find and a load at their k-th checkpoint, for all k."""
    for k in range(1, 12):
        async with bench(tmp_path / str(k)) as b:
            await b.save_path(range(8), tier="kv")
            await b.store.flush()
            await b.store.evict_bytes(1 << 30, ["ram"])
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(b.read, range(8))
                    nursery.start_soon(
                        b.save_path,
                        [*range(8), 20],
                    )
                    for _ in range(k):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            await b.settle()
            stats = b.store.statistics()
            assert (stats.leases, stats.loads_in_flight, stats.writes_queued) == (0, 0, 0)
            assert await b.read(range(8)) == 8
            await b.store.gc()
            used = b.store.statistics().arena
            assert used.lost == 0
            assert used.used_bytes == b.store._catalog._index_charge + b.store._finder.heads._bytes


async def test_dropped_while_being_written(tmp_path: pathlib.Path) -> None:
    """K14: a node quarantined between submit and link is not published."""
    async with bench(tmp_path, writer_max_concurrent=0, shutdown_s=0.01) as b:
        saved = await b.save_path(range(8), tier="kv")
        b.store.quarantine(saved[0].name, "decode")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.store._writer.run_worker)
            await b.store.flush()
            nursery.cancel_scope.cancel()
        assert files_of(tmp_path) == []
        assert {job.outcome for s in saved for job in s.jobs} == {Refusal.NO_PARENT}
        await b.settle()


async def test_an_exception_in_the_block_comes_out_as_itself(tmp_path: pathlib.Path) -> None:
    """Leaving with an error still flushes, and the error is not wrapped."""
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with bench(tmp_path) as b:
            await b.save([1], tier="kv")
            raise ZeroDivisionError
    assert len(files_of(tmp_path)) == 1


async def test_a_closed_store_refuses(tmp_path: pathlib.Path) -> None:
    """After leaving, a save is refused and its buffer goes back."""
    async with bench(tmp_path) as b:
        pass
    saved = await b.save([1])
    assert saved is not None
    assert saved.refusal is Refusal.CLOSED


async def test_dump_and_repr(tmp_path: pathlib.Path) -> None:
    """K39: the index can be dumped; reprs show live state."""
    async with bench(tmp_path) as b:
        saved = await b.save_path(range(8), tier="kv")
        await b.settle()
        nodes = list(b.store.dump())
        assert [n["name"] for n in nodes] == [s.name.hex() for s in saved]
        assert nodes[1]["parent"] == saved[0].name.hex()
        assert nodes[0]["parts"]["base"] == {"bytes": PART_BYTES, "tier": "kv", "in_ram": True, "hits": 0.0}
        assert "2 nodes" in repr(b.store)
        assert "True" in repr(saved[0].jobs[0])


async def test_identities_do_not_mix_in_one_store() -> None:
    """K3: the same tokens under another shape, salt or compute-independent identity are other nodes."""
    async with bench() as b:
        for identity in (
            IDENTITY,
            Identity(shape_hash=b"x"),
            Identity(shape_hash=IDENTITY.shape_hash, salt=b"s"),
        ):
            await b.save(range(4), identity=identity)
        assert b.store.statistics().n_nodes == 3
        match = await b.store.find(Identity(shape_hash=b"y"), Prompt.of(range(4)))
        assert match.n_tokens == 0
        assert match.ids.dtype == np.int32


async def test_one_node_on_two_tiers(tmp_path: pathlib.Path) -> None:
    """Two folders that hold the same conversations: served from one, and from the other when that leaves."""
    for name in ("a", "b"):
        async with bench(tmp_path / name) as b:
            await b.save_path(range(8), tier="kv")
            await b.settle()
    tiers = [DiskTier(name, str(tmp_path / name), 1 << 20) for name in ("a", "b")]
    async with bench() as b:
        for tier in tiers:
            await b.store.add_tier(tier)
        assert b.store.statistics().n_nodes == 2
        await b.settle()
        await b.save([*range(4)], tier="b")
        await b.save_path([*range(8), 20], tier="b")
        await b.settle()
        assert b.tier("a").n_parts == 3, "a child goes where its parent is"
        await b.store.remove_tier("a")
        await b.store.housekeeping()
        assert await b.read(range(8)) == 8
        await b.settle()


async def test_saves_during_the_removal_of_a_tier(tmp_path: pathlib.Path) -> None:
    """K5: what comes while a tier is being taken away stays in RAM; nothing hangs, nothing fails."""
    async with bench(tmp_path) as b:
        await b.save_path(range(8), tier="kv")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.store.remove_tier, "kv")
            await trio.lowlevel.checkpoint()
            late = await b.save([20], tier="kv")
        assert late is not None
        assert late.stored
        assert await b.read([20]) == 1
        assert await b.read(range(8)) == 8
        assert await b.store.check() == []


async def test_a_node_computed_again_while_its_tier_is_off(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    """K6: what is on a tier that is off is served from a copy just computed, later from the tier again."""
    async with failing_tier(tmp_path) as (b, files):
        await b.save([20], tier="kv")
        await b.store.flush()
        assert await b.read(range(8)) == 0
        await b.save_path(range(8), tier="kv")
        assert await b.read(range(8)) == 8
        files.on = False
        await trio.sleep(5)
        await b.settle()
        assert await b.read(range(8)) == 8


async def test_pins_by_policy_and_load_many(tmp_path: pathlib.Path) -> None:
    """K33: an agent's prefix is pinned within its policy's share; a whole path can be loaded at once."""
    tight = SavePolicy(min_tokens=0, cold_min_tokens=0, pin_fraction=0.0)
    async with bench(tmp_path) as b:
        await b.save([1], tier="kv", reason=SaveReason.AGENT_PREFIX, policy=tight)
        assert b.store.statistics().pins == 0
        await b.save_path(range(20), tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        match = await b.store.find(IDENTITY, Prompt.of(range(20)))
        with b.store.lease(match) as lease:
            views = await lease.load_many(range(5), at_once=3)
            assert [view is not None and len(view) for view in views] == [PART_BYTES] * 5


async def test_the_longest_of_two_lives_counts() -> None:
    """X26: a node saved with a time to live and again without one does not expire."""
    clock = Clock()
    async with bench(clock=clock) as b:
        await b.save([1], ttl_s=10)
        await b.save([2], ttl_s=10)
        await b.save([1])
        await b.save([2], ttl_s=100)
        clock.now += 50
        assert await b.read([1]) == 1
        assert await b.read([2]) == 1
        clock.now += 51
        assert await b.read([2]) == 0


async def test_random_outcomes_leak_nothing(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R7: a thousand mixed operations with errors and cancellations; every gauge returns to its baseline."""
    rng = random.Random(11)
    files = FailingFiles(errno.ENOSPC)
    files.on = False
    async with bench(
        tmp_path, files=files, ram_bytes=90_000, disk_bytes=15 * PART_BYTES, writer_max_bytes=4 * PART_BYTES
    ) as b:

        async def one() -> None:
            ids = [*range(4), rng.randrange(6), *([rng.randrange(9)] * rng.randrange(6))]
            await rng.choice([b.read, b.read, lambda i: b.save_path(i, tier="kv"), b.save_path])(ids)

        for _ in range(250):
            files.at = len(files.calls) + rng.randrange(1, 60)
            files.on = rng.random() < 0.3
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
                for _ in range(rng.randrange(12)):
                    await trio.lowlevel.checkpoint()
                if rng.random() < 0.3:
                    nursery.cancel_scope.cancel()
        files.on = False
        await trio.sleep(200)  # a tier that failed is back, what was linked before an error is adopted
        await b.settle()
        stats = b.store.statistics()
        assert (stats.leases, stats.loads_in_flight, stats.writes_queued, stats.write_queue_bytes) == (0,) * 4
        assert b.tier().on
        await b.store.gc()
        await b.settle()
        catalog = b.store._catalog
        assert b.store.statistics().arena.used_bytes == catalog._index_charge + b.store._finder.heads._bytes
        assert not catalog.busy
        assert not catalog.abandoned


async def test_how_a_node_was_computed_is_told_and_asked_by_nobody(tmp_path: pathlib.Path) -> None:
    """Provenance is a fact: the first save's, in matches and files, also after a restart."""
    made = list(Provenance)
    async with bench(tmp_path) as b:
        for i, provenance in enumerate(made):
            await b.save([i], tier="kv", provenance=provenance)
        await b.settle()
        for i, _ in enumerate(made):
            await b.save([i], tier="kv", provenance=made[i - 1])
        await b.settle()
        assert b.store.statistics().n_nodes == len(made)
    async with bench(tmp_path) as b:
        for i, provenance in enumerate(made):
            match = await b.store.find(IDENTITY, Prompt.of([i]))
            assert [node.provenance for node in match.nodes] == [provenance]


async def test_pins_are_shown() -> None:
    """X7: who pinned what, until when."""
    clock = Clock(1000.0)
    async with bench(clock=clock) as b:
        saved = await b.save([1])
        assert saved is not None
        b.store.pin(saved.name, key="tools", ttl_s=5)
        b.store.set_live_key(7, saved.name)
        assert b.store.list_pins() == [
            (("user", "tools"), saved.name, 1005.0),
            (("live", 7), saved.name, None),
        ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"writer_max_concurrent": -1},
        {"n_threads": 0},
        {"ram": 5},
        {"tiers": ["kv"]},
        {"shutdown_s": "1"},
        {"clock": 3},
        {"files": 3},
        {"pin_fraction": 2},
    ],
)
async def test_store_options_are_checked(wrong: dict) -> None:
    """M3: wrong values are refused before anything is started; unknown names get the nearest."""
    with pytest.raises(InvalidOption):
        async with open_store(**wrong):
            raise AssertionError("must not open")
    with pytest.raises(UnknownOption, match="n_threads"):
        async with open_store(n_thread=1):
            raise AssertionError("must not open")


async def test_no_base_behind_a_hole(tmp_path: pathlib.Path) -> None:
    """K35: a parent that kept only its window after a crash is no parent for a base, on disk or in RAM."""
    both = (PartKind.BASE, PartKind.WINDOW)
    async with bench(tmp_path) as b:
        saved = await b.save_path(range(8), tier="kv", kinds=both)
        await b.settle()
    (tmp_path / "nodes" / f"{saved[0].name.hex()}.base.kvc").unlink()
    async with bench(tmp_path) as b:
        assert b.store.statistics().orphans == 1
        assert not b.store.has(saved[1].name)
        b.history[saved[0].name] = [0, 1, 2, 3]
        refused = await b.save([9], saved[0])
        assert refused is not None
        assert refused.refusal is Refusal.NO_PARENT
        await b.settle()
        await b.save_path(range(8), tier="kv", kinds=both)
        await b.settle()
        assert await b.read(range(8)) == 8


async def test_dropped_while_the_trash_is_emptied(tmp_path: pathlib.Path) -> None:
    """K14: a queued part that goes between being chosen and being written is refused; the others go on."""
    victim: list[bytes] = []

    class Dropping(Files):
        def unlink(self, path: str) -> None:
            if victim:
                box[0].store.quarantine(victim.pop(), "decode")
            super().unlink(path)

    box: list[Bench] = []
    async with bench(tmp_path, files=Dropping()) as b:
        box.append(b)
        old = await b.save_path([20, 20, 20, 20, 21], tier="kv")
        await b.store.flush()
        b.store.quarantine(old[0].name, "decode")  # two files for the trash
        saved = await b.save([1], tier="kv")
        assert saved is not None
        victim.append(saved.name)
        other = await b.save([2], tier="kv")
        assert other is not None
        assert not await saved.wait_durable()
        assert await other.wait_durable()
        await b.settle()
