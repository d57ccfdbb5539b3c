"""What a request waits for between its slot and its prefill: what the store gives back, and proofs.

All of it happens in tasks beside the loop; others run meanwhile, unless the request runs alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from erllama.errors import ErllamaError

from .state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from .admission import Lanes
    from .cold import ColdPromise
    from .errands import Errands
    from .hits import HitBook
    from .model_thread import ModelThread
    from .parent_hint import ParentHint
    from .resume import Resumer
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")


class Arrivals:
    """Brings the admitted requests of one model to where their prefill begins."""

    def __init__(
        self,
        model_id: str,
        lanes: Lanes,
        thread: ModelThread,
        errands: Errands,
        cold: ColdPromise,
        hits: HitBook,
        wake: Callable[[], None],
        resumer: Resumer | None,
        hint: ParentHint | None,
    ) -> None:
        """`wake` asks the actor for another turn; without `resumer` and `hint` nothing is stored."""
        self._model_id = model_id
        self._lanes = lanes
        self._thread = thread
        self._errands = errands
        self._cold = cold
        self._hits = hits
        self._wake = wake
        self._resumer = resumer
        self._hint = hint
        self.tried_for: Sequence | None = None  # who waits for the cold trial that runs

    def __repr__(self) -> str:
        return f"<Arrivals of {self._model_id}>"

    def start(self, seq: Sequence, nursery: trio.Nursery) -> None:
        """`seq` was just admitted."""
        if seq.exact and (refusal := self._cold.refusal(self._model_id)) is not None:
            self._lanes.release(seq.fail(refusal))  # it was queued before anybody knew
            return
        # What an older sequence has or is computing is taken from there; the store is read once for all.
        if self._needs_store(seq) or (seq.exact and not self._cold.known):
            self._errands.begin()
            nursery.start_soon(self._restore, seq, seq.n_admitted)
        else:
            self._arrived(seq)

    def _needs_store(self, seq: Sequence) -> bool:
        if self._resumer is None or self._hint is None or seq.options.cache == "off":
            return False
        if seq.continues and seq.n_kv and seq.times.restored is None:
            return False  # it goes on from what its session holds, whatever else there is
        return self._hint.is_pending(seq) or self._resumer.has_more(seq)

    async def _restore(self, seq: Sequence, stay: int) -> None:
        def waits() -> bool:
            return seq.phase is Phase.RESTORE and seq.n_admitted == stay

        try:
            if seq.cancelled or not waits():
                return  # before this task had its first turn
            if seq.exact and not self._cold.known and (error := await self._probe_cold(seq)) is not None:
                if waits() and not seq.cancelled:
                    self._lanes.release(seq.fail(error))
                return
            if seq.exact and waits():
                seq.times.admitted = trio.current_time()  # it waited for that; nothing of it was restored
            if self._hint is not None and self._hint.is_pending(seq):
                with self._errands.elsewhere():
                    await self._hint.wait(seq)
            if waits() and self._resumer is not None and seq.options.cache != "off":
                await self._resumer.restore(seq, stay)
        finally:
            if waits():
                self._arrived(seq)
            self._errands.end()
            self._wake()

    async def _probe_cold(self, seq: Sequence) -> ErllamaError | None:
        """Find out whether exact="cold" holds; why it cannot be offered, if it cannot. Nobody else runs.

        Should `seq` be cancelled, the trial is aborted; who asks next has it made anew. Until its call is
        over `seq` keeps its slot: the next call would lower the flag.
        """
        log.info('%s: trying whether exact="cold" holds; this is done once', self._model_id)
        self.tried_for = seq
        try:
            with self._errands.elsewhere():
                self._cold.learned(await self._thread.probe_cold())
        except ErllamaError as error:
            return error
        finally:
            self.tried_for = None
        return self._cold.refusal(self._model_id)

    def _arrived(self, seq: Sequence) -> None:
        self._hits.admitted(seq)
        seq.restored(trio.current_time())
