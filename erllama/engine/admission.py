"""Who waits, who runs, and in which lane: the slots and cells of one context.

Sync and pure of I/O: decisions about memory are put into `ops` and done before the next native call.
Slots are handed out lowest first, because llama.cpp batches separate streams only where their ids are
adjacent. Cells are counted by what sequences already hold or are known to need, plus a small reserve for
decoding, never by `max_tokens`, and shared ones once.

Where memory can be kept (`Layout`), a sequence that is over stays in its cells as a *resident* until
somebody needs the room, and whoever comes with the same beginning shares it (see `sharing`). A session's
next turn takes its pinned resident over, slot and all (see `sessions`). When room runs out, residents go
first, the longest unused one before others and pins last; then the youngest running sequence gives up its
slot and waits again: it is saved and leaves a resident like everybody else, which goes when the save is
done. A sequence whose reader lags for long is parked when somebody waits for its place, and queued again
when it has been read.

A request with `exact="cold"` waits until nobody runs and runs alone, in an empty memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from .cells import Cells, n_distinct
from .memory_ops import Clear, Cut, MemoryOp, Share
from .node_path import NodePath
from .purpose import Purpose
from .resident import Resident, n_common
from .sessions import admitted_as, by_worth, goes_on, pin_of, sessions_waiting
from .sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from erllama.backend import BackendFacts

    from .pace import Pace
    from .sequence import Sequence
    from .sessions import Session

ASLEEP_S = 2.0  # a reader with a full buffer that reads nothing for so long gives its place to who waits
SLOW_S = 30.0  # one that reads, but never gets its buffer half empty, after so long
DECODE_RESERVE = 32  # cells kept for each running sequence to grow into


class Lanes:
    """The waiting queue, the running sequences and the residents."""

    def __init__(self, facts: BackendFacts, save: Callable[[Sequence], None] = lambda _: None) -> None:
        self._save = save  # plans to save what a sequence has computed, before it gives way
        self._layout = facts.layout
        shared_cells = not facts.streams_separate and (facts.layout is None or facts.layout.base)
        self._n_cells = facts.n_cells if shared_cells else None
        self._empty = list(range(facts.n_slots))
        self.n_slots = facts.n_slots
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.parked: list[Sequence] = []
        self.residents: dict[int, Resident] = {}
        self.generation: Counter[int] = Counter()  # of a slot: changes when what it holds is given up
        self.reading: Counter[int] = Counter()  # saves that still have to read a slot
        self._n_reserved = 0  # cells that calls in flight are about to fill
        self._ops: list[MemoryOp] = []
        self.sharing = Sharing(facts, self.running, self.residents, lambda op: self._ops.append(op))
        self._crowded = False  # somebody gave way: who came back at once would be sent away again, for ever

    def __repr__(self) -> str:
        return f"<Lanes {len(self.running)}/{self.n_slots} running, {len(self.waiting)} waiting>"

    @property
    def has_state(self) -> bool:
        """Whether something exists only at a sequence's end."""
        return self._layout is not None and self._layout.state

    def take_ops(self) -> list[MemoryOp]:
        """What is to be done to memory before anything else; the caller does it."""
        ops, self._ops = self._ops, []
        return ops

    @property
    def n_available(self) -> int:
        """Slots no request owns."""
        return self.n_slots - len(self.running)

    @property
    def n_free_cells(self) -> int | None:
        """Cells nobody holds or is about to fill; None where every sequence has its own."""
        if self._n_cells is None:
            return None
        return self._n_cells - self._n_reserved - n_distinct([holder.cells for holder in self._holders()])

    @contextmanager
    def reserving(self, n: int) -> Iterator[None]:
        """Count `n` cells as taken while a call that fills them is in flight."""
        self._n_reserved += n
        try:
            yield
        finally:
            self._n_reserved -= n

    def _holders(self) -> list[Resident | Sequence]:
        return [*self.residents.values(), *self.running.values()]

    # --- admission ---

    def can_admit(self, seq: Sequence) -> bool:
        """Whether `seq` could run now; residents are not in its way."""
        if not self.n_available or self._crowded:
            return False
        if self.running and (seq.exact or self.runs_alone):
            return False
        if self._n_cells is None or not self.running:
            return True
        held = n_distinct(s.cells for s in self.running.values())
        growth = sum(_need(s) - s.n_kv for s in self.running.values())
        lacking = held + growth + _need(seq) - self._n_cells
        if lacking <= 0 or self.sharing.is_off:
            return lacking <= 0
        return lacking <= max(self.sharing.n_shared(seq, s) for s in self.running.values())

    @property
    def runs_alone(self) -> bool:
        """Whether who runs must stay alone; nobody is let in beside it, so it is the only one."""
        return len(self.running) == 1 and next(iter(self.running.values())).exact

    def is_alone(self, seq: Sequence) -> bool:
        """Whether nobody else holds anything."""
        return not self.residents and list(self.running.values()) == [seq]

    def is_exclusive(self, seq: Sequence) -> bool:
        """Whether `seq` and whoever is there before it cannot run together, however many slots there are."""
        return any(other.exact for other in (seq, *self.running.values(), *self.waiting))

    def can_admit_behind(self, seq: Sequence) -> bool:
        """Whether `seq` could run now, together with everybody who waits before it."""
        if len(self.waiting) >= self.n_available or self._crowded or self.runs_alone:
            return False
        if seq.exact or any(other.exact for other in self.waiting):
            return not self.running and not self.waiting
        if self._n_cells is None or not (self.running or self.waiting):
            return True
        known = (*self.running.values(), *self.waiting, seq)
        return sum(map(_need, known)) <= self._n_cells or (not self.waiting and self.can_admit(seq))

    def admit_next(self, now: float) -> Sequence | None:
        """Give the head of the queue a slot if it fits; first come, first served.

        Only where no slot can be had but those of sessions that wait behind it, one of these goes first.
        """
        if not self.waiting or not self.can_admit(self.waiting[0]):
            return None
        head = self.waiting[0]
        if head.exact:
            return head if self._admit_alone(head, now) else None
        if self._try_admit(head, now):
            return head
        if not self.n_pinned:
            return None
        for seq in [
            s for s in self.waiting if s is not head and self._pin_for(s) is not None and not s.exact
        ]:
            pin = self._continued_pin(seq, self._best_source(seq)[1])
            if pin is None:  # its session's slot is free for who comes first
                return head if self._try_admit(head, now) else None
            if self.can_admit(seq) and self._resume_pin(seq, pin, now):
                return seq
        return None

    def _try_admit(self, seq: Sequence, now: float) -> bool:
        source, n = self._best_source(seq)
        if (pin := self._continued_pin(seq, n)) is not None:
            return self._resume_pin(seq, pin, now)
        slot = self._take_slot(source)
        if slot is None:
            return False  # every free slot is still being saved, or a waiting session's
        self.waiting.remove(seq)
        shared, path = Cells(), NodePath()
        if source is not None:
            seq.evidence.saw(n, source.ledger, source.n_kv)
            shared.adopt(source.cells, n)
            path = source.path.up_to(n)
            self._ops.append(Cut(slot, n) if slot == source.slot else Share(source.slot, slot, 0, n))
        if slot in self.residents:
            del self.residents[slot]
            self.generation[slot] += 1
        self.running[slot] = seq
        seq.admit(slot, now, shared, path)
        if source is not None:
            seq.unproven |= source.unproven
        return True

    def _admit_alone(self, seq: Sequence, now: float) -> bool:
        """Nobody runs; once all residents are saved, memory is emptied for `seq`."""
        if self.is_saving:
            return False
        for resident in list(self.residents.values()):
            self._forget(resident)
        self._ops = [Clear()]  # whatever else was to be done is done with that
        slot = heapq.heappop(self._empty)
        self.waiting.remove(seq)
        self.running[slot] = seq
        seq.admit(slot, now)
        return True

    # --- sessions ---

    @property
    def n_pinned(self) -> int:
        """Slots held for sessions."""
        return sum(r.session is not None for r in self.residents.values())

    @property
    def n_pinned_idle(self) -> int:
        """Those whose session has no turn waiting: they may be taken back."""
        waiting = sessions_waiting(self.waiting)
        return sum(r.session is not None and r.session not in waiting for r in self.residents.values())

    def pin(self, session: Session | None) -> Resident | None:
        """The session's pin."""
        return pin_of(self.residents.values(), session)

    def _pin_for(self, seq: Sequence) -> Resident | None:
        """What a turn may take over. One that keeps nothing leaves its session as it is."""
        return self.pin(seq.session) if seq.options.cache == "on" else None

    def _continued_pin(self, seq: Sequence, n_elsewhere: int) -> Resident | None:
        """The pin that `seq` goes on from. If it does not, or others hold more of it, the pin is ended."""
        pin = self._pin_for(seq)
        if pin is None:
            return None
        n = self.sharing.n_shared(seq, pin)
        if goes_on(pin, seq, n) and (n >= n_elsewhere or seq.purpose is Purpose.CONTINUE):
            return pin
        pin.session_id = None
        return None

    def _resume_pin(self, seq: Sequence, pin: Resident, now: float) -> bool:
        """Let `seq` run on where its session's last turn ended."""
        slot, n = pin.slot, self.sharing.n_shared(seq, pin)
        if n < pin.n_kv:
            if self.reading[slot]:
                return False  # what will be cut off is still being saved
            self.generation[slot] += 1
        self.waiting.remove(seq)
        seq.evidence.saw(n, pin.ledger, pin.n_kv)
        shared = Cells()
        shared.adopt(pin.cells, n)
        self._ops.append(Cut(slot, n))
        del self.residents[slot]
        self.running[slot] = seq
        seq.admit(slot, now, shared, pin.path.up_to(n), kind=admitted_as(seq))
        seq.unproven |= pin.unproven
        return True

    def n_live(self, tokens: list[int], salt: bytes = b"") -> int:
        """How many of `tokens`, from the first on, some sequence under `salt` holds."""
        layout = self._layout
        if layout is None:
            return 0
        return max(
            (
                layout.cut(h.n_kv, n_common(tokens, np.asarray(h.ledger[: h.n_kv], np.int32)))
                for h in self._holders()
                if h.shareable and h.salt == salt
            ),
            default=0,
        )

    def forget_session(self, session: Session | None, *, keep_cells: bool) -> bool:
        """End a session's pin; False if there was none. `keep_cells`: others may still share them.

        Memory stays as it is until `drop_unwanted`, so this may be called while a step runs.
        """
        pin = self.pin(session)
        if pin is None:
            return False
        pin.session_id, pin.unwanted = None, not keep_cells
        return True

    def drop_unwanted(self) -> None:
        """Free the cells of sessions that were reset."""
        for resident in [r for r in self.residents.values() if r.unwanted]:
            self._forget(resident)

    def _best_source(self, seq: Sequence) -> tuple[Resident | Sequence | None, int]:
        """Who holds the longest beginning of `seq`, and how much of it; its last token is always computed."""
        best: tuple[Resident | Sequence | None, int] = (None, 0)
        for holder in self._givers():
            n = self.sharing.n_shared(seq, holder)
            if n > best[1]:
                best = holder, n
        return best

    def _givers(self) -> list[Resident | Sequence]:
        """Who can give of what it holds; where nothing can be shared, who can be gone on from by anybody."""
        if not self.sharing.is_off:
            return self._holders()
        return [r for r in self.residents.values() if not self.reading[r.slot] and r.session is None]

    def _take_slot(self, source: Resident | Sequence | None) -> int | None:
        """An empty slot, else the least worthy resident's; the source's own is given as it is."""
        if source is not None and self.sharing.is_off:
            return source.slot
        if self._empty:
            return heapq.heappop(self._empty)
        waiting = sessions_waiting(self.waiting)
        free = [r for r in self.residents.values() if not self.reading[r.slot] and r.session not in waiting]
        victim = min(free, key=by_worth(waiting, source), default=None)
        if victim is None or victim is source:
            return None if victim is None else victim.slot
        self._forget(victim)
        return heapq.heappop(self._empty)

    # --- giving up ---

    def release(self, slot: int | None, resident: Resident | None = None) -> None:
        """A lane was given up. What `resident` describes stays in its cells; without it they are freed.

        A call in flight may still add to the slot (an import; a step that is aborted): that is cut off.
        """
        if slot is None:
            return
        self._crowded = False
        gone = self.running.pop(slot)
        stays = resident is not None and self._layout is not None and resident.n_kv > 0
        self.sharing.left(gone, resident if stays else None)
        if resident is not None and stays:
            self.forget_session(resident.session, keep_cells=True)  # one pin per session
            self.residents[slot] = resident
            self._ops.append(Cut(slot, resident.n_kv))
        else:
            self._vacate(slot)

    def cut_back(self, seq: Sequence, n: int) -> None:
        """A restore of `seq` that failed leaves it with [0, n)."""
        self._ops.append(Cut(seq.slot, n))
        seq.lost(n)

    def _forget(self, resident: Resident) -> None:
        del self.residents[resident.slot]
        self._vacate(resident.slot)

    def _vacate(self, slot: int) -> None:
        self.generation[slot] += 1
        heapq.heappush(self._empty, slot)
        self._ops.append(Cut(slot, 0))

    def reclaim(self, n_wanted: int) -> int | None:
        """Free cells of residents until `n_wanted` are free, longest unused first; returns `n_free_cells`."""
        while (free := self.n_free_cells) is not None and free < n_wanted:
            if not self.drop_resident():
                break
        return free

    @property
    def is_saving(self) -> bool:
        """Whether cells will be free as soon as residents are saved."""
        return any(self.reading[slot] for slot in self.residents)

    def drop_resident(self, *, unsaved: bool = False) -> bool:
        """Free the cells of the least worthy resident; False if there is none.

        One that is still being saved stays, unless `unsaved`.
        """
        idle = [r for r in self.residents.values() if unsaved or not self.reading[r.slot]]
        if idle:
            self._forget(min(idle, key=by_worth(sessions_waiting(self.waiting))))
        return bool(idle)

    def preempt_youngest(self, now: float) -> Sequence | None:
        """Send the youngest running sequence back to the head of the queue; None if only one runs.

        One whose reader does not keep up goes first: its cells serve nobody's progress.
        """
        if len(self.running) < 2:
            return None
        seq = max(self.running.values(), key=lambda s: (not s.buffer.has_room, s.arrival))
        self._set_aside(seq, now)
        self._crowded = True
        self.requeue(seq)
        return seq

    def _set_aside(self, seq: Sequence, now: float) -> None:
        """It gives its slot up; what it has computed is saved, and stays until its cells are needed."""
        resident = None
        if seq.options.cache == "on" and self.can_stay(seq):
            self._save(seq)
            resident = Resident.of(seq, now)
        self.release(seq.preempt(), resident)

    def can_stay(self, seq: Sequence) -> bool:
        """Whether what `seq` holds is at a legal place, so that others may go on from it."""
        return self._layout is not None and (self._layout.cuttable or not seq.is_restoring)

    def requeue(self, seq: Sequence) -> None:
        """Wait again, before everybody who came later."""
        self.waiting = deque(sorted([*self.waiting, seq], key=lambda s: s.arrival))

    def park_lagging(self, now: float, pace: Pace) -> Sequence | None:
        """If the head of the queue waits for a place, take it from a reader that has lagged too long."""
        found = self._next_to_park(now, pace)
        if found is None or found[0] > 0:
            return None
        seq = found[1]
        self._set_aside(seq, now)
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
            if lag is not None and not seq.exact:  # computed again, its bits would be others
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
            self.requeue(seq)

    def idle(self) -> list[Sequence]:
        """Everybody who does not run."""
        return [*self.waiting, *self.parked]

    def withdraw(self, seq: Sequence) -> None:
        """Take a sequence that does not run out of wherever it waits."""
        (self.parked if seq in self.parked else self.waiting).remove(seq)

    def clear_memory(self) -> None:
        """The context was rebuilt: nothing is in memory any more."""
        for resident in list(self.residents.values()):
            self._forget(resident)
        self._ops.clear()


def _need(seq: Sequence) -> int:
    return seq.n_tokens + min(DECODE_RESERVE, max(seq.n_left, 0))
