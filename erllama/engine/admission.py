"""Who waits, who runs, and in which lane: the slots and cells of one context.

Sync and pure of I/O. Slots are handed out lowest first, because llama.cpp batches separate streams
only where their ids are adjacent. Cells are counted by what sequences already hold or are known to
need, plus a small reserve for decoding, never by `max_tokens`: when room runs out after all, the
youngest sequence gives up its cells and waits again. A sequence whose reader lags for long is
parked when somebody waits for its place, and queued again when it has been read.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erllama.backend import BackendFacts

    from .pace import Pace
    from .sequence import Sequence

ASLEEP_S = 2.0  # a reader with a full buffer that reads nothing for so long gives its place to who waits
SLOW_S = 30.0  # one that reads, but never gets its buffer half empty, after so long
DECODE_RESERVE = 32  # cells kept for each running sequence to grow into


class Lanes:
    """The waiting queue and the running sequences."""

    def __init__(self, facts: BackendFacts) -> None:
        self._n_cells = None if facts.streams_separate else facts.n_cells
        self._free = list(range(facts.n_slots))
        heapq.heapify(self._free)
        self.n_slots = facts.n_slots
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.parked: list[Sequence] = []
        self.to_drop: list[int] = []  # lanes whose memory is stale; cleared before the next step
        self._crowded = False  # somebody gave way: who came back at once would be sent away again, for ever

    def __repr__(self) -> str:
        return f"<Lanes {len(self.running)}/{self.n_slots} running, {len(self.waiting)} waiting>"

    @property
    def n_available(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    @property
    def n_free_cells(self) -> int | None:
        """Cells nobody holds; None where every sequence has its own."""
        if self._n_cells is None:
            return None
        return self._n_cells - sum(s.n_kv for s in self.running.values())

    def can_admit(self, seq: Sequence) -> bool:
        """Whether `seq` could run now."""
        if not self._free or self._crowded:
            return False
        if self._n_cells is None or not self.running:
            return True
        return sum(map(_need, self.running.values())) + _need(seq) <= self._n_cells

    def can_admit_behind(self, seq: Sequence) -> bool:
        """Whether `seq` could run now, together with everybody who waits before it."""
        if len(self.waiting) >= len(self._free) or self._crowded:
            return False
        if self._n_cells is None or not (self.running or self.waiting):
            return True
        known = (*self.running.values(), *self.waiting, seq)
        return sum(map(_need, known)) <= self._n_cells

    def admit_next(self, now: float) -> Sequence | None:
        """Give the head of the queue a slot if it fits; strictly first come, first served."""
        if not self.waiting or not self.can_admit(self.waiting[0]):
            return None
        seq = self.waiting.popleft()
        slot = heapq.heappop(self._free)
        self.running[slot] = seq
        seq.admit(slot, now)
        return seq

    def release(self, slot: int | None) -> None:
        """A lane was given up; its memory is dropped before it is used again."""
        if slot is not None:
            self._crowded = False
            del self.running[slot]
            heapq.heappush(self._free, slot)
            self.to_drop.append(slot)

    def preempt_youngest(self) -> Sequence | None:
        """Send the youngest running sequence back to the head of the queue; None if only one runs.

        One whose reader does not keep up goes first: its cells serve nobody's progress.
        """
        if len(self.running) < 2:
            return None
        seq = max(self.running.values(), key=lambda s: (not s.buffer.has_room, s.arrival))
        self.release(seq.preempt())
        self._crowded = True
        self.waiting.appendleft(seq)
        return seq

    def park_lagging(self, now: float, pace: Pace) -> Sequence | None:
        """If the head of the queue waits for a place, take it from a reader that has lagged too long."""
        found = self._next_to_park(now, pace)
        if found is None or found[0] > 0:
            return None
        seq = found[1]
        self.release(seq.preempt())
        self.parked.append(seq)
        return seq

    def park_in_s(self, now: float, pace: Pace) -> float:
        """Seconds until `park_lagging` has something to do, if nothing else happens."""
        found = self._next_to_park(now, pace)
        return math.inf if found is None else found[0]

    def _next_to_park(self, now: float, pace: Pace) -> tuple[float, Sequence] | None:
        """Who is parked next, and in how many seconds; None if nobody waits for a place or nobody lags.

        Parking costs computing everything again, so patience grows with what that takes; a reader that
        reads at all gets much more of it than one that sleeps.
        """
        if not self.waiting or self.can_admit(self.waiting[0]):
            return None
        left: list[tuple[float, int, Sequence]] = []
        for seq in self.running.values():
            lag = seq.buffer.lag(now)
            if lag is not None:
                again_s = pace.predict_s(0, seq.n_tokens)
                asleep = max(ASLEEP_S, 2 * again_s) - lag.asleep_s
                slow = max(SLOW_S, 10 * again_s) - lag.lagging_s
                left.append((min(asleep, slow), seq.arrival, seq))
        if not left:
            return None
        in_s, _, seq = min(left)
        return in_s, seq

    def unpark(self) -> None:
        """Queue parked sequences whose readers caught up, before everybody who came later."""
        for seq in [s for s in self.parked if not s.buffer.is_lagging]:
            self.parked.remove(seq)
            self.waiting.append(seq)
            self.waiting = deque(sorted(self.waiting, key=lambda s: s.arrival))

    def idle(self) -> list[Sequence]:
        """Everybody who does not run."""
        return [*self.waiting, *self.parked]

    def withdraw(self, seq: Sequence) -> None:
        """Take a sequence that does not run out of wherever it waits."""
        (self.parked if seq in self.parked else self.waiting).remove(seq)


def _need(seq: Sequence) -> int:
    return seq.n_tokens + min(DECODE_RESERVE, max(seq.n_left, 0))
