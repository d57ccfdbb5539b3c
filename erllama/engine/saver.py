"""From a slot's memory into the store: new blocks while a prompt is prefilled, the tail at the end.

What to save is planned sync, when a sequence passes a boundary or ends; the nodes' names are known then.
Exporting happens later, between steps, and only if the slot still holds what was planned. A save that does
not happen costs nothing but the chance to reuse it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import trio

from erllama.errors import ErllamaError
from erllama.kvcache.kinds import ROOT_NAME, PartKind, Provenance, SaveReason
from erllama.kvcache.match import Match, MatchedNode
from erllama.kvcache.policy import SavePolicy, cut_blocks
from erllama.kvcache.store import Draft

from .heads import pin_head, pin_prefix, reason_of
from .purpose import Purpose
from .saved_names import SavedNames

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray

    from erllama.kvcache.key import Identity

    from .admission import Lanes
    from .cache_link import CacheLink
    from .model_thread import ModelThread
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")
T = TypeVar("T", bound="Hashable")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node to export from a slot, computed by `seq`, which may be over."""

    seq: Sequence
    slot: int
    generation: int
    name: bytes
    parent: bytes
    start: int
    tokens: NDArray[np.int32]
    reason: SaveReason
    provenance: Provenance
    n_counted: int  # tokens the request counts as its own addition to the store

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
        # Lengths are gated here, by whole histories; the rest of the policy is the store's.
        self._kept = SavePolicy(
            min_tokens=0,
            cold_min_tokens=0,
            second_sighting=cache.policy.second_sighting,
            ttl_s=cache.policy.ttl_s,
            pin_fraction=cache.policy.pin_fraction,
        )
        self._planned: deque[PlannedNode] = deque()
        self._names: Counter[bytes] = Counter()  # of what is planned
        self._places: Counter[tuple[bytes, int, int]] = Counter()  # the same, with slot and generation
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
        if seq.saves_refused:
            return
        if seq.n_kv > seq.n_prompt:
            due = seq.n_kv - seq.path.end >= policy.continued_interval
            if due and policy.gate(SaveReason.CONTINUED, seq.n_kv) is None:
                self._plan(seq, SaveReason.CONTINUED, tail=False)
        elif policy.gate(SaveReason.COLD, seq.n_prompt) is None:
            self._plan(seq, SaveReason.COLD, tail=False)

    def plan_end(self, seq: Sequence) -> None:
        """Queue everything that is not stored yet, the tail included: `seq` is about to leave its slot.

        One that has computed nothing has nothing that is not kept where it came from.
        """
        wanted = seq.purpose is Purpose.PIN or self._cache.policy.gate(SaveReason.FINISH, seq.n_kv) is None
        if seq.has_computed and wanted:
            self._plan(seq, SaveReason.FINISH, tail=True)
            pin_head(self._cache.store, seq)

    def _plan(self, seq: Sequence, reason: SaveReason, *, tail: bool) -> None:
        identity, path = self._cache.identity, seq.path
        place = seq.slot, self._lanes.generation[seq.slot]
        # Evicted or never saved: nothing can be stored behind it. What somebody else is about to save may
        # never come, because that one may leave first.
        while (
            not self._cache.policy.second_sighting
            and path.tip is not None
            and not (self._cache.store.has(path.tip) or (path.tip, *place) in self._places)
        ):
            path.drop_last()
        has = self._cache.store.has
        for start, end in cut_blocks(path.end, seq.n_kv, self._cache.policy.block_tokens, tail=tail):
            parent = path.tip or ROOT_NAME
            tokens = np.asarray(seq.ledger[start:end], np.int32)
            name = identity.node_name(parent, tokens.tobytes())
            path.add(name, end)
            if has(name):
                continue
            node = PlannedNode(
                seq=seq,
                slot=seq.slot,
                generation=place[1],
                name=name,
                parent=parent,
                start=start,
                tokens=tokens,
                reason=reason_of(seq, start, end, reason),
                provenance=Provenance.PREFILL if end <= seq.n_prompt else Provenance.DECODED,
                n_counted=0 if name in self._names else len(tokens),
            )
            seq.n_stored += node.n_counted
            self._names[name] += 1
            self._places[name, *place] += 1
            self._lanes.reading[seq.slot] += 1
            self._planned.append(node)
            self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._arrived.set()

    # --- writing ---

    async def run(self) -> None:
        """Export and store what is planned, in order, until cancelled."""
        while True:
            await self.drain()
            self._arrived = trio.Event()
            await self._arrived.wait()

    async def drain(self) -> None:
        """Export and store everything planned so far. One task at a time."""
        while self._planned:
            node = self._planned[0]
            try:
                await self._save(node)
            except ErllamaError as refused:
                log.warning("a block of %d tokens was not saved: %s", len(node.tokens), str(refused))
            self._done(node)  # not when cancelled: `drain` begins with it again
        self._idle.set()

    def _done(self, node: PlannedNode) -> None:
        self._planned.popleft()
        if not self._cache.store.has(node.name):
            node.seq.n_stored -= node.n_counted
            node.seq.saves_refused |= self._is_there(node)
        _count_down(self._names, node.name)
        _count_down(self._places, (node.name, node.slot, node.generation))
        _count_down(self._lanes.reading, node.slot)
        self._changed.set()
        self._changed = trio.Event()
        self._wake()

    def give_up(self) -> None:
        """The model is gone: nothing more will be saved, and nobody waits for it any longer."""
        while self._planned:
            self._done(self._planned[0])
        self._idle.set()

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
        # Room for a node is never made by dropping the one it hangs on.
        with self._cache.store.lease(_match_of(self._cache.identity, node.parent)) as lease:
            if lease.nodes or node.parent == ROOT_NAME or self._cache.policy.second_sighting:
                await self._export(node)

    async def _export(self, node: PlannedNode) -> None:
        store = self._cache.store
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
            policy=self._kept,
        )


def _match_of(identity: Identity, name: bytes) -> Match:
    """One node as something that can be leased."""
    node = MatchedNode(
        name=name,
        start=0,
        ids=np.zeros(0, np.int32),
        n_bytes=0,
        by_bytes=False,
        provenance=Provenance.PREFILL,
        parts={},
    )
    nodes = () if name == ROOT_NAME else (node,)
    return Match(identity=identity, nodes=nodes, partial=None, token_pos=None, byte_pos=0)


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
