"""Where the window cells of a restored sequence lie, and from which position on they are real.

A window cache is a ring: a sequence that is alone has position p in cell p modulo its size. Attention adds
cells up in their order, so the order decides about bits, and a restore that brings only the last cells
would start the ring elsewhere. It also adds up to the last cell in use, hidden ones included, and threads
share a single row's cells among them by their number. So the places that are not restored are held by cells
at positions that no later token sees, all around the ring where it has started over: copies of what is
restored, given other positions. They are in nobody's sight, but llama.cpp counts them as the sequence's, so
every question about how far a window reaches back is asked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.llama import saved_state
from erllama.llama.saved_state import HEADER_BYTES
from erllama.llama.state_order import first_cells

if TYPE_CHECKING:
    from erllama import llama

CELLS_PAD = 256  # llama-kv-cache-iswa.cpp: size_swa is padded to 256
MOST_BYTES = 64 << 20  # of held cells; where more were needed, order is not worth the time


def ring_size(context: llama.Context) -> int:
    """Cells of a unified window cache (llama-kv-cache-iswa.cpp: size_swa)."""
    if context.params.swa_full:
        return context.n_ctx
    n = min(context.n_ctx, context.model.facts.n_swa * context.n_seq_max + context.n_ubatch)
    return -(-n // CELLS_PAD) * CELLS_PAD


class WindowPlaces:
    """The windows of all sequences of a context. Thread: the context's."""

    def __init__(self, context: llama.Context, scratch: int) -> None:
        self._context = context
        self._memory = context.memory
        self._scratch = scratch
        self._ring_size = ring_size(context)
        self.exact = False  # hold places whatever it costs
        self._real_from: dict[int, tuple[int, int]] = {}  # of sequences with held places: when, position

    def real_from(self, seq_id: int) -> int:
        """Before this position a sequence's window cells are none, or only hold places."""
        n_emptied, first = self._real_from.get(seq_id, (0, 0))
        return first if n_emptied == self._memory.n_emptied(seq_id) else 0

    def _note(self, seq_id: int, first: int) -> None:
        self._real_from[seq_id] = self._memory.n_emptied(seq_id), first

    def reach(self, seq_id: int, first: int) -> bool:
        """Whether a sequence has real window cells from `first` on, or from before."""
        return max(self._memory.pos_min(seq_id), self.real_from(seq_id)) <= first

    def shared(self, src: int, dst: int, start: int) -> None:
        """`dst` holds what `src` has from `start` on as well."""
        if (real_from := self.real_from(src)) > start:
            self._note(dst, real_from)

    def n_missing(self, seq_id: int, state: memoryview) -> int:
        """How many places to hold before a partial state is restored; none beside other sequences."""
        positions = saved_state.cell_positions(state[HEADER_BYTES:], self._scratch)
        if positions is None or not len(positions) or self._memory.pos_max(seq_id) != -1:
            return 0
        first = int(positions[0])
        if not self._is_alone(seq_id):
            return 0
        for n in (min(first, self._ring_size), first % self._ring_size):  # else at least the order
            if self.exact or n * len(state) <= MOST_BYTES * len(positions):
                return n
        return 0

    def hold(self, seq_id: int, state: memoryview, n_places: int) -> None:
        """Hold places with copies of `state`, a partial state, whose positions are overwritten.

        llama.cpp fills cells from where it was last, or from the first freed one before that. So where the
        ring is held all around, those that the state itself will take are held too, at positions that nothing
        else has, and then let go of.
        """
        positions = saved_state.cell_positions(state[HEADER_BYTES:], self._scratch)
        assert positions is not None
        n, first, ring, nowhere = len(positions), int(positions[0]), self._ring_size, self._context.n_ctx
        runs = [(first - n_places, n_places)]  # position of the first cell, cells
        if n_places == ring:
            n_before = first % ring
            n_own = min(n, ring - n_before)
            n_after = ring - n_before - n_own
            runs = [(first - n_before, n_before), (nowhere, n_own), (first - n_before - n_after, n_after)]
        chunks: dict[int, memoryview | None] = {n: state}
        for _, n_cells in runs:  # cut while the positions are what they were
            if (rest := n_cells % n) and rest not in chunks:
                chunks[rest] = first_cells(state, self._scratch, rest)
        self._note(seq_id, first)
        all(  # up to the first that is refused: then what it was copied from is too
            self._put(seq_id, chunks[min(n, n_cells - at)], start + at)
            for start, n_cells in runs
            for at in range(0, n_cells, n)
        )
        self._memory.rm(seq_id, nowhere)

    def _put(self, seq_id: int, chunk: memoryview | None, start: int) -> bool:
        """Copy cells into the next free ones and give them the positions from `start` on."""
        if chunk is None:
            return False
        saved_state.set_positions(chunk[HEADER_BYTES:], self._scratch, start)
        if self._context.state_set(self._scratch, chunk, partial=True) != len(chunk):
            return False
        self._memory.cp(self._scratch, seq_id, start)
        self._memory.rm(self._scratch)
        return True

    def _is_alone(self, seq_id: int) -> bool:
        others = set(range(self._context.n_seq_max)) - {seq_id}
        return all(self._memory.pos_max(other) == -1 for other in others)
