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
    """What a slot still holds: the KV of every token of `ledger`.

    With a `session_id` it is that session's pin, and `ledger` followed by `pending` is its whole history:
    what was sampled last, or cancelled before it was computed, is not in memory yet.
    """

    slot: int
    ledger: NDArray[np.int32]
    cells: Cells
    path: NodePath
    unproven: set[bytes]
    last_used: float
    session_id: Hashable = None
    salt: bytes = b""
    pending: NDArray[np.int32]
    n_prompt: int  # of the turn that left it
    unwanted: bool = False  # its session was reset: it goes as soon as the actor gets to it

    @classmethod
    def of(cls, seq: RunningSequence, now: float, *, pinned: bool = False) -> Resident:
        """What `seq` leaves in its slot if it goes now; `pinned`: for its session."""
        return cls(
            slot=seq.slot,
            ledger=np.asarray(seq.ledger[: seq.n_kv], np.int32),
            cells=seq.cells,
            path=seq.path,
            unproven=seq.unproven,
            last_used=now,
            session_id=seq.options.session_id if pinned else None,
            salt=seq.salt,
            pending=np.asarray(seq.ledger[seq.n_kv :], np.int32),
            n_prompt=seq.n_prompt,
        )

    @property
    def session(self) -> tuple[bytes, Hashable] | None:
        """Whose pin it is: its salt, and the id under it."""
        return None if self.session_id is None else (self.salt, self.session_id)

    @property
    def shareable(self) -> bool:
        """Others may hold what it holds."""
        return not self.unwanted

    @property
    def is_restoring(self) -> bool:
        """Never: nothing happens to it."""
        return False

    @property
    def n_kv(self) -> int:
        """Tokens in memory."""
        return len(self.ledger)

    @property
    def history(self) -> NDArray[np.int32]:
        """Every token of the session, in memory or not."""
        return np.concatenate([self.ledger, self.pending])


def n_common(a: Sequence[int], b: NDArray[np.int32]) -> int:
    """Length of the common beginning of two token sequences, compared token by token."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n], np.int32) != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
