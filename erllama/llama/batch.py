"""The rows of one decode: numpy arrays that llama.cpp reads in place.

The order of rows is the order of `add` calls. For contexts with separate KV streams add sequences
in ascending order of their ids: only adjacent ascending ids are computed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from erllama.errors import BatchOverflow, InvalidBatch, InvalidContent

from .ffi import Library, library
from .vocab import TokenIds, as_integers, as_pointer

if TYPE_CHECKING:
    from collections.abc import Sequence

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
Output = Literal["none", "last", "all"]


class Batch:
    """Room for `capacity` rows, reused for every step. Not thread-safe.

    `n_tokens` and `n_outputs` count the rows and the marked ones among them.
    """

    def __init__(self, capacity: int, n_seq_max: int = 1) -> None:
        lib: Library = library()
        ffi = lib.ffi
        self.capacity = capacity
        self.n_tokens = 0
        self.n_outputs = 0
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.outputs = np.zeros(capacity, np.int8)
        self._n_seq_id = np.ones(capacity, np.int32)
        # Each row's seq_id entry is a pointer into this table of all ids, so marking n rows is one fill.
        self._seq_table = np.arange(n_seq_max, dtype=np.int32)
        self._table_address = int(self._seq_table.ctypes.data)
        first = as_pointer(ffi, self._seq_table, "llama_seq_id *")
        self._seq_addresses = [first + i for i in range(n_seq_max)]
        self._seq_pointers = np.full(capacity, self._table_address, np.uintp)
        self.native: Any = ffi.new("struct llama_batch *")
        self.native.token = as_pointer(ffi, self.tokens, "llama_token *")
        self.native.pos = as_pointer(ffi, self.positions, "llama_pos *")
        self.native.logits = as_pointer(ffi, self.outputs, "int8_t *")
        self.native.n_seq_id = as_pointer(ffi, self._n_seq_id, "int32_t *")
        self.native.seq_id = as_pointer(ffi, self._seq_pointers, "llama_seq_id **")

    def __repr__(self) -> str:
        return f"<Batch {self.n_tokens}/{self.capacity} rows, {self.n_outputs} outputs>"

    def clear(self) -> None:
        """No rows."""
        self.n_tokens = self.n_outputs = self.native.n_tokens = 0

    def add(self, seq_id: int, tokens: TokenIds, pos: int, *, output: Output = "last") -> int:
        """Append `tokens` of one sequence at positions `pos`, `pos+1`, …

        Returns: the index to ask `logits()` and samplers for: of the last row with output "none" or
        "last", of the first row with "all" (row k is then at index + k).
        Raises: `BatchOverflow` if the rows do not fit, `InvalidBatch` for a sequence id beyond
        `n_seq_max`, and for ids and positions that are no integers of 32 bits. What they mean is
        checked by `Context.decode`.
        """
        n = len(tokens)
        start, end = self.n_tokens, self.n_tokens + n
        if end > self.capacity or n == 0:
            raise BatchOverflow(
                f"{n} rows do not fit: {start} of {self.capacity} are taken" if n else "no tokens to add",
                detail={"n_rows": n, "n_taken": start, "capacity": self.capacity},
            )
        if not 0 <= seq_id < len(self._seq_table):
            raise InvalidBatch(
                f"sequence {seq_id}: this batch was made for ids below {len(self._seq_table)}",
                detail={"seq_id": seq_id, "n_seq_max": len(self._seq_table)},
            )
        if not INT32_MIN <= pos < INT32_MAX - n + 1:  # one less: the next position is one too
            raise InvalidBatch(f"position {pos} leaves no room for {n} rows", detail={"pos": pos})
        self.tokens[start:end] = _int32(tokens)
        if n == 1:
            self.positions[start] = pos
        else:
            self.positions[start:end] = np.arange(pos, pos + n, dtype=np.int32)
        self._seq_pointers[start:end] = self._table_address + seq_id * self._seq_table.itemsize
        self.outputs[start:end] = output == "all"
        if output == "last":
            self.outputs[end - 1] = 1
        self.n_outputs += n if output == "all" else int(output == "last")
        self.n_tokens = self.native.n_tokens = end
        return start if output == "all" else end - 1

    def fill(self, seq_ids: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Make row i the token i of sequence i, each with an output: a step that only decodes, in one go.

        Same rows as `clear` and then `add(seq_ids[i], [tokens[i]], positions[i])` for each i.
        Raises: what `add` raises, and then the batch is empty.
        """
        self.clear()
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise BatchOverflow(
                f"{n} rows do not fit: {self.capacity} is the most" if n else "no tokens to add",
                detail={"n_rows": n, "n_taken": 0, "capacity": self.capacity},
            )
        native, table = self.native, self._seq_addresses
        try:  # cffi's own copies: after a decode they find warmer caches than numpy's
            if min(seq_ids) < 0 or max(positions) >= INT32_MAX:
                raise InvalidBatch(f"sequences {list(seq_ids)} at {list(positions)}: beyond 31 bits")
            native.token[0:n] = tokens
            native.pos[0:n] = positions
            native.seq_id[0:n] = [table[i] for i in seq_ids]
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise InvalidBatch(
                f"a row is a sequence id below {len(table)}, a token and a position, integers all: {error}",
                detail={"n_seq_max": len(table)},
            ) from None
        native.logits[0:n] = [1] * n
        self.n_tokens = self.n_outputs = native.n_tokens = n


def _int32(tokens: TokenIds) -> np.ndarray:
    try:
        ids = as_integers(tokens)
    except InvalidContent as error:
        raise InvalidBatch(str(error)) from None
    if ids.dtype != np.int32 and (int(ids.min()) < INT32_MIN or int(ids.max()) > INT32_MAX):
        raise InvalidBatch(f"token ids are integers of 32 bits: {ids.min()} to {ids.max()}")
    return ids
