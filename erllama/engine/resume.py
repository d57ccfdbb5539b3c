"""From the store back into a sequence's memory: the longest stored beginning, block after block.

Interval map: [0, n_kv) shared with a live sequence | [n_kv, n_stored) restored here | the rest is prefilled.
The last known token is never restored: it is a row of its own, in warm and cold runs alike.

A restore is an offer, never a condition: whatever goes wrong ends it where it is, and the rest is computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from erllama.errors import ErllamaError
from erllama.kvcache.key import Prompt

from .state import Phase

if TYPE_CHECKING:
    from erllama.kvcache.match import Lease, Match

    from .admission import Lanes
    from .cache_link import CacheLink
    from .model_thread import ModelThread
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")


class Resumer:
    """Restores sequences of one model. Its task runs beside the step loop; imports go between steps."""

    def __init__(self, cache: CacheLink, lanes: Lanes, thread: ModelThread) -> None:
        self._cache = cache
        self._lanes = lanes
        self._thread = thread

    def has_more(self, seq: Sequence) -> bool:
        """Whether the store holds more of `seq` than live sequences do. A plain read."""
        n_live = max(seq.n_kv, self._lanes.n_led(seq))
        n_whole = self._cache.store.peek(self._cache.identity, Prompt.of(seq.ledger))[0]
        # A further node may share some tokens; that is not worth a look where a session goes on.
        return n_whole > n_live if seq.is_sticky else n_whole >= n_live

    async def restore(self, seq: Sequence) -> None:
        """Bring into memory what is stored and not there yet. Does nothing once `seq` lost its slot.

        Cancellation: what was imported stays, whole blocks only.
        """
        generation = self._lanes.generation[seq.slot]
        store = self._cache.store
        match = await store.find(self._cache.identity, Prompt.of(seq.ledger))
        seq.evidence.saw(match.n_tokens, (), 0)
        if (last := match.partial) is not None:
            n = last.node.start + last.n_tokens
            seq.evidence.saw(n, [*seq.ledger[: last.node.start], *last.node.ids], last.node.end)
        with store.lease(match) as lease:
            for index, node in enumerate(lease.nodes):
                last = match.partial if lease.partial and index == len(lease.nodes) - 1 else None
                end = node.end if last is None else node.start + last.n_tokens
                wanted = seq.n_kv, min(end, seq.n_tokens - 1)
                if wanted[1] <= wanted[0]:
                    continue
                if not await self._restore_node(seq, generation, lease, index, wanted):
                    seq.evidence.failed = self._still_wants(seq, generation)
                    return
                if wanted[1] == node.end:
                    self._note_node(seq, match, index)
                lease.release(index)

    async def _restore_node(
        self, seq: Sequence, generation: int, lease: Lease, index: int, wanted: tuple[int, int]
    ) -> bool:
        node = lease.nodes[index]
        data = await lease.load(index)
        if data is None or not self._still_wants(seq, generation):
            return False
        n_cells = len(node.ids)  # the scratch sequence needs those of the whole block
        self._lanes.reclaim(n_cells)
        if (free := self._lanes.n_free_cells) is not None and free < n_cells:
            return False
        try:
            arrived = await self._thread.import_(seq.slot, (node.start, node.end), wanted, data)
        except ErllamaError as refused:
            log.warning("restore of %s at %d failed: %s", seq.request, node.start, refused)
            arrived = False
        if not self._still_wants(seq, generation):
            return False
        if not arrived:
            self._cache.store.quarantine(node.name, "llama.cpp refused the bytes")
            return False
        seq.restored_to(wanted[1], next(iter(node.parts.values())))
        return True

    def _still_wants(self, seq: Sequence, generation: int) -> bool:
        return (
            seq.phase is Phase.RESTORE
            and not seq.cancelled
            and self._lanes.generation[seq.slot] == generation
        )

    @staticmethod
    def _note_node(seq: Sequence, match: Match, index: int) -> None:
        """The node lies whole in memory: saves continue behind it, unless they already do."""
        for node in match.nodes[: index + 1]:
            if node.start == seq.path.end:
                seq.path.add(node.name, node.end)
