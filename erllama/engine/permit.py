"""The compute permit: CPU threads in flight, shared fairly by all models of this process.

Two contexts that compute at once with more threads than there are cores slow each other down by
a factor of 4 to 100, because ggml's threads spin at barriers. So a step takes as many tokens from
the permit as it has threads, and waiters are served strictly in order. Model threads wait here, not
the event loop; nothing in this file knows trio.

Rule 1: whoever waits can be told to give up, from any thread.
Rule 2: a holder that is past the time it asked for no longer counts: it is stuck, and others had better
compute beside it than not at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from erllama.options import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ticket:
    """One model's place at the permit; used for one computation at a time."""

    def __init__(self, permit: ComputePermit) -> None:
        self._permit = permit
        self._given_up = False
        self._n = 0
        self._due = 0.0

    @contextmanager
    def held(self, n_wanted: int, *, at_most_s: float | None = None) -> Iterator[bool]:
        """Hold `n_wanted` tokens (at most all there are) for the block; False if it was given up instead.

        Blocks the calling thread. `at_most_s`: how long the block should take; None: as long as it likes.
        """
        self._n = min(n_wanted, self._permit.n_tokens)
        granted = self._permit._wait_for(self, at_most_s)
        try:
            yield granted
        finally:
            if granted:
                self._permit._give_back(self)

    def give_up(self) -> None:
        """Whoever waits with this ticket, now or next, stops waiting. Any thread."""
        self._permit._give_up(self)

    def renew(self) -> None:
        """Forget an earlier `give_up`. Any thread."""
        self._given_up = False


class ComputePermit:
    """A counting semaphore with first-come-first-served order and requests of any size."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._holding: set[Ticket] = set()

    def __repr__(self) -> str:
        return f"<ComputePermit {self.n_free}/{self.n_tokens} free, {len(self._waiting)} waiting>"

    @property
    def n_free(self) -> int:
        """Tokens that nobody holds, or only somebody who is overdue."""
        now = time.monotonic()
        return self.n_tokens - sum(ticket._n for ticket in self._holding if ticket._due > now)

    def ticket(self) -> Ticket:
        """A place at this permit."""
        return Ticket(self)

    def _wait_for(self, ticket: Ticket, at_most_s: float | None) -> bool:
        with self._changed:
            if not (self._waiting or ticket._given_up) and self.n_free >= ticket._n:
                self._grant(ticket, at_most_s)
                return True
            self._waiting.append(ticket)
            try:
                while not ticket._given_up:
                    if self._waiting[0] is ticket and self.n_free >= ticket._n:
                        self._grant(ticket, at_most_s)
                        return True
                    self._changed.wait(self._next_due_s())
                return False
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _grant(self, ticket: Ticket, at_most_s: float | None) -> None:
        ticket._due = float("inf") if at_most_s is None else time.monotonic() + at_most_s
        self._holding.add(ticket)

    def _next_due_s(self) -> float | None:
        """Seconds until a holder is overdue; None if none ever is."""
        due = min((ticket._due for ticket in self._holding), default=float("inf"))
        return None if due == float("inf") else max(0.001, due - time.monotonic())

    def _give_back(self, ticket: Ticket) -> None:
        with self._changed:
            self._holding.discard(ticket)
            if self._waiting:
                self._changed.notify_all()

    def _give_up(self, ticket: Ticket) -> None:
        with self._changed:
            ticket._given_up = True
            self._changed.notify_all()


PROCESS_PERMIT = ComputePermit(usable_cpus())
