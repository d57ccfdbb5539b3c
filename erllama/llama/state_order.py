"""Sorts the cells of a saved state by position, or leaves some of them out.

llama.cpp writes cells in the order of their places, which is not that of positions where a window cache has
started over, or where a sequence filled the gaps that others left. Sorted, equal KV is equal bytes wherever
it lay, and a restore puts it into ascending cells. Format: llama-kv-cache.cpp, `state_write_data`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .saved_state import HEADER_BYTES, cells_of, state_position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_CELLS = struct.Struct("=II")  # streams, cells
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers
_ROWS = struct.Struct("=iQ")  # type, bytes of a cell's row
_COLUMNS = struct.Struct("=iII")  # type, bytes of an element, elements of a cell


class Table(NamedTuple):
    """`n_outer` times one item of `item_bytes` per cell, which lie at `start`."""

    start: int
    n_outer: int
    item_bytes: int
    order: npt.NDArray[np.intp]

    @property
    def end(self) -> int:
        """Where the next thing lies."""
        return self.start + self.n_outer * len(self.order) * self.item_bytes


def sort_cells(state: memoryview, seq_id: int) -> bool:
    """Sort in place what was saved from `seq_id`; False, and unchanged, if the bytes are not understood."""
    tables = _attention(state, HEADER_BYTES, seq_id)
    if tables is None:
        return False
    for table in tables:
        items = np.frombuffer(state[table.start : table.end], np.uint8)
        items = items.reshape(table.n_outer, len(table.order), table.item_bytes)
        items[:] = items[:, table.order]
    return True


def first_cells(state: memoryview, seq_id: int, n: int) -> memoryview | None:
    """A copy with the first `n` cells of a state that has one attention section; None as for `sort_cells`."""
    tables = _attention(state, HEADER_BYTES, seq_id)
    if tables is None:
        return None
    cut, copied = bytearray(), 0
    for table in tables:
        items = np.frombuffer(state[table.start : table.end], np.uint8)
        items = items.reshape(table.n_outer, len(table.order), table.item_bytes)
        cut += state[copied : table.start]
        cut += items[:, :n].tobytes()
        copied = table.end
    cut += state[copied:]
    _CELLS.pack_into(cut, HEADER_BYTES, 1, n)
    return memoryview(cut)


def end_of_cells(state: memoryview, seq_id: int) -> int | None:
    """Where the attention sections end: at the end, or at a state of their last position; else None."""
    tables = _attention(state, HEADER_BYTES, seq_id)
    return None if tables is None else _end_of(tables)


def _end_of(tables: list[Table]) -> int:
    """A section's end; without layers it ends with their number."""
    return max(tables[-1].end, tables[0].end + _LAYERS.size)


def _attention(state: memoryview, at: int, seq_id: int) -> list[Table] | None:
    """The tables of the sections from `at` on, the first of an attention cache; None if they do not fit."""
    cells = cells_of(state[at:], seq_id)
    if cells is None or not len(cells):
        return None
    order = np.argsort(cells[:, 0])
    meta = Table(at + _CELLS.size, 1, cells.itemsize * cells.shape[1], order)
    for has_v in (True, False):  # models with one latent K keep no V
        try:
            tables = [meta, *_layers(state, meta, has_v)]
        except struct.error:  # beyond the end
            continue
        end = _end_of(tables)
        rest = state[end:]
        if (
            not rest or state_position(rest) == cells[order[-1], 0]
        ):  # nothing follows, or the sequence's state
            return tables
        if (more := _attention(state, end, seq_id)) is not None:
            return [*tables, *more]
    return None


def _layers(state: memoryview, meta: Table, has_v: bool) -> Iterator[Table]:
    v_transposed, n_layers = _LAYERS.unpack_from(state, meta.end)
    end = meta.end + _LAYERS.size
    for i in range(n_layers * (1 + has_v)):
        if v_transposed and i >= n_layers:
            _, item_bytes, n_outer = _COLUMNS.unpack_from(state, end)
            start = end + _COLUMNS.size
        else:
            _, item_bytes = _ROWS.unpack_from(state, end)
            start, n_outer = end + _ROWS.size, 1
        table = Table(start, n_outer, item_bytes, meta.order)
        if table.end > len(state):
            raise struct.error("beyond the end")
        yield table
        end = table.end
