"""What a saved state says about its cells, read before llama.cpp reads it.

llama.cpp asserts on, or never forgets, positions that no sequence can have, and discards the sequence id
that it wrote. Formats: llama-kv-cache.cpp and llama-memory-recurrent.cpp, `state_write` and
`state_write_meta`. All numbers are native 32-bit integers.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 8  # magic, and the sequence id, which llama.cpp writes and never looks at
_LABEL = struct.Struct("=I")
_LABEL_AT = 4
_CELLS = struct.Struct("=II")  # streams, cells
_STATE = struct.Struct("=IiI")  # cells, and of the first: position, sequence ids
# position, number of sequence ids, [M-RoPE position and token (llama_kv_cell_ext),] sequence id
_CELL_WORDS = (3, 6)


def set_label(state: memoryview, label: int) -> None:
    """Write a number of ours where the sequence id is."""
    _LABEL.pack_into(state, _LABEL_AT, label)


def label(state: memoryview) -> int | None:
    """The number that `set_label` wrote; None of what has no header."""
    return int(_LABEL.unpack_from(state, _LABEL_AT)[0]) if len(state) >= HEADER_BYTES else None


def has_cells(section: memoryview | bytes) -> bool:
    """Whether a section of an empty sequence is that of an attention cache, not of a recurrent one."""
    return len(section) >= _CELLS.size and _CELLS.unpack_from(section) == (1, 0)


def cell_positions(section: memoryview, seq_id: int) -> npt.NDArray[np.int32] | None:
    """The positions in an attention section, ascending, saved from `seq_id` of a unified cache.

    None: it does not begin as such a section does.
    """
    cells = cells_of(section, seq_id)
    return None if cells is None else np.sort(cells[:, 0])


def is_sorted(section: memoryview, seq_id: int) -> bool:
    """Whether the cells of an attention section come in the order of their positions."""
    cells = cells_of(section, seq_id)
    return cells is None or bool((np.diff(cells[:, 0]) > 0).all())


def set_positions(section: memoryview, seq_id: int, start: int) -> None:
    """Give the cells of a section that `cell_positions` can read the positions from `start` on, in order."""
    cells = cells_of(section, seq_id)
    assert cells is not None
    cells[:, 0] = np.arange(start, start + len(cells))


def cells_of(section: memoryview, seq_id: int) -> npt.NDArray[np.int32] | None:
    """One row of numbers per cell, the first its position; None as for `cell_positions`."""
    if len(section) < _CELLS.size:
        return None
    n_streams, n = _CELLS.unpack_from(section)
    words = np.frombuffer(section[_CELLS.size : len(section) - len(section) % 4], np.int32)
    for n_words in _CELL_WORDS:
        if n_streams == 1 and n * n_words <= len(words):
            cells = words[: n * n_words].reshape(n, n_words)
            if (cells[:, 1] == 1).all() and (cells[:, -1] == seq_id).all():
                return cells
    return None


def state_position(section: memoryview) -> int | None:
    """The position of the one state in a recurrent section; None if there is not exactly one."""
    if len(section) < _STATE.size:
        return None
    n, pos, n_seq_ids = _STATE.unpack_from(section)
    return int(pos) if (n, n_seq_ids) == (1, 0) else None
