"""The channel between engine and reader: bounded, loses nothing, wakes both sides."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from erllama.engine.stream import EVENTS_AT_ONCE, EVENTS_PER_STEP, EventBuffer
from erllama.errors import DecodeTimeout, EngineReset
from erllama.testing import cancel_at_every_checkpoint
from erllama.types import Request, TokenId

ME = Request(1, "m")


def event(n: int) -> TokenId:
    """An event that can be told from others."""
    return TokenId(n, ME)


class Rooms:
    """Counts how often the buffer said that it has room again."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> None:
        self.n += 1


def buffer(capacity: int = 8) -> tuple[EventBuffer, Rooms]:
    """A buffer and its counter."""
    rooms = Rooms()
    return EventBuffer(capacity, rooms), rooms


async def test_events_come_in_order_and_then_the_end():
    """What was put is received in order; afterwards EndOfChannel, again and again."""
    b, _ = buffer()
    b.put_nowait(event(1), event(2))
    b.put_nowait(event(3))
    b.end()
    assert [(await b.receive()).id for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(trio.EndOfChannel):
            await b.receive()


async def test_an_error_comes_after_what_was_delivered():
    """The reader gets the events before the failure, then the failure."""
    b, _ = buffer()
    b.put_nowait(event(1))
    b.end(DecodeTimeout("too slow"))
    assert (await b.receive()).id == 1
    with pytest.raises(DecodeTimeout, match="too slow"):
        await b.receive()


async def test_only_the_first_end_counts():
    """A reset that comes first is not overwritten by the cancellation that follows it."""
    b, _ = buffer()
    b.end(EngineReset("reset"))
    b.end()
    b.put_nowait(event(1))
    with pytest.raises(EngineReset):
        await b.receive()


async def test_room_is_for_a_whole_step():
    """A buffer has room while one step's events still fit, not merely one."""
    b, _ = buffer(EVENTS_PER_STEP + 1)
    assert b.has_room
    b.put_nowait(event(1))
    assert b.has_room
    b.put_nowait(event(2))
    assert not b.has_room
    assert repr(b) == f"<EventBuffer 2/{EVENTS_PER_STEP + 1}>"


async def test_room_is_announced_exactly_when_it_comes_back():
    """Reading wakes the engine when there is room again and when the lag ends, not for every event."""
    b, rooms = buffer(10)
    b.put_nowait(*map(event, range(9)))
    assert b.is_lagging
    for n_left, n_rooms in ((8, 0), (7, 0), (6, 1), (5, 2), (4, 2), (3, 2)):
        await b.receive()
        assert (len(b), rooms.n) == (n_left, n_rooms)
    assert not b.is_lagging


async def test_a_waiting_reader_is_woken_by_an_event_and_by_an_end():
    """A parked reader returns as soon as there is something to return."""
    b, _ = buffer()
    got: list[int] = []

    async def read() -> None:
        got.append((await b.receive()).id)
        with pytest.raises(trio.EndOfChannel):
            await b.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        b.put_nowait(event(7))
        await trio.testing.wait_all_tasks_blocked()
        assert got == [7]
        b.end()


async def test_cancelled_reads_lose_nothing():
    """A read cancelled at any of its checkpoints leaves its event to the next read."""
    b, _ = buffer(100)
    got: list[int] = []
    put = 0

    async def produce() -> None:
        nonlocal put
        while True:
            if not len(b):
                b.put_nowait(event(put), event(put + 1))
                put += 2
            await trio.lowlevel.checkpoint()

    async def read_six() -> None:
        for _ in range(6):
            got.append((await b.receive()).id)  # noqa: PERF401  # those before a cancelled read must be there

    async def nothing_lost() -> None:
        assert got == list(range(len(got)))
        assert len(got) + len(b) == put

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        assert await cancel_at_every_checkpoint(read_six, nothing_lost) >= 3
        nursery.cancel_scope.cancel()


async def test_a_cancelled_waiting_read_leaves_the_event_that_comes_later():
    """A reader that gave up waiting does not swallow the next event."""
    b, _ = buffer()
    with trio.move_on_after(0):
        await b.receive()
    b.put_nowait(event(1))
    assert (await b.receive()).id == 1


async def test_a_reader_that_always_finds_something_lets_others_run():
    """What lies in the buffer is read in one go, but nobody waits for a reader that never waits."""
    b, _ = buffer(1000)
    n_turns = 0

    async def other() -> None:
        nonlocal n_turns
        while True:
            await trio.lowlevel.checkpoint()
            n_turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for i in range(20 * EVENTS_AT_ONCE):
            b.put_nowait(event(i))
            assert (await b.receive()).id == i
        assert 14 <= n_turns <= 20
        nursery.cancel_scope.cancel()


async def test_asking_on_and_on_for_the_end_lets_others_run():
    """Nor for one that asks again and again for events that will not come."""
    b, _ = buffer()
    b.end()
    n_asked = 0
    with trio.move_on_after(0.02):
        while True:
            with pytest.raises(trio.EndOfChannel):
                await b.receive()
            n_asked += 1
    assert n_asked >= EVENTS_AT_ONCE


async def test_every_read_notices_a_cancellation():
    """Although most are no turn of the scheduler."""
    b, _ = buffer(100)
    b.put_nowait(*map(event, range(9)))
    for n in range(3):
        assert (await b.receive()).id == n
    with trio.CancelScope() as scope:
        scope.cancel()
        await b.receive()
    assert scope.cancelled_caught
    assert len(b) == 6


class Turns(trio.abc.Instrument):
    """Counts how often the scheduler ran a task."""

    def __init__(self) -> None:
        self.n = 0
        self.task: trio.lowlevel.Task | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        self.n += task is self.task


async def test_a_step_costs_its_reader_one_turn():
    """A reader that waits is woken once for all events of a step."""
    b, _ = buffer(100)
    turns, n_read = Turns(), 0

    async def reader() -> None:
        nonlocal n_read
        turns.task = trio.lowlevel.current_task()
        while True:
            await b.receive()
            n_read += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(turns)
        for step in range(1, 31):
            b.put_nowait(event(step), event(step))
            await trio.testing.wait_all_tasks_blocked()
            assert (n_read, turns.n) == (2 * step, step)
        trio.lowlevel.remove_instrument(turns)
        nursery.cancel_scope.cancel()
