"""From the store back into a sequence's memory: the longest stored beginning, block after block.

Interval map: [0, n_kv) shared with a live sequence | [n_kv, plan.end) restored here | the rest is prefilled.
The last known token is never restored: it is a row of its own, in warm and cold runs alike.

A restore is an offer, never a condition: whatever goes wrong ends it where it is, and the rest is computed.
Where memory can be cut anywhere each block counts as soon as it is there. Elsewhere the slot is at no legal
place until everything has arrived, so all of it counts at once, or nothing: then what is damaged is not found
a second time, and the next best place is tried.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from erllama.errors import ErllamaError
from erllama.kvcache.key import Prompt
from erllama.kvcache.kinds import PartKind

from .bare import bare_errors
from .cold import cold_piece
from .model_thread import Saved
from .read_ahead import ReadAhead
from .restore_plan import Piece, RestorePlan, StoredNode, plan_restore
from .spelling import Spelling
from .state import Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from erllama.backend import BackendFacts, Layout
    from erllama.kvcache.match import Lease, Match

    from .admission import Lanes
    from .cache_link import CacheLink
    from .errands import Errands
    from .model_thread import ModelThread
    from .sequence import Sequence

    Part = tuple[Piece, memoryview]
    WaitForASave = Callable[[], Awaitable[None]]

log = logging.getLogger("erllama.engine")
SAVE_PATIENCE_S = 2.0  # for one save of what holds the cells that are wanted
ROOM_PATIENCE_S = 2.0  # for RAM that other restores and saves hold, from one block of ours to the next
MAX_TRIES = 8  # each finds less than the one before


class Resumer:
    """Restores sequences of one model. Its task runs beside the step loop; imports go between steps."""

    def __init__(
        self,
        cache: CacheLink,
        facts: BackendFacts,
        lanes: Lanes,
        thread: ModelThread,
        errands: Errands,
        wait_for_a_save: WaitForASave,
    ) -> None:
        """`wait_for_a_save` returns when one of the saves under way is over."""
        assert facts.layout is not None
        self._wait_for_a_save = wait_for_a_save
        self._cache = cache
        self._layout: Layout = facts.layout
        self._grid = cold_piece(facts.n_batch) or 1
        self._spelling = Spelling(cache, facts, lanes)
        self._lanes = lanes
        self._thread = thread
        self._errands = errands

    def has_more(self, seq: Sequence) -> bool:
        """Whether the store holds more of `seq` than live sequences do. A plain read.

        On a tie the next node may still begin like the prompt; but what a running sequence is about to have
        is not read a second time, and where a session goes on it is not worth a look.
        """
        n_led = self._lanes.sharing.n_led(seq)
        if n_led > seq.n_kv or seq.is_sticky:
            return self._spelling.is_longer(seq, n_led, or_equal=False) or self._spelling.gains(seq)
        return self._spelling.is_longer(seq, seq.n_kv, or_equal=True)

    def n_stored(self, ids: list[int], *, exact: bool) -> int:
        """How many of `ids`, from the first on, a request could have brought back. A plain read."""
        path = self._cache.store.path(self._cache.identity_for(exact=exact), Prompt.of(ids))
        nodes = [StoredNode.whole(node.start, node.end, node.parts) for node in path]
        plan = plan_restore(nodes, self._layout, 0, len(ids), self._grid if exact else 1)
        return 0 if plan is None else plan.end

    async def restore(self, seq: Sequence, stay: int) -> None:
        """Bring into memory what is stored and not there yet, during the `stay`th stay of `seq` in a slot.

        Cancellation: what was imported stays, whole blocks only.
        """
        for _ in range(MAX_TRIES):
            if not await self._try(seq, stay):
                return

    async def _try(self, seq: Sequence, stay: int) -> bool:
        """One look-up and one restore; True if another may find something else."""
        match = await self._spelling.find(seq, lambda: _still_wants(seq, stay))
        _note_reach(seq, match)
        with self._cache.store.lease(match) as lease:
            plan = self._plan(seq, match, lease)
            if plan is None or not _still_wants(seq, stay):
                return False
            restore = _Restore(
                seq,
                stay,
                lease,
                plan,
                self._cache,
                self._layout,
                self._lanes,
                self._thread,
                self._errands,
                self._wait_for_a_save,
            )
            done = await restore.run()
        seq.evidence.failed = not done and _still_wants(seq, stay)
        return seq.evidence.failed and restore.found_damage

    def _plan(self, seq: Sequence, match: Match, lease: Lease) -> RestorePlan | None:
        nodes = [StoredNode.whole(node.start, node.end, node.parts) for node in lease.nodes]
        if lease.partial:
            last = match.partial
            assert last is not None
            node = last.node
            nodes[-1] = StoredNode(node.start, node.end, node.parts, node.start + last.n_tokens)
        grid = self._grid if seq.exact else 1
        return plan_restore(nodes, self._layout, seq.n_kv, seq.n_tokens - 1, grid)


class _Restore:
    """One plan being carried out."""

    def __init__(
        self,
        seq: Sequence,
        stay: int,
        lease: Lease,
        plan: RestorePlan,
        cache: CacheLink,
        layout: Layout,
        lanes: Lanes,
        thread: ModelThread,
        errands: Errands,
        wait_for_a_save: WaitForASave,
    ) -> None:
        self._errands = errands
        self._wait_for_a_save = wait_for_a_save
        self._seq, self._stay, self._lease, self._plan = seq, stay, lease, plan
        self._cache, self._layout, self._lanes, self._thread = cache, layout, lanes, thread
        # Without a legal place in between, or where any other place would cut the prompt differently.
        self._all_or_nothing = not layout.cuttable or seq.exact
        self._n_pieces = 0  # imported so far
        self._room_until = math.inf  # when waiting for RAM ends; counted from the first load in vain
        self.found_damage = False

    async def run(self) -> bool:
        """Whether everything planned is in memory. If not, memory is at a legal place again."""
        with ExitStack() as held:
            small = []
            for piece in self._plan.small:  # without them the rest is of no use
                while (data := await self._load(piece)) is None:
                    if not await self._may_load_later(piece):
                        return False
                self._room_until = math.inf
                small.append((piece, held.enter_context(data)))
            if self._all_or_nothing and not await self._reserve_all(held):
                return False
            try:
                return await self._base() and await self._small(small) and await self._arrive()
            finally:
                if self._n_pieces and self._all_or_nothing and self._seq.n_kv != self._plan.end:
                    self._undo()

    async def _load(self, piece: Piece) -> memoryview | None:
        if self._lease.is_in_ram(piece.index, piece.part):
            return await self._lease.load(piece.index, piece.part)
        with self._errands.elsewhere():
            return await self._lease.load(piece.index, piece.part)

    async def _reserve_all(self, held: ExitStack) -> bool:
        """Cells for everything; where nothing can be cut, half a restore is worth nothing.

        Cells of residents are free as soon as these are saved, which takes less than computing it all again.
        """
        n_cells = self._n_cells(self._plan.base)
        while not self._has_room(n_cells) and self._lanes.is_saving:
            with self._errands.elsewhere(), trio.move_on_after(SAVE_PATIENCE_S) as patience:
                await self._wait_for_a_save()
            if patience.cancelled_caught:
                break
        if not _still_wants(self._seq, self._stay) or not self._has_room(n_cells):
            return False
        held.enter_context(self._lanes.reserving(n_cells))
        return True

    def _n_cells(self, pieces: list[Piece] | tuple[Piece, ...]) -> int:
        """What holds these, and what else of one block passes through the scratch sequence at a time."""
        wanted = [piece.wanted[1] - piece.wanted[0] for piece in pieces]
        whole = [len(self._lease.nodes[piece.index].ids) for piece in pieces]
        return sum(wanted) + max([n - m for n, m in zip(whole, wanted, strict=True)], default=0)

    def _has_room(self, n_cells: int) -> bool:
        """Whether so many are free, and one for each of the others: the next step is planned meanwhile.

        It would find none otherwise, and send one after another away for cells that are free a moment later.
        """
        n_cells += len(self._lanes.running) - 1
        self._lanes.reclaim(n_cells)
        free = self._lanes.n_free_cells
        return free is None or free >= n_cells

    async def _base(self) -> bool:
        """Block after block, several a call; the next ones are read by other threads meanwhile."""
        with bare_errors(), ExitStack() as held:
            async with trio.open_nursery() as nursery:
                blocks = ReadAhead(self._lease, self._plan.base, self._errands, nursery)
                held.callback(blocks.let_go)
                done = await self._import_in_order(blocks)
                nursery.cancel_scope.cancel()
        return done

    async def _import_in_order(self, blocks: ReadAhead) -> bool:
        still_used = {piece.index for piece in self._plan.small}
        while _still_wants(self._seq, self._stay):
            await blocks.read(others_run=len(self._lanes.running) > 1)
            if blocks.first is None:
                return True
            ready = blocks.ready()
            if not ready:
                is_last_way = blocks.is_one_by_one or not self._is_stored(blocks.first)
                if is_last_way and not await self._may_load_later(blocks.first):
                    return False
                await blocks.start_over()
                continue
            self._room_until = math.inf
            parts = self._that_fit([(each.piece, each.data) for each in ready if each.data is not None])
            if not await self._blocks(parts):
                return False
            for piece in blocks.imported(len(parts)):
                if piece.index not in still_used:
                    self._lease.release(piece.index)
        return False

    def _that_fit(self, parts: list[Part]) -> list[Part]:
        """As many as find cells, from the first on, and that one at least. Where all was reserved: all."""
        if not self._all_or_nothing:
            while len(parts) > 1 and not self._has_room(self._n_cells([piece for piece, _ in parts])):
                parts.pop()
        return parts

    async def _may_load_later(self, piece: Piece) -> bool:
        """After a load in vain, when nothing else can be given back: whether to try again, after a moment."""
        self.found_damage = not self._is_stored(piece)
        self._room_until = min(self._room_until, trio.current_time() + ROOM_PATIENCE_S)
        if self.found_damage or trio.current_time() >= self._room_until:
            return False
        with self._errands.elsewhere():
            may_come = await self._lease.room_may_come()
        return may_come and _still_wants(self._seq, self._stay)

    def _is_stored(self, piece: Piece) -> bool:
        """Whether what could not be loaded is there: RAM has no room for it. Else it is not found again."""
        return self._cache.store.has(self._lease.nodes[piece.index].name, piece.part)

    async def _blocks(self, parts: list[Part]) -> bool:
        """Import these; True if all of them are in memory."""
        if not _still_wants(self._seq, self._stay):
            return False
        if self._all_or_nothing:
            return await self._import(parts) == len(parts)
        pieces = [piece for piece, _ in parts]
        n_cells = self._n_cells(pieces)
        if not self._has_room(n_cells):
            return False
        with self._lanes.reserving(n_cells):
            n = await self._import(parts)
        if not n or not _is_in_slot(self._seq, self._stay):
            return False
        self._reached(pieces[n - 1].wanted[1], pieces[n - 1].index)
        return n == len(parts)

    async def _small(self, small: list[Part]) -> bool:
        if not small:
            return True
        return _still_wants(self._seq, self._stay) and await self._import(small) == len(small)

    async def _arrive(self) -> bool:
        """Where everything counts at once: it does now."""
        if not self._all_or_nothing:
            return True
        if not _is_in_slot(self._seq, self._stay):
            return False
        indices = [piece.index for piece in (*self._plan.base, *self._plan.small)]
        if not await self._is_at_end():
            if not self._thread.is_broken:  # which of them is wrong is not known: all behind the first go
                self._damaged(min(indices), "what was restored does not add up")
            return False
        if not _is_in_slot(self._seq, self._stay):
            return False
        self._reached(self._plan.end, max(indices))
        for piece in self._plan.small:  # where one goes on from, others will
            self._cache.store.set_anchor(self._lease.nodes[piece.index].name)
        return True

    async def _is_at_end(self) -> bool:
        try:
            return await self._thread.is_at(self._seq.slot, self._plan.end)
        except ErllamaError as refused:
            log.warning("%s cannot go on at %d: %s", self._seq.request, self._plan.end, str(refused))
            return False

    async def _import(self, parts: list[Part]) -> int:
        """How many of these arrived: one crossing for all, between two steps of whoever runs."""
        nodes, seq = self._lease.nodes, self._seq
        self._n_pieces += len(parts)
        saved = [
            Saved((nodes[piece.index].start, nodes[piece.index].end), piece.wanted, data, piece.part)
            for piece, data in parts
        ]
        try:
            n, refusal = await self._thread.import_(seq.slot, saved)
        except ErllamaError as broken:
            n, refusal = 0, str(broken)
        if n < len(parts):
            piece, _ = parts[n]
            log.warning("restore of %s at %d failed: %s", seq.request, nodes[piece.index].start, refusal)
            if not self._thread.is_broken:
                self._refused(piece)
        return n

    def _refused(self, piece: Piece) -> None:
        """The bytes are damaged, or a window ring, whose cells nobody counts, had no room for them."""
        if not self._layout.cuttable and not self._lanes.is_alone(self._seq):
            self.found_damage = self._lanes.drop_resident()  # then there is room, and it is tried again
        else:
            self._damaged(piece.index, f"llama.cpp refused its {piece.part.name} part")

    def _damaged(self, index: int, what: str) -> None:
        self.found_damage = True
        self._cache.store.quarantine(self._lease.nodes[index].name, what)

    def _reached(self, n_kv: int, index: int) -> None:
        """Memory holds [0, n_kv) now, out of nodes up to `index`."""
        nodes = self._lease.nodes[: index + 1]
        source = nodes[-1].parts.get(PartKind.BASE, "ram")
        self._seq.unproven |= {node.name for node in nodes if node.end > self._seq.n_kv}
        self._seq.restored_to(n_kv, source)
        for node in nodes:  # those that lie whole in memory: saves continue behind them
            if self._seq.path.end < node.end <= n_kv:
                self._seq.path.add(node.name, node.end)

    def _undo(self) -> None:
        """Let go of what arrived: the slot is at no legal place."""
        if _is_in_slot(self._seq, self._stay):
            self._lanes.cut_back(self._seq, 0 if self._layout.state else self._seq.n_kv)


def _note_reach(seq: Sequence, match: Match) -> None:
    """What a miss is explained from."""
    seq.evidence.saw(match.n_tokens, (), 0)
    seq.evidence.whole = max(seq.evidence.whole, match.n_tokens)
    if (last := match.partial) is not None and last.n_tokens:
        n = last.node.start + last.n_tokens
        seq.evidence.saw(n, [*seq.ledger[: last.node.start], *last.node.ids], last.node.end)


def _is_in_slot(seq: Sequence, stay: int) -> bool:
    return seq.phase is Phase.RESTORE and seq.n_admitted == stay


def _still_wants(seq: Sequence, stay: int) -> bool:
    return _is_in_slot(seq, stay) and not seq.cancelled
