"""Does a warm run of a prompt give the bits of a cold one? Tried once, and the verdict remembered.

A prompt of pieces, a rest and a last token is computed as `exact="cold"` computes it, in the context as it
is; with a window, enough pieces that its ring has started over. Then the memory is dirtied and emptied, the
first piece is computed again, which must give the same bytes, and after another emptying all pieces are
restored instead and the rest computed behind them: the last token's logits must be the first ones, bit for
bit.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from erllama.types import PartKind

from .llama_parts import SCRATCH
from .trial import Feeder, Mismatch, ordinary_tokens, verdict
from .window_places import ring_size

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from erllama import llama
    from erllama.backend import Layout

    from .llama_parts import PartMover

log = logging.getLogger("erllama.engine")
N_REST = 70  # more rows than the smallest piece, and no multiple of it
SEQ_ID = SCRATCH + 1
TRIAL = 2  # of what is tried; a verdict of another one is none


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
        self._parts = parts
        self._kinds = [] if layout is None else [PartKind[name.upper()] for name in layout.parts]
        self._n = min(n_ctx - 1, self._length() if parts is not None else piece + N_REST)
        n_head = self._n_head = (self._n - 1) // piece * piece
        tokens = ordinary_tokens(context.model, self._n + 1)
        self._head, self._rest, self._last = tokens[:n_head], tokens[n_head : self._n], tokens[-1:]

    def _length(self) -> int:
        """Tokens before the last one.

        With a window: its cells then lie on both sides of a border between the shares of two threads, in a
        ring that was full before any of them was computed.
        """
        window = self._context.model.facts.n_swa
        if not window:
            return self._piece + N_REST
        ring, n_threads = ring_size(self._context), self._context.params.n_threads
        share = -(-ring // n_threads) if n_threads > 1 else 1
        least = self._piece + window // 2
        return ring + -(-least // share) * share + window // 2

    def failure(self, remembered: Path) -> str | None:
        """Why warm bits are not cold bits here; None if they are. Blocks for about two prefills.

        Raises: `LoadCancelled` if a decode is aborted.
        """
        return verdict(remembered, self._run, self._context.memory)

    def _run(self) -> None:
        if not self._head:
            return  # no prompt that fits is longer than a piece: nothing is ever reused
        log.info("trying whether exact='cold' holds here: %d tokens, twice", self._n + 1)
        memory, piece = self._context.memory, self._piece
        memory.clear(data=False)
        self._compute(0, piece)
        first = self._export(piece)
        self._compute(piece, self._n_head)
        saved = self._export(self._n_head)
        expected = self._finish()
        memory.clear(data=False)
        self._feeder.feed(self._rest[::-1], 0)
        memory.clear(data=False)
        self._compute(0, piece)
        if self._export(piece) != first:
            raise Mismatch("a prompt computed again in an emptied context leaves other KV")
        if self._parts is not None:
            memory.clear(data=False)
            self._restore(saved)
        if not np.array_equal(self._finish(), expected):
            raise Mismatch("a restored prompt gives other logits than a computed one")

    def _compute(self, start: int, end: int) -> None:
        for at in range(start, end, self._piece):
            self._feeder.feed(self._head[at : at + self._piece], at)

    def _finish(self) -> npt.NDArray[np.float32]:
        self._feeder.feed(self._rest, self._n_head)
        return self._feeder.feed(self._last, self._n)

    def _export(self, n: int) -> dict[PartKind, bytes]:
        saved = {}
        for kind in self._kinds:
            assert self._parts is not None
            into = bytearray(self._parts.export_bytes(SEQ_ID, 0, n, kind))
            if not into or not self._parts.export(SEQ_ID, 0, n, memoryview(into), kind):
                raise Mismatch(f"the {kind.name} part of {n} tokens cannot be saved")
            saved[kind] = bytes(into)
        return saved

    def _restore(self, saved: dict[PartKind, bytes]) -> None:
        assert self._parts is not None
        whole = 0, self._n_head
        for kind, data in saved.items():
            if not self._parts.import_(SEQ_ID, whole, whole, memoryview(data), kind):
                raise Mismatch(f"the {kind.name} part of {self._n_head} tokens cannot be restored")
        if not self._parts.is_at(SEQ_ID, self._n_head):
            raise Mismatch(f"{self._n_head} restored tokens cannot go on")
