"""Tasks beside the step loop that are about to want the model's thread: the loop lets them go first.

Without this a request that comes back from RAM would wait for two steps of others: one that is planned while
its task has not begun, and one that is planned while its blocks are imported.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_S = 0.05  # that others wait for one step: an import takes less, and one of many calls goes on behind it


class Errands:
    """Counts those of one model: `n`."""

    def __init__(self) -> None:
        self.n = 0
        self._none = trio.Event()
        self._none.set()

    def __repr__(self) -> str:
        return f"<Errands {self.n}>"

    def begin(self) -> None:
        """A task was started, or goes on."""
        self.n += 1
        if self._none.is_set():
            self._none = trio.Event()

    def end(self) -> None:
        """It is done, or waits for something else than the thread."""
        self.n -= 1
        if not self.n:
            self._none.set()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """While a task waits for a file, for room or for others: the loop goes on without it."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    async def settle(self) -> None:
        """Wait until there are none, for `MOST_S` at most. Cancellation: harmless."""
        with trio.move_on_after(MOST_S):
            while self.n:
                await self._none.wait()
