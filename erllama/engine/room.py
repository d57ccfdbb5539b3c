"""Room for those who run: who can go on with how many cells, and who gives way when cells run out.

Rule 1: a full cache is never an error to a client: the youngest sequence waits and is computed again.
Rule 2: residents that are being saved hold their cells until they are, but not for ever.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import trio

from .planner import PIECE, Chunks, Share, lacks_cells
from .state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from .admission import Lanes
    from .opened import Opened
    from .sequence import Sequence
    from .tally import Tally

log = logging.getLogger("erllama.engine")
SAVE_PATIENCE_S = 1.0  # how long others stand still so that what a resident holds can be saved


class Going(NamedTuple):
    """Who can go on, and how many cells they may take; None: as many as they like."""

    ready: list[Sequence]
    n_cells: int | None


class Room:
    """The cells of one model's running sequences. Sync, owned by its actor."""

    def __init__(
        self,
        opened: Opened,
        lanes: Lanes,
        tally: Tally,
        wake: Callable[[], None],
        end: Callable[[Sequence], None],
    ) -> None:
        """`wake` asks for another turn, `end` ends a sequence that has no room even alone."""
        self._model_id = opened.model_id
        self._lanes = lanes
        self._n_batch = opened.facts.n_batch
        self._tally = tally
        self._wake = wake
        self._end = end
        self._following: set[Sequence] = set()  # they wait for an older one that computes the same prompt
        self._alone: Sequence | None = None  # who starts over because memory refused it
        self.chunks = Chunks.of(opened.options.prefill_chunk_size, opened.facts.n_batch)
        if opened.facts.layout is not None and not opened.facts.layout.cuttable:
            # Others take a beginning whole or not at all: larger pieces would pass by where they could.
            self.chunks = self.chunks._replace(alone=self.chunks.beside)
        self.squeeze: int | None = None  # a smaller chunk after a refused step
        self.stalled_since: float | None = None  # nobody goes on until residents are saved, and leave

    def __repr__(self) -> str:
        return f"<Room of {self._model_id}{'' if self.stalled_since is None else ', stalled'}>"

    def patience_s(self, now: float) -> float:
        """Seconds until those who stand still go on, if nothing else happens."""
        return math.inf if self.stalled_since is None else self.stalled_since + SAVE_PATIENCE_S - now

    def going(self) -> Going:
        """Who can go on as things are."""
        return Going(self._ready(), self._limit(self._lanes.n_free_cells))

    def make(self, now: float) -> Going:
        """Share what is computed already and free cells for the rest: of residents, then of the youngest."""
        self._following = self._lanes.sharing.share_running(now)
        ready, most = self._ready(), self.chunks.alone
        wanted = min(sum([min(most, s.n_tokens - s.n_kv) for s in ready]), self._n_batch)
        n_free = self._lanes.reclaim(wanted)
        while lacks_cells(ready, self._limit(n_free)):
            if self._lanes.is_saving:
                self._stall(now)
                return self.going()
            if not self._preempt():
                break
            n_free = self._lanes.reclaim(len(self._ready()))
            # Who was waited for may have been the one to go.
            self._following = self._lanes.sharing.share_running(now)
            ready = self._ready()
        return Going(ready, self._limit(n_free))

    def refused(self, shares: list[Share]) -> bool:
        """The model refused a step for lack of cells, and nothing changed: ask for less, then for fewer.

        False: cells will be free when a resident is saved.
        """
        if self._lanes.drop_resident():
            return True
        if self._lanes.is_saving:
            self._stall(trio.current_time())
            return False
        largest = max(shares, key=lambda share: share.n)
        if self._lanes.runs_alone:  # in an empty memory, and other pieces would have other bits
            self._end(self._lanes.running[largest.slot])
        elif largest.n > PIECE:
            self.squeeze = max(PIECE, largest.n // 2 // PIECE * PIECE)
        elif not self._preempt():
            self._none_for_one(self._lanes.running[largest.slot])
        return True

    def _ready(self) -> list[Sequence]:
        """Who can go on: its memory is settled, and its reader keeps up.

        The reader of one that runs alone is not waited for when others wait for its end.
        """
        others_wait = bool(self._lanes.waiting)
        return [
            s
            for s in self._lanes.running.values()
            if s.phase is not Phase.RESTORE
            and (s.buffer.has_room or (s.exact and others_wait))
            and s not in self._following
        ]

    def _limit(self, n_free: int | None) -> int | None:
        # Nobody can make room for the only one that runs: the model itself says when it is full.
        return None if len(self._lanes.running) == 1 else n_free

    def _stall(self, now: float) -> None:
        if self.stalled_since is None:
            self.stalled_since = now
        elif now - self.stalled_since >= SAVE_PATIENCE_S:
            self._lanes.drop_resident(unsaved=True)
            self.stalled_since = None
            self._wake()

    def _preempt(self) -> bool:
        seq = self._lanes.preempt_youngest(trio.current_time())
        if seq is None:
            return False
        self._tally.n_preempted += 1
        log.info("%s: preempted %s, no cell is free", self._model_id, seq.request)
        return True

    def _none_for_one(self, seq: Sequence) -> None:
        """Memory refuses a lone sequence that fits by every count: compute it once more from nothing."""
        log.warning("%s: memory has no room for %s alone", self._model_id, seq)
        if self._alone is not seq:
            self._alone = seq
            self._lanes.release(seq.preempt())
            self._lanes.requeue(seq)
            return
        self._alone = None
        self._end(seq)
