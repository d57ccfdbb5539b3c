"""Name → node row without a Python object per node: 256 small open-addressed tables.

Growing rebuilds one table of 256, so no insert ever stalls the event loop for long. Names are SHA-256
digests: their bytes are their own hash.
"""

from __future__ import annotations

from array import array
from typing import Final

from .kinds import NAME_BYTES

_SHARDS: Final = 256
_FIRST_SIZE: Final = 8


class NameTable:
    """Maps names to rows; the names themselves live here once, 32 bytes per row."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._slots = [array("i", bytes(4 * _FIRST_SIZE)) for _ in range(_SHARDS)]
        self._filled = [0] * _SHARDS

    def add_row(self) -> None:
        """Make room for the name of one more row."""
        self._names += bytes(NAME_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of names and tables."""
        return len(self._names) + sum(4 * len(slots) for slots in self._slots)

    def name(self, row: int) -> bytes:
        """The name of a row."""
        return bytes(self._names[row * NAME_BYTES : row * NAME_BYTES + NAME_BYTES])

    def dump(self) -> bytes:
        """All names, 32 bytes per row."""
        return bytes(self._names)

    def find(self, name: bytes) -> int | None:
        """The row with this name, or None."""
        slots = self._slots[name[0]]
        i = self._home(name, len(slots))
        while row := slots[i]:
            if self.name(row) == name:
                return row
            i = (i + 1) % len(slots)
        return None

    def put(self, name: bytes, row: int) -> None:
        """Give `row` (never 0) its name. The name must be new."""
        self._names[row * NAME_BYTES : row * NAME_BYTES + NAME_BYTES] = name
        shard = name[0]
        self._filled[shard] += 1
        if self._filled[shard] * 4 > len(self._slots[shard]) * 3:
            self._grow(shard)
        self._place(self._slots[shard], name, row)

    def remove(self, name: bytes) -> None:
        """Forget a name that is present, its row has none then.

        Later entries of its probe run move up, so no tombstones.
        """
        shard = name[0]
        slots = self._slots[shard]
        size = len(slots)
        hole = self._home(name, size)
        while self.name(slots[hole]) != name:
            hole = (hole + 1) % size
        freed = slots[hole]
        self._filled[shard] -= 1
        i = hole
        while True:
            i = (i + 1) % size
            row = slots[i]
            if not row:
                break
            home = self._home(self.name(row), size)
            if (i - home) % size >= (i - hole) % size:
                slots[hole], hole = row, i
        slots[hole] = 0
        self._names[freed * NAME_BYTES : freed * NAME_BYTES + NAME_BYTES] = bytes(NAME_BYTES)

    def _grow(self, shard: int) -> None:
        old = self._slots[shard]
        grown = array("i", bytes(4 * (len(old) * 3 // 2)))
        for row in old:
            if row:
                self._place(grown, self.name(row), row)
        self._slots[shard] = grown

    def _place(self, slots: array[int], name: bytes, row: int) -> None:
        i = self._home(name, len(slots))
        while slots[i]:
            i = (i + 1) % len(slots)
        slots[i] = row

    @staticmethod
    def _home(name: bytes, size: int) -> int:
        return int.from_bytes(name[1:8], "little") % size
