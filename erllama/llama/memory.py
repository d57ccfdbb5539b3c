"""What a context remembers, by sequence: cutting, copying, positions.

Which operations are safe depends on the kind of memory; asking llama.cpp for the wrong one ends the
process, so each is checked here. `seq_add` and `seq_div` do not exist on purpose (cdef/memory.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erllama.errors import EngineError, InvalidBatch, NotSupported
from erllama.types import MemoryKind as MemoryKind

if TYPE_CHECKING:
    from .context import Context


def whole(p0: int, p1: int) -> bool:
    """True if [p0, p1) in llama.cpp's notation names everything: negative means open."""
    return p0 <= 0 and p1 < 0


def _check_range(p0: int, p1: int) -> None:
    for pos in (p0, p1):
        if not -(2**31) <= pos < 2**31:
            raise InvalidBatch(f"position {pos} is no integer of 32 bits", detail={"pos": pos})


class Memory:
    """The memory of one context. Ranges are [p0, p1); a negative end is open. Thread: the context's."""

    def __init__(self, context: Context, ptr: Any) -> None:
        self._context = context
        self._lib = context.lib
        self._ptr = ptr  # owned by the context
        self._n_emptied = [0] * context.n_seq_max

    def rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget a range; False (and unchanged) where a partial range cannot be removed.

        For WINDOW memory True does not say that what is left can go on: see `can_cut`.
        """
        self._check(seq_id)
        _check_range(p0, p1)
        with self._context.handle:
            self._n_emptied[seq_id] += whole(p0, p1)
            return bool(self._lib.memory_seq_rm(self._ptr, seq_id, p0, p1))

    def cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make `dst` hold a range of `src` as well; no data moves in a unified cache.

        Raises: `NotSupported` for a range of a memory that only copies whole sequences.
        """
        self._check(src)
        self._check(dst)
        _check_range(p0, p1)
        kind = self._context.memory_kind
        separate = not self._context.params.kv_unified
        if not whole(p0, p1):
            if kind in (MemoryKind.RECURRENT, MemoryKind.WHOLE):
                raise NotSupported(f"a {kind.value} memory copies whole sequences only")
            if separate:
                raise NotSupported("separate KV streams copy whole sequences only")
        if separate and kind is not MemoryKind.RECURRENT:
            self._copy_stream(src, dst)
            return
        with self._context.handle:
            self._lib.memory_seq_cp(self._ptr, src, dst, p0, p1)

    def _copy_stream(self, src: int, dst: int) -> None:
        """Copy between streams through the state.

        llama_memory_seq_cp only notes the copy there and moves the data in the next decode: a state
        saved or restored in between would have the wrong bytes.
        """
        if src == dst:
            return
        with self._context.handle:
            state = bytearray(self._context.state_size(src))
            n = self._context.state_get(src, state)
            if self._context.state_set(dst, memoryview(state)[:n]) == 0:
                raise EngineError(f"the state of sequence {src} does not fit into sequence {dst}")

    def keep(self, seq_id: int) -> None:
        """Forget every sequence but this one."""
        self._check(seq_id)
        with self._context.handle:
            self._n_emptied = [n + (other != seq_id) for other, n in enumerate(self._n_emptied)]
            self._lib.memory_seq_keep(self._ptr, seq_id)

    def clear(self, data: bool = True) -> None:
        """Forget everything; with `data` the buffers are zeroed too."""
        with self._context.handle:
            self._n_emptied = [n + 1 for n in self._n_emptied]
            self._lib.memory_clear(self._ptr, data)

    def n_emptied(self, seq_id: int) -> int:
        """How often everything of a sequence was forgotten: what was known of it before is void."""
        self._check(seq_id)
        return self._n_emptied[seq_id]

    def pos_min(self, seq_id: int) -> int:
        """The first position held, -1 for an empty sequence; above 0 in window memory."""
        self._check(seq_id)
        with self._context.handle:
            return int(self._lib.memory_seq_pos_min(self._ptr, seq_id))

    def pos_max(self, seq_id: int) -> int:
        """The last position held, -1 for an empty sequence. Wrong after rc 2 on recurrent memory."""
        self._check(seq_id)
        with self._context.handle:
            return int(self._lib.memory_seq_pos_max(self._ptr, seq_id))

    def can_cut(self, seq_id: int, n: int) -> bool:
        """True if cutting to `n` tokens leaves a sequence that computes right answers."""
        kind = self._context.memory_kind
        if kind is MemoryKind.DENSE:
            return True
        if kind is not MemoryKind.WINDOW:
            return n == 0 or n > self.pos_max(seq_id)
        # Cells outside the window are gone, yet seq_rm answers true.
        return self.pos_min(seq_id) <= max(0, n - self._context.model.facts.n_swa)

    def _check(self, seq_id: int) -> None:
        if not 0 <= seq_id < self._context.n_seq_max:
            raise InvalidBatch(
                f"sequence {seq_id}: this context has {self._context.n_seq_max}",
                detail={"seq_id": seq_id, "n_seq_max": self._context.n_seq_max},
            )
