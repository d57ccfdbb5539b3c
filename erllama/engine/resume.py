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
from erllama.kvcache.kinds import PartKind

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
        """Whether the store holds more of `seq` than live sequences do. A plain read.

        On a tie the next node may still begin like the prompt; but what a running sequence is about to have
        is not read a second time, and where a session goes on it is not worth a look.
        """
        n_stored = self._cache.store.peek(self._cache.identity, Prompt.of(seq.ledger))[0]
        n_led = self._lanes.n_led(seq)
        if n_led > seq.n_kv or seq.is_sticky:
            return n_stored > n_led
        return n_stored >= seq.n_kv

    async def restore(self, seq: Sequence, stay: int) -> None:
        """Bring into memory what is stored and not there yet, during the `stay`th stay of `seq` in a slot.

        Cancellation: what was imported stays, whole blocks only.
        """
        store = self._cache.store
        prompt = Prompt.of(seq.ledger)
        match = await store.find(self._cache.identity, prompt, resume_key=seq.options.parent_key)
        seq.evidence.saw(match.n_tokens, (), 0)
        if (last := match.partial) is not None:
            n = last.node.start + last.n_tokens
            seq.evidence.saw(n, [*seq.ledger[: last.node.start], *last.node.ids], last.node.end)
        with store.lease(match) as lease:
            for index, node in enumerate(lease.nodes):
                if not _still_wants(seq, stay):
                    return
                last = match.partial if lease.partial and index == len(lease.nodes) - 1 else None
                end = node.end if last is None else node.start + last.n_tokens
                wanted = seq.n_kv, min(end, seq.n_tokens - 1)
                if wanted[1] <= wanted[0]:
                    continue
                if not await self._restore_node(seq, stay, lease, index, wanted):
                    seq.evidence.failed = _still_wants(seq, stay)
                    return
                if wanted[1] == node.end:
                    _note_nodes(seq, match, index)
                lease.release(index)

    async def _restore_node(
        self, seq: Sequence, stay: int, lease: Lease, index: int, wanted: tuple[int, int]
    ) -> bool:
        node = lease.nodes[index]
        data = await lease.load(index)
        if data is None or not _still_wants(seq, stay):
            return False
        n_cells = len(node.ids)  # the scratch sequence needs those of the whole block
        self._lanes.reclaim(n_cells)
        if (free := self._lanes.n_free_cells) is not None and free < n_cells:
            return False
        try:
            with self._lanes.reserving(n_cells):
                arrived = await self._thread.import_(seq.slot, (node.start, node.end), wanted, data)
        except ErllamaError as refused:
            # As text: a log record that kept the exception would keep its frames, and with them the buffer.
            log.warning("restore of %s at %d failed: %s", seq.request, node.start, str(refused))
            if self._thread.is_broken:
                return False
            arrived = False
        if not arrived:
            self._cache.store.quarantine(node.name, "llama.cpp refused the bytes")
            return False
        if not _is_in_slot(seq, stay):
            return False
        seq.restored_to(wanted[1], node.parts[PartKind.BASE])
        seq.unproven.add(node.name)
        return True


def _is_in_slot(seq: Sequence, stay: int) -> bool:
    return seq.phase is Phase.RESTORE and seq.n_admitted == stay


def _still_wants(seq: Sequence, stay: int) -> bool:
    return _is_in_slot(seq, stay) and not seq.cancelled


def _note_nodes(seq: Sequence, match: Match, index: int) -> None:
    """Nodes that lie whole in memory: saves continue behind them."""
    for node in match.nodes[: index + 1]:
        if node.end > seq.path.end:
            seq.path.add(node.name, node.end)
