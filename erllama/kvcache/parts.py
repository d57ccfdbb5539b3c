"""The part table: where each part of each node is, its size and its use, in 28 bytes a row."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .kinds import PartKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

PART_BYTES: Final = 28
RAM: Final = 0  # home of a part that lives in memory only; file tiers are 1, 2, …
FREE: Final = 0xFF  # home of a row that is not in use
_KINDS: Final[tuple[PartKind, ...]] = (PartKind.BASE, *PartKind)  # by number; there is no kind 0


class PartTable:
    """Columns over part rows; row 0 stands for none. A node's parts are a linked list of at most four."""

    def __init__(self) -> None:
        self.node = array("i", [0])
        self._next = array("i", [0])
        self.size = array("Q", [0])  # payload bytes
        self._kind = array("B", [0])
        self.home = array("B", [FREE])
        self.hot = array("B", [0])  # 1: a copy is in RAM (always, where RAM is its home)
        self.anchor = array("B", [0])
        self.used = array("I", [0])  # last use, whole seconds since the epoch
        self.hits = array("f", [0.0])  # uses, each halved per half-life, as of `used`
        self._free = 0
        self.n_parts = 0

    @property
    def nbytes(self) -> int:
        """Bytes used by all columns."""
        return PART_BYTES * len(self.node)

    def kind(self, row: int) -> PartKind:
        """Kind of a part."""
        return _KINDS[self._kind[row]]

    def is_base(self, row: int) -> bool:
        """Whether a part is its node's base; cheaper than `kind`."""
        return self._kind[row] == 1

    def rows(self, first: int) -> list[int]:
        """Rows of one node's list."""
        found = []
        while first:
            found.append(first)
            first = self._next[first]
        return found

    def find(self, first: int, kind: PartKind) -> int:
        """Row of that kind in a node's list, or 0."""
        while first and self._kind[first] != kind:
            first = self._next[first]
        return first

    def add(self, first: int, node: int, kind: PartKind, size: int, home: int, used: int) -> int:
        """A new row before `first`; returns it (the list's new head)."""
        self.n_parts += 1
        values = (node, first, size, int(kind), home, int(home == RAM), 0, used, 0.0)
        if self._free:
            row, self._free = self._free, self._next[self._free]
            for column, value in zip(self._columns, values, strict=True):
                column[row] = value
            return row
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        return len(self.node) - 1

    def remove(self, first: int, row: int) -> int:
        """Unlink a row; returns the list's new head."""
        self.n_parts -= 1
        after = self._next[row]
        if first == row:
            head = after
        else:
            head = before = first
            while self._next[before] != row:
                before = self._next[before]
            self._next[before] = after
        self.home[row], self.node[row], self.hot[row] = FREE, 0, 0
        self._next[row], self._free = self._free, row
        return head

    @property
    def _columns(self) -> tuple[array[float], ...]:
        return (  # type: ignore[return-value]  # arrays of int and float alike take what belongs to them
            self.node,
            self._next,
            self.size,
            self._kind,
            self.home,
            self.hot,
            self.anchor,
            self.used,
            self.hits,
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """All columns as arrays, copied: a view would forbid the columns to grow."""
        return {
            "node": np.array(self.node, np.int32),
            "size": np.array(self.size, np.uint64),
            "kind": np.array(self._kind, np.uint8),
            "home": np.array(self.home, np.uint8),
            "hot": np.array(self.hot, np.uint8),
            "anchor": np.array(self.anchor, np.uint8),
            "used": np.array(self.used, np.uint32),
            "hits": np.array(self.hits, np.float32),
        }
