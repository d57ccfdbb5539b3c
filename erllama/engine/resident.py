"""Sequences that are over but whose KV is still in its cells, until somebody needs the room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from .cells import Cells
    from .node_path import NodePath
    from .sequence import Sequence as RunningSequence


@dataclass(eq=False, slots=True, kw_only=True)
class Resident:
    """What a slot still holds: the KV of every token of `ledger`."""

    slot: int
    ledger: NDArray[np.int32]
    cells: Cells
    path: NodePath
    unproven: set[bytes]
    last_used: float
    session_id: Hashable = None

    @classmethod
    def of(cls, seq: RunningSequence, now: float) -> Resident:
        """What `seq` leaves in its slot if it goes now."""
        return cls(
            slot=seq.slot,
            ledger=np.asarray(seq.ledger[: seq.n_kv], np.int32),
            cells=seq.cells,
            path=seq.path,
            unproven=seq.unproven,
            last_used=now,
            session_id=seq.options.session_id,
        )

    @property
    def shareable(self) -> bool:
        """Others may hold what it holds."""
        return True

    @property
    def n_kv(self) -> int:
        """Tokens in memory."""
        return len(self.ledger)


def n_common(a: Sequence[int], b: NDArray[np.int32]) -> int:
    """Length of the common beginning of two token sequences, compared token by token."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n], np.int32) != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
