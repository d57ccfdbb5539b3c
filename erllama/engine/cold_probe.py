"""Does a warm run of a prompt give the bits of a cold one? Tried once, and the verdict remembered.

A prompt of a piece, a rest and a last token is computed as `exact="cold"` computes it, in the context as it
is. Then the memory is dirtied and emptied, the piece is computed again, which must give the same bytes, and
after another emptying it is restored instead and the rest computed behind it: the last token's logits must
be the first ones, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from erllama.types import PartKind

from .llama_parts import SCRATCH
from .trial import Feeder, Mismatch, ordinary_tokens, verdict

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from erllama import llama
    from erllama.backend import Layout

    from .llama_parts import PartMover

N_REST = 70  # more rows than the smallest piece, and no multiple of it
SEQ_ID = SCRATCH + 1


class ColdProbe:
    """One try of a context. Thread: the context's, which must be empty and is so afterwards."""

    def __init__(
        self,
        context: llama.Context,
        batch: llama.Batch,
        piece: int,
        n_ctx: int,
        parts: PartMover | None,
        layout: Layout | None,
    ) -> None:
        """`parts` and `layout`: None where nothing is kept; then only computing again is tried."""
        self._context = context
        self._feeder = Feeder(context, batch, SEQ_ID if parts is not None else 0)
        self._piece = piece
        self._n = min(n_ctx - 1, piece + N_REST)
        self._parts = parts
        self._kinds = [] if layout is None else [PartKind[name.upper()] for name in layout.parts]
        tokens = ordinary_tokens(context.model, self._n + 1)
        self._head, self._rest, self._last = tokens[:piece], tokens[piece : self._n], tokens[-1:]

    def failure(self, remembered: Path) -> str | None:
        """Why warm bits are not cold bits here; None if they are. Blocks for about three prefills.

        Raises: `LoadCancelled` if a decode is aborted.
        """
        return verdict(remembered, self._run, self._context.memory)

    def _run(self) -> None:
        if not self._rest:
            return  # no prompt that fits is longer than a piece: nothing is ever reused
        memory = self._context.memory
        memory.clear(data=False)
        self._feeder.feed(self._head, 0)
        saved = self._export()
        expected = self._finish()
        memory.clear(data=False)
        self._feeder.feed(self._rest[::-1], 0)
        memory.clear(data=False)
        self._feeder.feed(self._head, 0)
        if self._export() != saved:
            raise Mismatch("a prompt computed again in an emptied context leaves other KV")
        if self._parts is not None:
            memory.clear(data=False)
            self._restore(saved)
        if not np.array_equal(self._finish(), expected):
            raise Mismatch("a restored prompt gives other logits than a computed one")

    def _finish(self) -> npt.NDArray[np.float32]:
        self._feeder.feed(self._rest, self._piece)
        return self._feeder.feed(self._last, self._n)

    def _export(self) -> dict[PartKind, bytes]:
        saved = {}
        for kind in self._kinds:
            assert self._parts is not None
            into = bytearray(self._parts.export_bytes(SEQ_ID, 0, self._piece, kind))
            if not into or not self._parts.export(SEQ_ID, 0, self._piece, memoryview(into), kind):
                raise Mismatch(f"the {kind.name} part of a piece cannot be saved")
            saved[kind] = bytes(into)
        return saved

    def _restore(self, saved: dict[PartKind, bytes]) -> None:
        assert self._parts is not None
        whole = 0, self._piece
        for kind, data in saved.items():
            if not self._parts.import_(SEQ_ID, whole, whole, memoryview(data), kind):
                raise Mismatch(f"the {kind.name} part of a piece cannot be restored")
        if not self._parts.is_at(SEQ_ID, self._piece):
            raise Mismatch("a restored piece cannot go on")
