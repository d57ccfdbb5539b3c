"""A reader that does not keep up slows its own request and nobody else's."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from erllama.testing import FakeBackend
from erllama.types import Done, TokenId

from .scenes import alone, ids_of, last, serving


async def test_a_stalled_reader_is_skipped_and_loses_nothing():
    """Its sequence stands still at a full buffer, others finish, and later it gets every token."""
    async with serving(FakeBackend(n_slots=2)) as bench:
        async with bench.stream("slow", seed=1, max_tokens=60, buffer_events=8) as slow:
            await trio.testing.wait_all_tasks_blocked()
            (seq,) = bench.actor.sequences()
            assert len(seq.buffer) == 6
            n_stalled = seq.n_generated
            fast = await bench.complete("fast", seed=2, max_tokens=500)
            assert seq.n_generated == n_stalled
            answer = await last(slow)
        await bench.wait_idle()
    assert ids_of([answer]) == ids_of(await alone(["slow"], seed=1, max_tokens=60))
    assert ids_of([fast]) == ids_of(await alone(["fast"], seed=2, max_tokens=500))


async def test_nobody_waits_behind_a_reader_that_sleeps(autojump_clock):
    """On one slot a lagging sequence makes room after two seconds, and later goes on where it was."""
    async with serving(FakeBackend(n_slots=1)) as bench:
        async with bench.stream("slow", seed=1, max_tokens=60, buffer_events=8) as slow:
            began = trio.current_time()
            fast = await bench.complete("fast", seed=2, max_tokens=50)
            assert 2 <= trio.current_time() - began < 2.1
            assert bench.actor.statistics().n_waiting == 1
            answer = await last(slow)
        await bench.wait_idle()
    assert ids_of([answer]) == ids_of(await alone(["slow"], seed=1, max_tokens=60))
    assert ids_of([fast]) == ids_of(await alone(["fast"], seed=2, max_tokens=50))


async def test_a_trickling_reader_lags_too(autojump_clock):
    """An event a second does not hold the only slot for ever: in 30 s the buffer must get half empty."""
    async with (
        serving(FakeBackend(n_slots=1)) as bench,
        bench.stream("slow", seed=1, max_tokens=60, buffer_events=64) as slow,
        trio.open_nursery() as nursery,
    ):
        await trio.testing.wait_all_tasks_blocked()

        async def trickle() -> None:
            async for _ in slow:
                await trio.sleep(1)

        nursery.start_soon(trickle)
        with trio.fail_after(32):
            await bench.complete("fast", seed=2, max_tokens=50)
        nursery.cancel_scope.cancel()


async def test_a_parked_sequence_can_be_cancelled(autojump_clock):
    """Its reader leaves while it is parked: nothing of it is left."""
    async with serving(FakeBackend(n_slots=1)) as bench:
        async with bench.stream("slow", max_tokens=60, buffer_events=8):
            await bench.complete("fast", max_tokens=5)
            assert bench.actor.statistics().n_waiting == 1
        await bench.wait_idle()
        assert bench.backend.live_samplers == set()


async def test_who_was_parked_comes_before_who_came_later(autojump_clock):
    """Read again, it is first in the queue."""
    order: list[str] = []
    async with (
        serving(FakeBackend(n_slots=1, step_delay_s=0.1)) as bench,
        bench.stream("slow", max_tokens=20, buffer_events=8) as slow,
        trio.open_nursery() as nursery,
    ):

        async def ask(name: str) -> None:
            await bench.complete(name, max_tokens=40)
            order.append(name)

        for name in ("a", "b", "c"):
            nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(4)  # long enough to be parked for "a"
        assert bench.actor.statistics().n_waiting == 3
        await last(slow)
        order.append("slow")
    assert order == ["a", "slow", "b", "c"]


@pytest.mark.parametrize("capacity", [4, 5, 7, 64])
async def test_a_buffer_never_exceeds_its_capacity(capacity: int):
    """Memory is bounded whatever the reader does, Done and held-back text included."""
    worst = 0
    async with (
        serving(FakeBackend(n_slots=2)) as bench,
        bench.stream("s", max_tokens=100, stop="~~~~", buffer_events=capacity) as slow,
    ):
        (seq,) = bench.actor.sequences()
        ids = 0
        async for event in slow:
            await trio.testing.wait_all_tasks_blocked()
            worst = max(worst, len(seq.buffer))
            ids += isinstance(event, TokenId)
    assert ids == 100
    assert capacity - 3 <= worst <= capacity


async def test_cancelling_a_full_stream_fits_too():
    """Even with a full buffer the Done of a cancelled stream is delivered within the capacity."""
    async with serving() as bench, bench.stream("s", max_tokens=100, buffer_events=4) as events:
        await trio.testing.wait_all_tasks_blocked()
        (seq,) = bench.actor.sequences()
        events.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(seq.buffer) <= 4
        assert (await last(events)).finish_reason == "cancelled"


async def test_one_event_read_is_enough_to_go_on(autojump_clock):
    """A reader that takes an event a second gets all of them, in order and without a gap."""
    async with serving() as bench, bench.stream("p", seed=1, max_tokens=20, buffer_events=4) as events:
        ids = []
        async for event in events:
            await trio.sleep(1)
            if isinstance(event, TokenId):
                ids.append(event.id)
            if isinstance(event, Done):
                assert event.completion.generated == ids
    assert [ids] == ids_of(await alone(["p"], seed=1, max_tokens=20))


async def test_a_stalled_reader_gives_its_cells_to_who_gets_on():
    """No cell is free and one reader is stalled: it is computed again later, with the same ids."""
    async with (
        serving(FakeBackend(n_slots=2, n_ctx=400, n_cells=250)) as bench,
        bench.stream("s" * 80, seed=1, max_tokens=100, buffer_events=30) as slow,
    ):
        fast = await bench.complete("f" * 40, seed=2, max_tokens=150)
        assert bench.actor.statistics().n_preempted == 1
        answer = await last(slow)
        await bench.wait_idle()
    assert ids_of([answer]) == ids_of(await alone(["s" * 80], seed=1, max_tokens=100))
    assert ids_of([fast]) == ids_of(await alone(["f" * 40], seed=2, max_tokens=150))


async def test_a_reader_that_left_frees_who_waits():
    """One slot, a stalled reader, one who waits: when the first leaves, the second runs."""
    async with serving() as bench, trio.open_nursery() as nursery:
        async with bench.stream("stalled", max_tokens=500, buffer_events=8):
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(bench.complete, "waits")
            await trio.testing.wait_all_tasks_blocked()
            assert bench.actor.statistics().n_waiting == 1
        await bench.wait_idle()
