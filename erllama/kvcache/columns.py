"""Parts of one tier as raw columns: copied by the event loop in one go, unpacked by a thread at leisure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .kinds import NAME_BYTES, PartKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Column = Sequence[float] | NDArray[Any]


class PartColumns:
    """Names by node row, and of each part: node row, kind, hits, last use."""

    KEYS: ClassVar = ("node", "kind", "hits", "used")

    def __init__(
        self, names: bytes = b"", node: Column = (), kind: Column = (), hits: Column = (), used: Column = ()
    ) -> None:
        self._names = names
        self._columns = (node, kind, hits, used)

    def _rows(self) -> Iterator[tuple[bytes, int, float, int]]:
        width = NAME_BYTES
        for node, kind, hits, used in zip(*(np.asarray(c).tolist() for c in self._columns), strict=True):
            yield self._names[node * width : node * width + width], kind, hits, used

    def ids(self) -> set[tuple[bytes, PartKind]]:
        """Name and kind of each part."""
        return {(name, PartKind(kind)) for name, kind, _, _ in self._rows()}

    def hits(self) -> dict[bytes, tuple[float, int]]:
        """Hits and last use by name and kind byte, as journals have them."""
        return {name + bytes((kind,)): (hits, used) for name, kind, hits, used in self._rows()}
