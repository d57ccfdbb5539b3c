"""From a slot's memory into the store: new blocks while a prompt is prefilled, the tail at the end.

What to save is planned sync, when a sequence passes a boundary or ends; the nodes' names are known then.
Exporting happens later, between steps, and only if the slot still holds what was planned. What will be gone
by then, the window behind a sliding sequence and the state at a sequence's end, is captured before the next
step. A save that does not happen costs nothing but the chance to reuse it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import trio

from erllama.errors import ErllamaError
from erllama.kvcache.kinds import ROOT_NAME, PartKind, Provenance, SaveReason
from erllama.kvcache.match import Match, MatchedNode
from erllama.kvcache.policy import SavePolicy, cut_blocks
from erllama.kvcache.store import Draft

from .anchors import anchors_of, is_anchor
from .cold import cold_piece
from .heads import pin_head, pin_prefix, reason_of
from .purpose import Purpose
from .saved_names import SavedNames

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray

    from erllama.backend import BackendFacts, Layout
    from erllama.kvcache.arena import Buffer
    from erllama.kvcache.key import Identity

    from .admission import Lanes
    from .cache_link import CacheLink
    from .model_thread import ModelThread
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")
T = TypeVar("T", bound="Hashable")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    anchor: bool
    n_counted: int  # tokens the request counts as its own addition to the store
    captured: dict[PartKind, Buffer] = field(default_factory=dict)  # parts that could not wait

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)


class Saver:
    """Plans and writes the nodes of one model."""

    def __init__(
        self,
        cache: CacheLink,
        facts: BackendFacts,
        lanes: Lanes,
        thread: ModelThread,
        wake: Callable[[], None],
    ) -> None:
        assert facts.layout is not None
        self._cache = cache
        self._layout: Layout = facts.layout
        self._n_batch = facts.n_batch
        self._cold_piece = cold_piece(facts.n_batch) or 1
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
        self._fleeting: deque[PlannedNode] = deque()  # of these, something is gone after the next step
        self._names: Counter[bytes] = Counter()  # of what is planned
        self._places: Counter[tuple[bytes, int, int]] = Counter()  # the same, with slot and generation
        self._arrived = trio.Event()
        self._sizes: dict[int, int] = {}  # tokens of a node → bytes of its export
        self._capturing = trio.Lock()
        self._idle = trio.Event()
        self._idle.set()
        self._changed = trio.Event()  # something planned was written, or given up
        self.saved_names = SavedNames()

    def __repr__(self) -> str:
        return f"<Saver {len(self._planned)} planned>"

    # --- planning: sync ---

    def plan_blocks(self, seq: Sequence) -> None:
        """Queue the full blocks that `seq` has computed since the last call."""
        policy = self._cache.policy
        if seq.saves_refused:
            return
        if seq.n_kv > seq.n_prompt - seq.exact:  # a single row is not what a prompt's pieces are
            due = seq.n_kv - seq.path.end >= self._interval and seq.n_kv % policy.block_tokens == 0
            if due and not seq.exact and policy.gate(SaveReason.CONTINUED, seq.n_kv) is None:
                self._plan(seq, SaveReason.CONTINUED, tail=False)
        elif policy.gate(SaveReason.COLD, seq.n_prompt) is None:
            # What cannot be cut back to where the prompt ends is taken there.
            at_end = seq.n_kv == seq.n_prompt - 1
            self._plan(seq, SaveReason.COLD, tail=not self._layout.cuttable and at_end and not seq.exact)

    @property
    def _interval(self) -> int:
        """Generated tokens after which they are saved; what a window has dropped cannot be any more."""
        policy, window = self._cache.policy, self._layout.window
        if not window:
            return policy.continued_interval
        block = policy.block_tokens
        return min(policy.continued_interval, max(block, window // block * block))

    def plan_end(self, seq: Sequence) -> None:
        """Queue everything that is not stored yet, the tail included: `seq` is about to leave its slot.

        One that has computed nothing has nothing that is not kept where it came from.
        """
        wanted = seq.purpose is Purpose.PIN or self._cache.policy.gate(SaveReason.FINISH, seq.n_kv) is None
        if seq.has_computed and wanted:
            if not seq.exact:  # its prompt's blocks are kept already, and nothing else of it may be
                self._plan(seq, SaveReason.FINISH, tail=True)
            pin_head(self._cache, seq)

    def _plan(self, seq: Sequence, reason: SaveReason, *, tail: bool) -> None:
        path, has, block = seq.path, self._cache.store.has, self._cache.policy.block_tokens
        self._drop_lost(seq)
        anchors = anchors_of(seq, block)
        n = seq.n_kv - seq.n_kv % self._cold_piece if seq.exact else seq.n_kv
        for start, end in cut_blocks(path.end, n, block, tail=tail):
            parent = path.tip or ROOT_NAME
            tokens = np.asarray(seq.ledger[start:end], np.int32)
            name = self._cache.identity_of(seq).node_name(parent, tokens.tobytes())
            path.add(name, end)
            fleeting = self._fleeting_part(seq, start, end)
            anchor = is_anchor(self._layout, start, end, anchors, last=tail and end == seq.n_kv)
            if has(name) and (fleeting is None or has(name, fleeting)):
                if anchor:
                    self._cache.store.set_anchor(name)
                continue
            node = PlannedNode(
                seq=seq,
                slot=seq.slot,
                generation=self._lanes.generation[seq.slot],
                name=name,
                parent=parent,
                start=start,
                tokens=tokens,
                reason=reason_of(seq, start, end, reason),
                provenance=_provenance(seq, end),
                anchor=anchor,
                n_counted=0 if name in self._names or has(name) else len(tokens),
            )
            self._queue(node, fleeting=fleeting is not None)
        self._arrived.set()

    def _queue(self, node: PlannedNode, *, fleeting: bool) -> None:
        node.seq.n_stored += node.n_counted
        self._names[node.name] += 1
        self._places[node.name, node.slot, node.generation] += 1
        self._lanes.reading[node.slot] += 1
        self._planned.append(node)
        if fleeting:
            self._fleeting.append(node)
        self._idle = trio.Event() if self._idle.is_set() else self._idle

    def _drop_lost(self, seq: Sequence) -> None:
        """Forget what is not stored at the end of the sequence's path: nothing can be stored behind it.

        It was evicted, or never saved. What somebody else is about to save may never come, because that one
        may leave first.
        """
        path, place = seq.path, (seq.slot, self._lanes.generation[seq.slot])
        while (
            not self._cache.policy.second_sighting
            and path.tip is not None
            and not (self._cache.store.has(path.tip) or (path.tip, *place) in self._places)
        ):
            path.drop_last()

    def _fleeting_part(self, seq: Sequence, start: int, end: int) -> PartKind | None:
        """What of a block is there now and may be gone after the next step."""
        if self._layout.state:
            return PartKind.STATE if end == seq.n_kv else None
        if self._layout.window and end > seq.n_kv - self._layout.window - self._n_batch:
            return PartKind.WINDOW
        return None

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
            await self.capture()
            try:
                await self._save(node)
            except ErllamaError as refused:
                log.warning("a block of %d tokens was not saved: %s", len(node.tokens), str(refused))
            self._done(node)  # not when cancelled: `drain` begins with it again
        self._idle.set()

    @property
    def must_capture(self) -> bool:
        """Whether something will be gone after the next step."""
        return bool(self._fleeting) or self._capturing.locked()

    async def capture(self) -> None:
        """Take what will be gone after the next step. Cancellation: the rest is taken by the next call."""
        async with self._capturing:
            while self._fleeting:
                node = self._fleeting[0]
                try:
                    await self._capture(node, PartKind.STATE if self._layout.state else PartKind.WINDOW)
                except ErllamaError as refused:
                    log.warning("what ends at token %d was not captured: %s", node.end, str(refused))
                self._fleeting.popleft()

    async def _capture(self, node: PlannedNode, part: PartKind) -> None:
        if not self._is_there(node) or self._cache.store.has(node.name, part):
            return
        place = node.slot, node.start, node.end
        n_bytes = await self._thread.export_bytes(*place, part)
        buffer = self._cache.store.buffer_nowait(n_bytes) if n_bytes else None
        if buffer is None:
            log.debug("%s at token %d is not kept: %s", part.name, node.end, "no room" if n_bytes else "gone")
            return
        try:
            written = await self._thread.export(*place, buffer.view, part)
        except BaseException:
            buffer.release()
            raise
        if written == n_bytes:
            node.captured[part] = buffer
        else:
            buffer.release()

    def _done(self, node: PlannedNode) -> None:
        self._planned.popleft()
        for buffer in node.captured.values():
            buffer.release()
        node.captured.clear()
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
        self._fleeting.clear()
        while self._planned:
            self._done(self._planned[0])
        self._idle.set()

    async def wait_idle(self) -> None:
        """Until nothing is planned any more. Cancellation: harmless."""
        await self._idle.wait()

    def is_saving(self, name: bytes) -> bool:
        """Whether a node of that name is planned or being written."""
        return self._names[name] > 0

    async def wait_for_one(self) -> None:
        """Until one planned node more is written, or given up. Cancellation: harmless."""
        if self._planned:
            await self._changed.wait()

    async def wait_saved(self, name: bytes) -> None:
        """Until the node of that name is written, or given up. Cancellation: harmless."""
        while self.is_saving(name):
            await self._changed.wait()

    async def _save(self, node: PlannedNode) -> None:
        store = self._cache.store
        if store.has(node.name) and node.reason is SaveReason.AGENT_PREFIX:
            pin_prefix(self._cache, node.name)
        if store.has(node.name) and not node.captured:
            return
        # Room for a node is never made by dropping the one it hangs on.
        with self._cache.store.lease(_match_of(self._cache.identity_of(node.seq), node.parent)) as lease:
            if lease.nodes or node.parent == ROOT_NAME or self._cache.policy.second_sighting:
                await self._write(node)

    async def _write(self, node: PlannedNode) -> None:
        base = None
        if not self._cache.store.has(node.name):
            base = await self._base(node)
            if base is None:
                return
        parts = dict(node.captured)  # kept until the node is done: a drain that is cancelled begins again
        for buffer in parts.values():
            buffer.retain()
        if base is not None:
            parts[PartKind.BASE] = base
        saved = await self._cache.store.save(self._draft(node, parts), tier=self._cache.tier)
        if saved.stored:
            self.saved_names.add(node.parent, node.name, len(node.tokens))

    async def _base(self, node: PlannedNode) -> Buffer | None:
        """The exported cells of a node; None if they cannot be had any more."""
        store, n = self._cache.store, len(node.tokens)
        if not self._layout.base:
            return await store.buffer(0)
        if not self._is_there(node):
            return None
        began = time.perf_counter_ns()
        if n not in self._sizes:
            self._sizes[n] = await self._thread.export_bytes(node.slot, node.start, node.end)
        buffer = await store.buffer(self._sizes[n])
        if buffer is None:
            log.info("a block of %d tokens was not saved: no room in RAM", n)
            return None
        n_bytes = 0
        try:
            if self._is_there(node):
                n_bytes = await self._thread.export(node.slot, node.start, node.end, buffer.view)
                store.count_pack(time.perf_counter_ns() - began)
        finally:
            if n_bytes != buffer.n_bytes:
                buffer.release()
        if n_bytes == buffer.n_bytes:
            return buffer
        if n_bytes:
            log.warning("a block of %d tokens changed its size: %d bytes", n, n_bytes)
        return None

    def _is_there(self, node: PlannedNode) -> bool:
        """Whether the slot still holds what was planned."""
        return self._lanes.generation[node.slot] == node.generation

    def _draft(self, node: PlannedNode, parts: dict[PartKind, Buffer]) -> Draft:
        return Draft(
            identity=self._cache.identity_of(node.seq),
            tokens=node.tokens,
            parts=parts,
            parent=node.parent,
            start=node.start,
            text=b"".join(self._cache.pieces(node.tokens.tolist())),
            reason=node.reason,
            provenance=node.provenance,
            anchor=node.anchor,
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


def _provenance(seq: Sequence, end: int) -> Provenance:
    if seq.exact:
        return Provenance.CANONICAL
    return Provenance.PREFILL if end <= seq.n_prompt else Provenance.DECODED


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
