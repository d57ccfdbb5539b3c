"""`exact="cold"`: bit for bit the answer of a fresh context given the same token ids.

The law behind it: the same slices give the same bits. Such a request runs alone in an empty memory, whatever
ran before is dropped, its prompt is cut at multiples of one piece, its last token is a row of its own, and
of what is stored only whole pieces of other such prompts are brought back, into ascending cells. Replies are
computed one row at a time, so they are never reused: as part of the next prompt they are prefilled again.
Its blocks have an identity of their own, so nothing that was computed otherwise can be found by it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from erllama.errors import NotSupported

from .planner import PIECE

if TYPE_CHECKING:
    from erllama.backend import Backend, BackendFacts

LARGEST_PIECE = 256


def cold_piece(n_batch: int) -> int | None:
    """Rows of a piece: the largest power of two that a step holds, from 64 to 256; None below that."""
    piece = LARGEST_PIECE
    while piece > n_batch:
        piece //= 2
    return piece if piece >= PIECE else None


def cold_shape_hash(facts: BackendFacts) -> bytes:
    """Whose KV such requests share: equal shape, equal bits, equal pieces."""
    made = hashlib.sha256(b"cold")
    for fact in (facts.shape_hash or b"", facts.compute_hash, str(cold_piece(facts.n_batch)).encode()):
        made.update(len(fact).to_bytes(4, "little") + fact)
    return made.digest()


class ColdPromise:
    """Whether a model keeps the promise: asked once, of its backend, while memory is empty.

    `reason`: why not, once it is `known`; None if it does.
    """

    def __init__(self, backend: Backend, facts: BackendFacts) -> None:
        self.known = False
        self.reason: str | None = None
        if cold_piece(facts.n_batch) is None:
            self.learned(
                f"n_batch={facts.n_batch}: pieces of a prompt below {PIECE} rows depend on their size"
            )
        elif getattr(backend, "probe_cold", None) is None:
            self.learned("its backend cannot tell")

    def learned(self, reason: str | None) -> None:
        """What the backend answered."""
        self.known, self.reason = True, reason

    @property
    def holds(self) -> bool | None:
        """None while nobody has asked."""
        return self.reason is None if self.known else None

    def refusal(self, model_id: str) -> NotSupported | None:
        """The error for who asks for it, where it is known not to hold."""
        if not self.known or self.reason is None:
            return None
        return NotSupported(f'exact="cold" is not offered by {model_id!r}: {self.reason}')
