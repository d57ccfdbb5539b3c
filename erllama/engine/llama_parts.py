"""The parts of a sequence's KV: what is stored of it, taken out of a llama.cpp context and put back.

llama.cpp saves sequences, not ranges and not parts. A range is copied to the scratch sequence first,
which moves no data. A saved state is a header and up to three sections, in this order:

    header | full attention | sliding windows | recurrent state

and `partial` leaves full attention out. So a base part is the whole without the partial sections, and is
completed by those of an empty sequence before it is restored; the other parts are what `partial` gives.

Rule 1: the scratch sequence is empty between calls, whatever happened.
Rule 2: nothing reaches llama.cpp that does not hold exactly the positions it should.
Rule 3: the bytes do not depend on the sequence they came from, nor on its cells: the scratch id is the same
everywhere, the header holds the kind of part where llama.cpp writes that id, cells are sorted by position.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from erllama.backend import Layout, MemoryKind, PartKind
from erllama.errors import EngineError
from erllama.llama import saved_state
from erllama.llama.saved_state import HEADER_BYTES
from erllama.llama.state_order import end_of_cells, sort_cells

from .memory_ops import NoWindowRoom
from .window_places import WindowPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from erllama import llama

SCRATCH = 0  # the sequence that parts pass through; users' sequences come after it
FORMAT = 1  # of what is exported; part of the shape hash


def layout_of(context: llama.Context) -> Layout | None:
    """What of this context's sequences can be kept; None: nothing, or it is not known how."""
    if not context.params.kv_unified:
        return None
    match context.memory_kind:
        case MemoryKind.DENSE:
            return Layout()
        case MemoryKind.WINDOW if _has_partial_sections(context):
            return Layout(window=context.model.facts.n_swa)
        case MemoryKind.HYBRID if _has_partial_sections(context):
            return Layout(state=True)
        case MemoryKind.RECURRENT:
            return Layout(base=False, state=True)
    return None


def _has_partial_sections(context: llama.Context) -> bool:
    """Whether a saved state ends with what `partial` gives, and begins with something else."""
    whole, partial = _empty_state(context, partial=False), _empty_state(context, partial=True)
    return len(partial) < len(whole) and whole.endswith(partial[HEADER_BYTES:])


def _empty_state(context: llama.Context, *, partial: bool) -> bytes:
    state = bytearray(context.state_size(SCRATCH, partial=partial))
    context.state_get(SCRATCH, state, partial=partial)
    return bytes(state)


def why_no_layout(context: llama.Context) -> str:
    """In words, where `layout_of` found none."""
    if not context.params.kv_unified:
        return "ranges cannot be copied between separate KV streams (kv_unified=False)"
    return f"ranges of its {context.memory_kind.value} memory cannot be taken apart"


