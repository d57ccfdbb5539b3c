"""The bounded channel between the engine and one client.

The engine never waits: it asks `has_room` before it plans a sequence, and a stream without room
leaves that sequence out of the step. The client waits in `receive`, and every event it takes may
make the sequence plannable again (`on_room`). A reader *lags* from the moment its buffer is full until it
is half empty. What lies in the buffer is read without a turn of trio's scheduler for each event, for a step
delivers two to every reader; who always finds something takes such a turn every `EVENTS_AT_ONCE` events.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.types import Event

EVENTS_AT_ONCE = 16
EVENTS_PER_STEP = 4  # TokenId, Token, the held-back Token at the end, Done


class Lag(NamedTuple):
    """Seconds since the buffer was full, and since anything was read from it."""

    lagging_s: float
    asleep_s: float


class EventBuffer:
    """Events of one request on their way to its reader."""

    def __init__(self, capacity: int, on_room: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._on_room = on_room
        self._wakeup = trio.lowlevel.ParkingLot()
        self._n_parked = 0
        self._n_at_once = 0  # reads since the reader last let others run
        self._ended = False
        self._error: BaseException | None = None
        self._lagging_since: float | None = None  # trio's clock
        self._last_read = 0.0  # kept while its reader lags

    def __repr__(self) -> str:
        return f"<EventBuffer {len(self._events)}/{self._capacity}{' ended' if self._ended else ''}>"

    def __len__(self) -> int:
        return len(self._events)

    @property
    def has_room(self) -> bool:
        """Whether whatever one step may deliver still fits."""
        return len(self._events) + EVENTS_PER_STEP <= self._capacity

    @property
    def n_steps(self) -> int:
        """How many steps may deliver whatever they have, if nothing is read meanwhile."""
        return (self._capacity - len(self._events)) // EVENTS_PER_STEP

    @property
    def is_lagging(self) -> bool:
        """Whether it was full and is not half empty yet."""
        return self._lagging_since is not None

    def lag(self, now: float) -> Lag | None:
        """How its reader lags; None if it does not."""
        if self._lagging_since is None:
            return None
        return Lag(now - self._lagging_since, now - self._last_read)

    def put_nowait(self, *events: Event) -> None:
        """Deliver, unless the stream has ended; whoever planned the step has checked `has_room`."""
        if self._ended:
            return
        self._events.extend(events)
        if self._lagging_since is None and len(self._events) + EVENTS_PER_STEP > self._capacity:
            self._lagging_since = self._last_read = trio.current_time()
        if self._n_parked:
            self._wakeup.unpark_all()

    def end(self, error: BaseException | None = None) -> None:
        """No more events; after the delivered ones the reader gets `error`, or the end."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake_reader()

    def close(self) -> None:
        """The reader has left: nothing more is delivered, not even what was."""
        self._events.clear()
        self._ended, self._error = True, None
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._n_parked:
            self._wakeup.unpark_all()

    async def receive(self) -> Event:
        """The next event. Raises the error the stream ended with, or `trio.EndOfChannel`.

        Cancellation: noticed by every call; nothing is lost, the next one gets the event. Others run when it
        has to wait, and every `EVENTS_AT_ONCE` events.
        """
        self._n_at_once += 1
        if self._n_at_once > EVENTS_AT_ONCE:
            await trio.lowlevel.checkpoint()
            self._n_at_once = 1
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._ended:
                if self._error is not None:
                    raise copy.copy(self._error)
                raise trio.EndOfChannel
            await self._park()
        event = self._events.popleft()
        n = len(self._events)
        has_caught_up = False
        if self._lagging_since is not None:
            self._last_read = trio.current_time()
            has_caught_up = n <= self._capacity // 2
        if has_caught_up:
            self._lagging_since = None
        if has_caught_up or n + EVENTS_PER_STEP == self._capacity:  # the moment there is room again
            self._on_room()
        return event

    async def receive_all(self) -> list[Event]:
        """Every event that is there, at least one. Raises and cancels as `receive`, nothing is lost."""
        first = await self.receive()
        if not self._events:
            return [first]
        events = [first, *self._events]
        n_before = len(self._events)
        self._events.clear()
        was_full = self._lagging_since is not None or n_before + EVENTS_PER_STEP > self._capacity
        self._lagging_since = None
        if was_full:
            self._on_room()
        return events

    async def _park(self) -> None:
        self._n_parked += 1
        try:
            await self._wakeup.park()
        finally:
            self._n_parked -= 1
        self._n_at_once = 0
