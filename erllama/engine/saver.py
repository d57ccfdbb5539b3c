"""From a slot's memory into the store: new blocks while a prompt is prefilled, the tail at the end.

What to save is planned sync, when a sequence passes a boundary or ends; the nodes' names are known then.
Exporting happens later, between steps, and only if the slot still holds what was planned. A save that does
not happen costs nothing but the chance to reuse it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import trio

from erllama.errors import ErllamaError
from erllama.kvcache.kinds import ROOT_NAME, PartKind, Provenance, SaveReason
from erllama.kvcache.policy import cut_blocks
from erllama.kvcache.store import Draft

from .heads import pin_head, pin_prefix, reason_of
from .purpose import Purpose
from .saved_names import SavedNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .admission import Lanes
    from .cache_link import CacheLink
    from .model_thread import ModelThread
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node to export from a slot."""

    slot: int
    generation: int
    name: bytes
    parent: bytes
    start: int
    tokens: NDArray[np.int32]
    reason: SaveReason
    provenance: Provenance

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)


class Saver:
    """Plans and writes the nodes of one model."""

    def __init__(self, cache: CacheLink, lanes: Lanes, thread: ModelThread, wake: Callable[[], None]) -> None:
        self._cache = cache
        self._lanes = lanes
        self._thread = thread
        self._wake = wake
        self._planned: deque[PlannedNode] = deque()
        self._names: Counter[bytes] = Counter()  # of what is planned
        self._arrived = trio.Event()
        self._sizes: dict[int, int] = {}  # tokens of a node → bytes of its export
        self._idle = trio.Event()
        self._idle.set()
        self._changed = trio.Event()  # something planned was written, or given up
        self.saved_names = SavedNames(cache.identity)

    def __repr__(self) -> str:
        return f"<Saver {len(self._planned)} planned>"

    # --- planning: sync ---

    def plan_blocks(self, seq: Sequence) -> None:
        """Queue the full blocks that `seq` has computed since the last call."""
        policy = self._cache.policy
        decoding = seq.n_kv > seq.n_prompt
        if decoding:
            if seq.n_kv - seq.path.end < policy.continued_interval or policy.min_tokens == math.inf:
                return
            self._plan(seq, SaveReason.CONTINUED, tail=False)
        elif policy.gate(SaveReason.COLD, seq.n_prompt) is None:
            self._plan(seq, SaveReason.COLD, tail=False)

    def plan_end(self, seq: Sequence) -> None:
        """Queue everything that is not stored yet, the tail included: `seq` is about to end."""
        if seq.purpose is Purpose.PIN or self._cache.policy.gate(SaveReason.FINISH, seq.n_kv) is None:
            self._plan(seq, SaveReason.FINISH, tail=True)
            pin_head(self._cache.store, seq)

    def _plan(self, seq: Sequence, reason: SaveReason, *, tail: bool) -> None:
        identity, path = self._cache.identity, seq.path
        while path.tip is not None and not (self._cache.store.has(path.tip) or path.tip in self._names):
            path.drop_last()  # evicted, or never saved: nothing can be stored behind it
        for start, end in cut_blocks(path.end, seq.n_kv, self._cache.policy.block_tokens, tail=tail):
            parent = path.tip or ROOT_NAME
            tokens = np.asarray(seq.ledger[start:end], np.int32)
            node = PlannedNode(
                slot=seq.slot,
                generation=self._lanes.generation[seq.slot],
                name=identity.node_name(parent, tokens.tobytes()),
                parent=parent,
                start=start,
                tokens=tokens,
                reason=reason_of(seq, start, end, reason),
                provenance=Provenance.PREFILL if end <= seq.n_prompt else Provenance.DECODED,
            )
            path.add(node.name, end)
            if self._cache.store.has(node.name):
                continue
            seq.n_stored += end - start
            self._names[node.name] += 1
            self._lanes.reading[seq.slot] += 1
            self._planned.append(node)
            self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._arrived.set()

    # --- writing ---

    async def run(self) -> None:
        """Export and store what is planned, in order, until cancelled."""
        while True:
            await self.drain()
            self._idle.set()
            self._arrived = trio.Event()
            await self._arrived.wait()

    async def drain(self) -> None:
        """Export and store everything planned so far. One task at a time."""
        while self._planned:
            node = self._planned[0]
            try:
                await self._save(node)
            except ErllamaError as refused:
                log.warning("a block of %d tokens was not saved: %s", len(node.tokens), refused)
            self._done(node)  # not when cancelled: `drain` begins with it again

    def _done(self, node: PlannedNode) -> None:
        self._planned.popleft()
        self._names[node.name] -= 1
        self._names += Counter()  # drops what is zero
        self._lanes.reading[node.slot] -= 1
        self._changed.set()
        self._changed = trio.Event()
        self._wake()

    async def wait_idle(self) -> None:
        """Until nothing is planned any more. Cancellation: harmless."""
        await self._idle.wait()

    def is_saving(self, name: bytes) -> bool:
        """Whether a node of that name is planned or being written."""
        return self._names[name] > 0

    async def wait_saved(self, name: bytes) -> None:
        """Until the node of that name is written, or given up. Cancellation: harmless."""
        while self.is_saving(name):
            await self._changed.wait()

    async def _save(self, node: PlannedNode) -> None:
        store = self._cache.store
        if store.has(node.name) and node.reason is SaveReason.AGENT_PREFIX:
            pin_prefix(store, node.name)
        if store.has(node.name) or not self._is_there(node):
            return
        began = time.perf_counter_ns()
        n = len(node.tokens)
        if n not in self._sizes:
            self._sizes[n] = await self._thread.export_bytes(node.slot, node.start, node.end)
        buffer = await store.buffer(self._sizes[n])
        if buffer is None:
            log.info("a block of %d tokens was not saved: no room in RAM", n)
            return
        try:
            if not self._is_there(node):
                return
            buffer.retain()
            n_bytes = await self._thread.export(node.slot, node.start, node.end, buffer.view)
            store.count_pack(time.perf_counter_ns() - began)
            if n_bytes != buffer.n_bytes:
                log.warning("a block of %d tokens changed its size: %d bytes", n, n_bytes)
                return
            saved = await store.save(self._draft(node, buffer), tier=self._cache.tier)
            if saved.stored:
                self.saved_names.add(node.parent, node.name, n)
        finally:
            buffer.release()

    def _is_there(self, node: PlannedNode) -> bool:
        """Whether the slot still holds what was planned."""
        return self._lanes.generation[node.slot] == node.generation

    def _draft(self, node: PlannedNode, buffer: object) -> Draft:
        return Draft(
            identity=self._cache.identity,
            tokens=node.tokens,
            parts={PartKind.BASE: buffer},  # type: ignore[dict-item]  # a pooled buffer of the store's own
            parent=node.parent,
            start=node.start,
            text=b"".join(self._cache.pieces(node.tokens.tolist())),
            reason=node.reason,
            provenance=node.provenance,
        )
