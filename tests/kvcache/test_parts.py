"""Nodes whose parts come at different times, or hold nothing: empty bases, late parts, anchors."""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import TYPE_CHECKING

import pytest
import trio

from erllama.kvcache.files import Files
from erllama.kvcache.key import Prompt
from erllama.kvcache.kinds import PartKind, Refusal, SaveReason
from erllama.kvcache.policy import SavePolicy
from erllama.tools.kvc import main as kvc

from .nodes import IDENTITY, pieces
from .stores import PART_BYTES, Bench, bench

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from erllama.kvcache.store import Saved

BASE, WINDOW, STATE = PartKind.BASE, PartKind.WINDOW, PartKind.STATE
EMPTY = {BASE: 0}


async def recurrent(
    b: Bench, n: int, *, states: Sequence[int], tier: str = "ram", anchors: Sequence[int] | None = None
) -> list[Saved]:
    """A path of nodes as a recurrent model has them: empty bases, and a state behind some of them.

    `anchors`: which nodes are; None: those with a state.
    """
    made: list[Saved] = []
    for i in range(n):
        kinds = (BASE, STATE) if i in states else (BASE,)
        anchor = i in (states if anchors is None else anchors)
        above = made[-1] if made else None
        saved = await b.save([i], above, tier=tier, kinds=kinds, sizes=EMPTY, anchor=anchor)
        assert saved is not None
        assert saved.stored
        made.append(saved)
    return made


async def loaded(b: Bench, ids: Sequence[int]) -> list[dict[PartKind, int]]:
    """Bytes of every part of a history that can be loaded; `Bench.read` checks what is in them."""
    match = await b.store.find(IDENTITY, Prompt.of(ids, pieces(ids)))
    found = []
    with b.store.lease(match) as lease:
        for i in range(len(lease.nodes)):
            views = {kind: await lease.load(i, kind) for kind in (BASE, WINDOW, STATE)}
            found.append({kind: len(view) for kind, view in views.items() if view is not None})
    for kind in (BASE, WINDOW, STATE):
        await b.read(ids, kind)
    return found


# --- empty bases ---


async def test_an_empty_base_is_a_part_like_any_other(tmp_path: pathlib.Path) -> None:
    """It is there, it is loaded as nothing and not as a miss, from RAM, from files and after a restart."""
    expected = [{BASE: 0}, {BASE: 0, STATE: PART_BYTES}, {BASE: 0}]
    async with bench(tmp_path) as b:
        made = await recurrent(b, 3, states=[1], tier="kv")
        assert all(b.store.has(saved.name) for saved in made)
        assert await loaded(b, range(3)) == expected
        assert await made[-1].wait_durable()
        await b.store.evict_bytes(1 << 30, ["ram"])
        assert await loaded(b, range(3)) == expected
        await b.settle()
    async with bench(tmp_path) as b:
        assert all(b.store.has(saved.name) for saved in made)
        assert await loaded(b, range(3)) == expected
        assert b.store.statistics().damage == {}
        await b.settle()


async def test_an_empty_part_takes_no_buffer_memory() -> None:
    """Only its head counts against the budget."""
    async with bench() as b:
        buffer = b.store.buffer_nowait(0)
        assert buffer is not None
        assert (buffer.n_bytes, buffer.held_bytes, bytes(buffer.view)) == (0, 0, b"")
        buffer.retain()
        buffer.release()
        buffer.release()
        before = b.store.statistics().arena
        await recurrent(b, 3, states=[])
        after = b.store.statistics().arena
        assert after.made == before.made
        assert after.lost == 0