class PartMover:
    """Exports and imports the parts that a layout has. Thread: the context's."""

    def __init__(self, context: llama.Context, layout: Layout) -> None:
        """`context` has a sequence `SCRATCH` that nobody else uses."""
        self._context = context
        self._memory = context.memory
        self._layout = layout
        self._window = context.model.facts.n_swa
        self._places = WindowPlaces(context, SCRATCH)
        self._staging: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        # The partial sections of an empty sequence; none where nothing is left out of a base part.
        split = layout.base and not layout.cuttable
        self._no_partial = memoryview(_empty_state(context, partial=True))[HEADER_BYTES:] if split else b""
        # A hybrid may have windows too: they go with the state, which needs them.
        self._state_has_cells = layout.state and saved_state.has_cells(self._no_partial)

    @property
    def exact(self) -> bool:
        """Whether what is put back must lie where it lay when it was computed, whatever that costs."""
        return self._places.exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        self._places.exact = exact

    # --- taking out ---

    def export_bytes(self, seq_id: int, start: int, end: int, part: PartKind) -> int:
        """Size of what `export` would write; 0 if memory has not, or no longer, all of it."""
        with self._on_scratch(seq_id, start, end, part) as complete:
            return self._n_bytes(part) if complete else 0

    def export(self, seq_id: int, start: int, end: int, into: memoryview, part: PartKind) -> int:
        """Write a part of [start, end); 0 if memory has not all of it. Raises: `EngineError` (no room)."""
        with self._on_scratch(seq_id, start, end, part) as complete:
            if not complete:
                return 0
            n = self._write(into, part)
        saved_state.set_label(into, part)
        if not saved_state.is_sorted(into[HEADER_BYTES:n], SCRATCH):
            sort_cells(into[:n], SCRATCH)
        return n if self._is_part((start, end), into[:n], part) else 0

    @contextmanager
    def _on_scratch(self, seq_id: int, start: int, end: int, part: PartKind) -> Iterator[bool]:
        """With a copy of the range on the scratch sequence; False if it is not all that the part needs."""
        if not self._may_hold(seq_id, start, end, part):
            yield False
            return
        self._copy(seq_id, SCRATCH, 0 if part is PartKind.STATE else start, end)
        try:
            yield part is not PartKind.WINDOW or self._window_reaches(seq_id, start, end)
        finally:
            self._memory.rm(SCRATCH)

    def _may_hold(self, seq_id: int, start: int, end: int, part: PartKind) -> bool:
        if not 0 <= start < end or not self._has(part):
            return False
        pos_max = self._memory.pos_max(seq_id)
        return pos_max == end - 1 if part is PartKind.STATE else pos_max >= end - 1

    def _has(self, part: PartKind) -> bool:
        match part:
            case PartKind.BASE:
                return self._layout.base
            case PartKind.WINDOW:
                return self._layout.window > 0
            case PartKind.STATE:
                return self._layout.state
        return False

    def _window_reaches(self, seq_id: int, start: int, end: int) -> bool:
        """Whether a sequence's window, of which [start, end) is on scratch, has what the token at `end` sees.

        llama_hparams::is_masked_swa: what lies `n_swa` before a token is hidden from it.
        """
        first, memory = max(start, end - self._window + 1), self._memory
        there = memory.pos_min(SCRATCH) <= first and memory.pos_max(SCRATCH) == end - 1
        return there and self._places.reach(seq_id, first)

    def _copy(self, src: int, dst: int, start: int, end: int) -> None:
        if self._layout.base:
            self._memory.cp(src, dst, start, end)
        else:
            self._memory.cp(src, dst)  # a state has no ranges

    def _n_bytes(self, part: PartKind) -> int:
        if part is not PartKind.BASE:
            return self._context.state_size(SCRATCH, partial=True)
        n = self._context.state_size(SCRATCH)
        if not self._no_partial:
            return n
        return n - (self._context.state_size(SCRATCH, partial=True) - HEADER_BYTES)

    def _write(self, into: memoryview, part: PartKind) -> int:
        if part is not PartKind.BASE:
            return self._context.state_get(SCRATCH, into, partial=True)
        if not self._no_partial:
            return self._context.state_get(SCRATCH, into)
        n = self._n_bytes(part)
        if len(into) < n:
            raise EngineError(f"a part of {n} bytes does not fit into {len(into)}")
        staging = self._staging_of(self._context.state_size(SCRATCH))
        self._context.state_get(SCRATCH, staging)
        into[:n] = staging[:n]
        return n

    def _staging_of(self, n: int) -> memoryview:
        """`n` bytes that are used again and again: writing to fresh memory is 15 times slower."""
        if len(self._staging) < n:
            self._staging = np.empty(n, np.uint8)
        return self._staging.data[:n]

    # --- putting back ---

    def import_(
        self, seq_id: int, block: tuple[int, int], wanted: tuple[int, int], data: memoryview, part: PartKind
    ) -> bool:
        """Add `wanted` of a part of `block`; False (and unchanged) if it is refused or does not fit."""
        inside = block[0] <= wanted[0] < wanted[1] <= block[1]
        if not inside or not self._has(part) or not self._is_part(block, data, part):
            return False
        if part is PartKind.STATE:
            wanted = 0, block[1]
        if part is PartKind.WINDOW and self._memory.pos_max(seq_id) == -1:
            wanted = block[0], wanted[1]  # what was cut off would be a hole, and later cells be put there
        try:
            if part is PartKind.WINDOW or (part is PartKind.STATE and self._state_has_cells):
                self._hold_places(seq_id, data)
            if not self._read(data, part):
                return False
            self._copy(SCRATCH, seq_id, *wanted)
            return True
        finally:
            self._memory.rm(SCRATCH)

    def _hold_places(self, seq_id: int, data: memoryview) -> None:
        if n_places := self._places.n_missing(seq_id, data):
            copy = self._staging_of(len(data))
            copy[:] = data
            self._places.hold(seq_id, copy, n_places)

    def _is_part(self, block: tuple[int, int], data: memoryview, part: PartKind) -> bool:
        """Whether the bytes say that they are this part of this block."""
        start, end = block
        section = data[HEADER_BYTES:]
        if saved_state.label(data) != part:
            return False
        if part is PartKind.STATE and not self._state_has_cells:
            return saved_state.state_position(section) == end - 1
        positions = saved_state.cell_positions(section, SCRATCH)
        if positions is None or not len(positions):
            return False
        first = int(positions[0])
        if part is PartKind.BASE:
            fits = first == start
        else:
            least = 0 if part is PartKind.STATE else start
            fits = least <= first <= max(least, end - self._window + 1)
        if part is PartKind.STATE:
            at = end_of_cells(data, SCRATCH)
            fits = fits and at is not None and saved_state.state_position(data[at:]) == end - 1
        return fits and np.array_equal(positions, np.arange(first, end))

    def _read(self, data: memoryview, part: PartKind) -> bool:
        if part is not PartKind.BASE:
            return self._context.state_set(SCRATCH, data, partial=True) == len(data)
        if self._no_partial:
            completed = self._staging_of(len(data) + len(self._no_partial))
            completed[: len(data)] = data
            completed[len(data) :] = self._no_partial
            data = completed
        return self._context.state_set(SCRATCH, data) == len(data)

    # --- looking ---

    def is_at(self, seq_id: int, n: int) -> bool:
        """Whether the sequence holds exactly [0, n), with all that the next token needs.

        What a memory tells of its positions says nothing about holes, nor about cells of full attention
        beside windows or a state, so cells are counted, by the bytes they take.
        """
        memory, layout = self._memory, self._layout
        if memory.pos_max(seq_id) != n - 1:
            return False
        if n == 0:
            return memory.pos_min(seq_id) == -1
        if not layout.base:
            return True
        if layout.state and memory.pos_min(seq_id) != n - 1:  # the larger of both halves
            return False
        if layout.window and not self._window_is_at(seq_id, n):
            return False
        total = self._context.state_size(seq_id)
        if self._no_partial:
            total -= self._context.state_size(seq_id, partial=True) - HEADER_BYTES
        return total == self._counted(seq_id, 0, n, lambda: self._n_bytes(PartKind.BASE))

    def _window_is_at(self, seq_id: int, n: int) -> bool:
        first = max(0, n - self._window + 1)
        partial = lambda: self._context.state_size(SCRATCH, partial=True)  # noqa: E731  # named for its use
        return self._places.reach(seq_id, first) and self._counted(seq_id, first, n, partial) is not None

    def _counted(self, seq_id: int, start: int, end: int, n_bytes: Callable[[], int]) -> int | None:
        """Bytes of [start, end); None if cells are missing: each takes as many as the last one."""
        none, one, two, all_ = (
            self._measured(seq_id, first, end, n_bytes)
            for first in (end, end - 1, max(start, end - 2), start)
        )
        if one <= none or all_ != one + (two - one) * (end - start - 1) or (end - start > 1 and two <= one):
            return None
        return all_

    def _measured(self, seq_id: int, start: int, end: int, n_bytes: Callable[[], int]) -> int:
        self._memory.cp(seq_id, SCRATCH, start, end)
        try:
            return n_bytes()
        finally:
            self._memory.rm(SCRATCH)

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """Let `dst` hold [start, end) of `src` as well; no data moves but that of windows."""
        self._copy(src, dst, start, end)
        self._places.shared(src, dst, start)
        if self._layout.window or self._state_has_cells:
            self._own_window(src, dst, end)

    def _own_window(self, src: int, dst: int, end: int) -> None:
        """Give `dst` window cells of its own instead of all that `src` has in the ring.

        What two sequences hold is not recycled, even where neither sees it any more: shared as they are,
        the cells of one long prompt would fill the ring for good.
        """
        self._memory.cp(src, SCRATCH, max(0, end - self._window), end)
        try:
            state = self._staging_of(self._context.state_size(SCRATCH, partial=True))
            self._context.state_get(SCRATCH, state, partial=True)
        finally:
            self._memory.rm(SCRATCH)
        if self._context.state_set(dst, state, partial=True) != len(state):
            raise NoWindowRoom(f"the window of {len(state)} bytes behind token {end} could not be copied")

    def can_cut(self, seq_id: int, n: int) -> bool:
        """`Memory.can_cut`, and what its window is left with is real; to what it holds it always can be."""
        if n > self._memory.pos_max(seq_id):
            return True
        first = max(0, n - self._window) if self._layout.window else 0
        return self._memory.can_cut(seq_id, n) and self._places.real_from(seq_id) <= first
