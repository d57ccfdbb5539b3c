"""Setting memory right after a step that did not end well: repair sequence by sequence, else a fresh context.

Rule 1: after an abort each sequence keeps what memory really holds of it, and goes on from there. Where that
is nothing, because its state was in the step, it is admitted again, and with it restored.
Rule 2: the context is rebuilt only after a time-out, a fatal code, an exception or a failed repair. Then
whoever runs fails with the typed reason, and whoever waits goes on with the new context.
Rule 3: KV that was restored and never proven by a step is to blame before its reader is: it is never served
again, and the request starts over without it, once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from erllama.errors import DecodeAborted, ErllamaError

from .memory_ops import NoWindowRoom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .admission import Lanes
    from .cache_link import CacheLink
    from .model_thread import ModelThread
    from .planner import Share
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")


class Recovery:
    """Repairs and rebuilds the memory of one model; `n_rebuilt` counts the fresh contexts."""

    def __init__(self, model_id: str, lanes: Lanes, thread: ModelThread, cache: CacheLink | None) -> None:
        self._model_id = model_id
        self._lanes = lanes
        self._thread = thread
        self._cache = cache
        self.n_rebuilt = 0

    async def repair(self, shares: list[Share]) -> None:
        """Set every sequence of an aborted step to what its memory really holds."""
        sequences = [self._lanes.running[share.slot] for share in shares]
        if self._lanes.has_state:
            for seq in sequences:  # nobody knows how far the state of who leaves now is
                seq.leaves_nothing |= seq.cancelled
            sequences = [seq for seq in sequences if not seq.cancelled]
        if not sequences:
            return
        try:
            kept = await self._thread.cut_to_known([(seq.slot, seq.n_tokens - 1) for seq in sequences])
        except ErllamaError as error:
            await self.rebuild(error)
            return
        for seq, n_kv in zip(sequences, kept, strict=True):
            if seq.exact and seq.n_generated and not seq.cancelled:
                self._lanes.release(seq.fail(_interrupted(seq)))
            elif not seq.cancelled and (seq.exact or (self._lanes.has_state and n_kv < seq.n_kv)):
                self._lanes.release(seq.preempt())
                self._lanes.requeue(seq)
            else:
                seq.rewind(n_kv)

    async def rebuild(
        self, error: ErllamaError, stepping: Iterable[Sequence] = (), *, innocent: bool = False
    ) -> None:
        """A fresh context. Who ran fails with `error`, except those of `stepping` that may start over.

        They may if KV was restored and never proven; if they are `innocent`, all who ran may.

        Raises: `error` where the backend cannot rebuild, and what rebuilding raises; the model is lost then.
        """
        log.error("%s: rebuilding the context after %s", self._model_id, error)
        if isinstance(error, NoWindowRoom):
            self._lanes.sharing.is_off = True
            log.warning(
                "%s: requests no longer share a beginning while they run: n_ctx is too small for as many "
                "windows as n_seq_max; make it larger, or n_seq_max smaller",
                self._model_id,
            )
        for seq in list(self._lanes.running.values()) if innocent else stepping:
            self._start_over(seq, innocent=innocent)
        for slot, seq in list(self._lanes.running.items()):
            if seq.cancelled:
                seq.finish("cancelled", trio.current_time())
            else:
                seq.fail(error)
            self._lanes.release(slot)
        if not self._thread.can_rebuild:
            raise error
        self._lanes.clear_memory()
        self.n_rebuilt += 1
        await self._thread.rebuild()

    def _start_over(self, seq: Sequence, *, innocent: bool) -> None:
        if not innocent and (not seq.unproven or self._cache is None):
            return
        if not innocent and self._cache is not None:
            for name in seq.unproven:
                self._cache.store.quarantine(name, "a decode failed right behind it")
        if not seq.retried and not seq.cancelled and not (seq.exact and seq.n_generated):
            seq.retried = True
            self._lanes.release(seq.preempt())
            self._lanes.requeue(seq)


def _interrupted(seq: Sequence) -> DecodeAborted:
    return DecodeAborted(
        f'{seq.request}: a step was aborted in the middle of an answer with exact="cold"; '
        f"going on would give other bits, ask again"
    )