async def test_tools_read_empty_bases(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvc` verifies them, shows them, and counts them."""
    async with bench(tmp_path) as b:
        await recurrent(b, 3, states=[2], tier="kv")
        await b.settle()
    shown: dict[str, object] = {}
    for command in ("verify", "inspect", "stats", "gc"):
        assert kvc([command, str(tmp_path), "--json"]) == 0
        shown[command] = json.loads(capsys.readouterr().out)
    assert shown["verify"] == {"files": 4, "wrong": []}
    assert sorted(row["payload_bytes"] for row in shown["inspect"]) == [0, 0, 0, PART_BYTES]
    assert (shown["stats"]["nodes"], shown["stats"]["tokens"]) == (3, 3)
    assert shown["gc"]["removed"] == 0
    assert kvc(["inspect", "--tree", str(tmp_path)]) == 0
    assert kvc(["inspect", str(next((tmp_path / "nodes").glob("*.base.kvc")))]) == 0


async def test_a_flipped_bit_in_an_empty_base_s_file_is_found(tmp_path: pathlib.Path) -> None:
    """There is a head to damage, and what hangs behind it goes too."""
    async with bench(tmp_path) as b:
        made = await recurrent(b, 2, states=[1], tier="kv")
        await b.settle()
    path = tmp_path / "nodes" / f"{made[0].name.hex()}.base.kvc"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    async with bench(tmp_path) as b:
        assert not b.store.has(made[0].name)
        assert await loaded(b, range(2)) == []
        await b.settle()


@pytest.mark.parametrize(("tier", "where"), [("ram", "ram"), ("kv", "disk")])
async def test_a_path_to_nothing_goes_with_its_last_state(
    tmp_path: pathlib.Path, tier: str, where: str
) -> None:
    """What an empty base leads to is gone: then it goes, before any base that holds something."""
    async with bench(tmp_path) as b:
        other = await b.save([9], tier=tier)
        path = await recurrent(b, 4, states=[1, 3], tier=tier, anchors=[])
        await b.settle()
        if tier == "kv":
            await b.store.evict_bytes(1 << 30, ["ram"])
        b.clock.now += 1
        await b.store.find(IDENTITY, Prompt.of([0, 1]))
        left = []
        for _ in range(4):
            await b.store.evict_bytes(1, [where])
            await b.settle()
            there = [saved for saved in path if b.store.has(saved.name)]
            left.append([b.store.has(saved.name, STATE) for saved in there])
        assert left == [[False, True, False], [False, True], [False], []]
        assert b.store.has(other.name)


async def test_gc_takes_empty_bases_too(tmp_path: pathlib.Path) -> None:
    """Nothing is immortal because it is small."""
    async with bench(tmp_path) as b:
        await recurrent(b, 4, states=[1, 3], tier="kv")
        await b.settle()
        assert await b.store.gc() == 4
        assert b.store.statistics().n_nodes == 0
        await b.settle()


async def test_spilling_moves_empty_bases(tmp_path: pathlib.Path) -> None:
    """A RAM tier that is full publishes the path before the state."""
    async with bench(tmp_path, ram_bytes=60_000, spill=True) as b:
        for i in range(12):
            saved = await b.save([i, i], kinds=(BASE, STATE), sizes=EMPTY)
            assert saved is not None
        await b.settle()
        for i in range(12):
            assert await loaded(b, [i, i]) == [{BASE: 0, STATE: PART_BYTES}]


# --- parts that come later ---


@pytest.mark.parametrize("kind", [WINDOW, STATE])
@pytest.mark.parametrize("also_base", [False, True])
async def test_a_part_that_comes_later_in_ram(kind: PartKind, also_base: bool) -> None:
    """Alone or with the base that is there already: what is new is added, what is not goes back."""
    async with bench() as b:
        first = await b.save([1])
        assert not b.store.has(first.name, kind)
        used = b.store.statistics().memory_bytes
        again = await b.save([1], kinds=(BASE, kind) if also_base else (kind,))
        assert (again.name, again.stored, again.refusal) == (first.name, True, None)
        assert await loaded(b, [1]) == [{BASE: PART_BYTES, kind: PART_BYTES}]
        assert used < b.store.statistics().memory_bytes < used + 2 * (PART_BYTES + 4096)
        await b.settle()


@pytest.mark.parametrize("kind", [WINDOW, STATE])
@pytest.mark.parametrize("also_base", [False, True])
async def test_a_part_that_comes_later_on_a_file_tier(
    tmp_path: pathlib.Path, kind: PartKind, also_base: bool
) -> None:
    """It becomes a file of its own beside the base's, which is not written again; both survive a restart."""
    kinds = (BASE, kind) if also_base else (kind,)
    async with bench(tmp_path) as b:
        first = await b.save([1], tier="kv")
        child = await b.save([2], first, tier="kv")
        await b.settle()
        base = tmp_path / "nodes" / f"{first.name.hex()}.base.kvc"
        before = os.stat(base)
        again = await b.save([1], tier="kv", kinds=kinds)
        assert await again.wait_durable()
        assert len(again.jobs) == 1
        assert os.stat(base).st_ino == before.st_ino
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        assert await loaded(b, [1, 2]) == [{BASE: PART_BYTES, kind: PART_BYTES}, {BASE: PART_BYTES}]
    async with bench(tmp_path) as b:
        assert b.store.has(child.name)
        assert await loaded(b, [1, 2]) == [{BASE: PART_BYTES, kind: PART_BYTES}, {BASE: PART_BYTES}]
        # And once more, after a restart: the base is only known from its file.
        third = await b.save([1], tier="kv", kinds=(WINDOW, STATE))
        assert await third.wait_durable()
        assert await loaded(b, [1]) == [{BASE: PART_BYTES, WINDOW: PART_BYTES, STATE: PART_BYTES}]
        await b.settle()
    assert kvc(["verify", str(tmp_path)]) == 0


async def test_a_part_that_comes_later_reaches_another_process(tmp_path: pathlib.Path) -> None:
    """Who shares the folder finds it at the next look."""
    async with bench(tmp_path) as a, bench(tmp_path) as b:
        first = await a.save([1], tier="kv")
        await a.store.flush()
        await b.store.housekeeping()
        assert b.store.has(first.name)
        await a.save([1], tier="kv", kinds=(STATE,))
        await a.store.flush()
        await b.store.housekeeping()
        assert b.store.has(first.name, STATE)
        assert await loaded(b, [1]) == [{BASE: PART_BYTES, STATE: PART_BYTES}]


@pytest.mark.parametrize("kind", [WINDOW, STATE])
async def test_what_hangs_on_no_base_is_refused(kind: PartKind) -> None:
    """The base was evicted meanwhile: nothing could be done with the rest, and no node is left behind."""
    async with bench() as b:
        refused = await b.save([1], kinds=(kind,))
        assert (refused.stored, refused.refusal) == (False, Refusal.NO_PARENT)
        assert b.store.statistics().n_nodes == 0
        assert (await b.save([1], kinds=(PartKind.WHOLE,))).stored
        await b.settle()


async def test_a_later_part_without_text_does_not_spoil_matching_by_text(tmp_path: pathlib.Path) -> None:
    """Whichever head is read, only one with the node's own text counts."""
    async with bench(tmp_path) as b:
        await b.save([0, 1, 2], tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        await b.save([0, 1, 2], tier="kv", kinds=(STATE,), text=b"")
        await b.settle()
        await b.save([0, 1, 3], tier="kv")  # reads the head of the one it forks from
        for ids, spelled in (([0, 1, 2], [26 + 1, 2]), ([0, 1, 3], [26 + 1, 3])):
            assert b"".join(pieces(ids)) == b"".join(pieces(spelled))
            match = await b.store.find(IDENTITY, Prompt.of(spelled, pieces(spelled)))
            assert match.ids.tolist() == ids
        await b.settle()
    async with bench(tmp_path) as b:
        match = await b.store.find(IDENTITY, Prompt.of([27, 2], pieces([27, 2])))
        assert match.ids.tolist() == [0, 1, 2]


# --- anchors ---


async def test_windows_and_states_go_each_on_its_own_and_anchors_last(tmp_path: pathlib.Path) -> None:
    """K29: on RAM and on disk; no base goes for them."""
    for tier, where in (("ram", "ram"), ("kv", "disk")):
        async with bench(tmp_path) as b:
            saved = None
            for i in range(4):
                saved = await b.save([i], saved, tier=tier, kinds=(BASE, WINDOW, STATE), anchor=i == 1)
            await b.settle()
            if tier == "kv":
                await b.store.evict_bytes(1 << 30, ["ram"])
            left = []
            for _ in range(8):
                match = await b.store.find(IDENTITY, Prompt.of(range(4)))
                left.append([len(node.parts) - 1 for node in match.nodes])
                await b.store.evict_bytes(1, [where])
            assert [sum(counts) for counts in left[:7]] == [8, 7, 6, 5, 4, 3, 2]
            assert left[6] == [0, 2, 0, 0]
            assert all(counts[1] == 2 for counts in left[:7])
            await b.settle()
            await b.store.gc()


@pytest.mark.parametrize("by_save", [False, True])
@pytest.mark.parametrize("tier", ["ram", "kv"])
async def test_a_node_that_is_there_becomes_an_anchor(
    tmp_path: pathlib.Path, tier: str, by_save: bool
) -> None:
    """K29: saved again as an anchor, or named one; a later save that says nothing does not undo it."""
    async with bench(tmp_path) as b:
        made = [await b.save([i], tier=tier, kinds=(BASE, STATE)) for i in range(3)]
        await b.settle()
        if by_save:
            await b.save([0], tier=tier, anchor=True)
        else:
            assert b.store.set_anchor(made[0].name)
        await b.save([0], tier=tier, kinds=(WINDOW,))
        assert [row["anchor"] for row in b.store.dump() if row["name"] == made[0].name.hex()] == [True]
        await b.settle()
        if tier == "kv":
            await b.store.evict_bytes(1 << 30, ["ram"])
        await b.store.evict_bytes(2 * PART_BYTES, ["ram" if tier == "ram" else "disk"])
        assert [b.store.has(saved.name, STATE) for saved in made] == [True, False, False]
        assert b.store.has(made[0].name, WINDOW)
        assert not b.store.set_anchor(b"?" * 32)
        await b.settle()


async def test_an_anchor_is_one_after_a_restart_if_any_of_its_files_says_so(tmp_path: pathlib.Path) -> None:
    """The base was written before anybody knew; the state's file tells."""
    async with bench(tmp_path) as b:
        await b.save([0], tier="kv")
        await b.settle()
        await b.save([0], tier="kv", kinds=(STATE,), anchor=True)
        await b.settle()
    async with bench(tmp_path) as b:
        assert [row["anchor"] for row in b.store.dump()] == [True]
        assert await b.read([0], STATE) == 1


# --- pins ---


async def test_who_may_pin_little_takes_nothing_from_who_may_pin_much() -> None:
    """K33: two models, two policies, one store."""
    async with bench(ram_bytes=40 * PART_BYTES, pin_fraction=0.25) as b:
        made = [await b.save([i]) for i in range(8)]
        assert all(b.store.pin(saved.name, fraction=0.5) for saved in made[:5])
        assert b.store.pin(made[5].name, fraction=0.03)
        assert b.store.pin(made[6].name, fraction=0.03)
        pinned = {name for _, name, _ in b.store.list_pins()}
        assert pinned == {saved.name for saved in [*made[:5], made[6]]}, "the small share's oldest went"
        assert b.store.statistics().pins_forced == 1
        assert not b.store.pin(made[7].name, fraction=0.0)
        assert len(b.store.list_pins()) == 6


async def test_an_agent_s_pins_stay_within_its_policy_s_share() -> None:
    """K33: more than the store's default where the policy allows it, less where it does not."""
    for fraction, n_pins in ((0.03, 1), (0.6, 6)):
        policy = SavePolicy(min_tokens=0, cold_min_tokens=0, pin_fraction=fraction)
        async with bench(ram_bytes=40 * PART_BYTES, pin_fraction=0.25) as b:
            for i in range(6):
                await b.save([i], reason=SaveReason.AGENT_PREFIX, policy=policy)
            assert b.store.statistics().pins == n_pins


# --- failing files ---


async def test_a_file_larger_than_may_be_is_no_room_and_no_broken_tier(tmp_path: pathlib.Path) -> None:
    """EFBIG: that part stays in RAM; nothing is evicted for it, others are written, the tier stays on."""

    class Limited(Files):
        def set_size(self, fd: int, n_bytes: int) -> None:
            if n_bytes > 2 * PART_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            super().set_size(fd, n_bytes)

    async with bench(tmp_path) as b:
        await b.save([9], tier="kv")
    async with bench(tmp_path, files=Limited(), writer_max_concurrent=0) as b:  # so they are one group
        made = [await b.save([i], tier="kv", size=PART_BYTES * (4 if i == 1 else 1)) for i in range(4)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.store._writer.run_worker)
            await b.store.flush()
            nursery.cancel_scope.cancel()
        assert [saved.jobs[0].outcome for saved in made] == [True, Refusal.TOO_LARGE, True, True]
        assert b.tier().on
        assert b.tier().evictions == 0
        assert await b.read([1]) == 1
        await b.settle()


async def test_a_full_device_does_not_switch_the_tier_off_for_its_journal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hit counts that cannot be written have to wait; what is stored is still served."""
    async with bench(tmp_path) as b:
        await b.save([1], tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])

        def full(self: Files, path: str, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        with monkeypatch.context() as patch:
            patch.setattr(Files, "write_small", full)
            await b.read([1])
            await b.store.flush()
            assert b.tier().on
            assert await b.read([1]) == 1
        await b.settle()


@pytest.mark.parametrize("error", ["damage", "io"])
async def test_a_log_record_pins_no_buffer(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    """Records are kept by handlers; an exception in one would keep frames that look at pooled memory."""

    class Failing(Files):
        fails = False

        def read(self, fd, chunks, offset):
            if self.fails and len(chunks[0]) == PART_BYTES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, chunks, offset)

    files = Failing()
    async with bench(tmp_path, files=files) as b:
        saved = await b.save([1], tier="kv")
        await b.settle()
        await b.store.evict_bytes(1 << 30, ["ram"])
        if error == "io":
            files.fails = True
        else:
            path = tmp_path / "nodes" / f"{saved.name.hex()}.base.kvc"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        with caplog.at_level(logging.INFO):
            assert await b.read([1]) == 0
        assert caplog.records
        assert not any(isinstance(arg, BaseException) for r in caplog.records for arg in r.args or ())
        assert b.store.statistics().arena.lost == 0
        files.fails = False
