"""Where the window cells of a restored sequence lie, and from which position on they are real.

A window cache is a ring: a sequence that is alone has position p in cell p modulo its size. Attention adds
cells up in their order, so the order decides about bits, and a restore that brings only the last cells
would start the ring elsewhere. So the places before them are held by cells at positions that no later token
sees: copies of what is restored, given other positions. They are in nobody's sight, but llama.cpp counts
them as the sequence's, so every question about how far a window reaches back is asked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.llama import saved_state
from erllama.llama.saved_state import HEADER_BYTES

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
        """How many places to hold before the first cell of a partial state; none beside other sequences."""
        positions = saved_state.cell_positions(state[HEADER_BYTES:], self._scratch)
        if positions is None or self._memory.pos_max(seq_id) != -1:
            return 0
        n = int(positions[0]) % self._ring_size
        cheap = n * len(state) <= MOST_BYTES * len(positions)
        return n if (cheap or self.exact) and self._is_alone(seq_id) else 0

    def hold(self, seq_id: int, state: memoryview, n_places: int) -> None:
        """Hold places with copies of `state`, a partial state, whose positions are overwritten."""
        section = state[HEADER_BYTES:]
        positions = saved_state.cell_positions(section, self._scratch)
        assert positions is not None
        n, first = len(positions), int(positions[0])
        for start in range(first - n_places, first, n):
            saved_state.set_positions(section, self._scratch, start)
            if self._context.state_set(self._scratch, state, partial=True) != len(state):
                return  # and then what it was copied from is refused too
            self._note(seq_id, first)
            self._memory.cp(self._scratch, seq_id, start, min(start + n, first))
            self._memory.rm(self._scratch)

    def _is_alone(self, seq_id: int) -> bool:
        others = set(range(self._context.n_seq_max)) - {seq_id}
        return all(self._memory.pos_max(other) == -1 for other in others)
