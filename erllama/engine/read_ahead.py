"""Blocks on their way from the store, in order: some are read while others are imported.

not asked for | being read, or there | imported, and given back
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from erllama.kvcache.match import Lease

    from .errands import Errands
    from .restore_plan import Piece

N_ALONE = 3  # blocks from files: one that is imported, two that are read meanwhile
N_AT_ONCE = 3  # reads of one restore that run: others have files to read and write, too
MOST_BYTES = 128 << 20  # at a time, and in one import, during which nobody computes: some 25 ms


class Reading:
    """One block; `data` is None if it is not to be had, or not there yet."""

    def __init__(self, piece: Piece, n_bytes: int, *, is_file: bool) -> None:
        self.piece, self.n_bytes, self.is_file = piece, n_bytes, is_file
        self.data: memoryview | None = None
        self.done = trio.Event()

    async def run(self, lease: Lease) -> None:
        """Read it. Cancellation: leaves nothing behind."""
        self.data = await lease.load(self.piece.index)
        self.done.set()

    async def run_within(self, reads: trio.CapacityLimiter, lease: Lease) -> None:
        """The same, when one of `reads` is free."""
        async with reads:
            await self.run(lease)

    def let_go(self) -> None:
        """Nobody may look at a buffer that is given back."""
        if self.data is not None:
            self.data.release()


class ReadAhead:
    """The blocks of one restore. Its readings run in `nursery`; `let_go` when that has ended."""

    def __init__(
        self, lease: Lease, pieces: Iterable[Piece], errands: Errands, nursery: trio.Nursery
    ) -> None:
        self._lease, self._errands, self._nursery = lease, errands, nursery
        self._todo, self._ahead = deque(pieces), deque[Reading]()
        self._reads = trio.CapacityLimiter(N_AT_ONCE)
        self._most = len(self._todo)  # from files at a time; fewer once RAM had no room for them

    @property
    def first(self) -> Piece | None:
        """The next one; None when all have been imported."""
        return self._ahead[0].piece if self._ahead else None

    @property
    def is_one_by_one(self) -> bool:
        """Whether there is nothing left to do without but the next block itself."""
        return self._most == 1

    async def read(self, *, others_run: bool) -> None:
        """Wait for the next block; where others run, with one import a step, for all that were begun."""
        await self._begin(self._most if others_run else min(self._most, N_ALONE))
        await self._wait_for(self._ahead if others_run else [*self._ahead][:1])

    async def _begin(self, most: int) -> None:
        """What is in RAM costs nothing to hold, unless RAM is scarce: copies there must be free to go."""
        n_bytes = sum(reading.n_bytes for reading in self._ahead)
        n_files = sum(reading.is_file for reading in self._ahead)
        while self._todo and n_files < most and n_bytes < MOST_BYTES and not (most == 1 and self._ahead):
            piece = self._todo.popleft()
            is_file = not self._lease.is_in_ram(piece.index)
            reading = Reading(piece, self._lease.n_bytes(piece.index), is_file=is_file)
            self._ahead.append(reading)
            n_bytes += reading.n_bytes
            n_files += is_file
            if is_file:
                self._nursery.start_soon(reading.run_within, self._reads, self._lease)
            else:
                await reading.run(self._lease)

    def ready(self) -> list[Reading]:
        """What has come, from the next one on, and one call may import; empty if that is not to be had."""
        ready: list[Reading] = []
        n_bytes = 0
        for reading in self._ahead:
            n_bytes += reading.n_bytes
            if reading.data is None or (ready and n_bytes > MOST_BYTES):
                break
            ready.append(reading)
        return ready

    def imported(self, n: int) -> Iterator[Piece]:
        """Forget the next `n`; each may be released from the lease."""
        for _ in range(n):
            reading = self._ahead.popleft()
            reading.let_go()
            yield reading.piece

    async def start_over(self) -> None:
        """RAM had no room for the next one: hold none, and read fewer at a time from now on."""
        await self._wait_for(self._ahead)
        self.let_go()
        self._most = max(1, min(self._most, len(self._ahead)) // 2)
        for reading in self._ahead:
            self._lease.unload(reading.piece.index)
        self._todo.extendleft(reversed([reading.piece for reading in self._ahead]))
        self._ahead.clear()

    async def _wait_for(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            if not reading.done.is_set():
                with self._errands.elsewhere():
                    await reading.done.wait()

    def let_go(self) -> None:
        """Look at none of them any more. Idempotent."""
        for reading in self._ahead:
            reading.let_go()
