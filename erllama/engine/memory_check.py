"""Does KV that was taken out of a context come back bit for bit? Tried once, and the verdict remembered.

A few tokens are computed in the first slot and exported in two ranges, one more token is computed and its
logits are kept. Then both are put back into the emptied slot: what is exported again must have the same
bytes, and the same token must give the same logits. A new architecture in llama.cpp may save less than
it computes with, or in another order; such a model runs, but is not cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from erllama.backend import PartKind

from .llama_parts import SCRATCH
from .trial import Feeder, Mismatch, ordinary_tokens, verdict

if TYPE_CHECKING:
    from pathlib import Path

    from erllama import llama
    from erllama.backend import Layout

    from .llama_parts import PartMover

RANGES = ((0, 24), (24, 48))
N_TOKENS = RANGES[-1][1] + 1
SEQ_ID = SCRATCH + 1


class MemoryCheck:
    """One try of a context. Thread: the context's, which must be empty and is so afterwards."""

    def __init__(self, context: llama.Context, batch: llama.Batch, parts: PartMover, layout: Layout) -> None:
        self._context = context
        self._feeder = Feeder(context, batch, SEQ_ID)
        self._parts = parts
        has = {PartKind.BASE: layout.base, PartKind.WINDOW: layout.window > 0, PartKind.STATE: layout.state}
        self._kinds = [kind for kind, there in has.items() if there]

    def failure(self, remembered: Path) -> str | None:
        """Why this context's KV cannot be kept; None if it can. Blocks for one prefill of 48 tokens.

        `remembered`: a file that holds the verdict of an earlier try, or will; without it each load tries.
        Raises: `LoadCancelled` if the decode is aborted.
        """
        return verdict(remembered, self._run, self._context.memory)

    def _run(self) -> None:
        tokens = ordinary_tokens(self._context.model, N_TOKENS)
        saved: dict[tuple[int, int, PartKind], bytes] = {}
        for start, end in RANGES:
            self._feeder.feed(tokens[start:end], start)
            saved |= {(start, end, kind): self._export(start, end, kind) for kind in self._kinds}
        expected = self._feeder.feed(tokens[-1:], N_TOKENS - 1)
        for _, end in RANGES:
            self._restore({key: data for key, data in saved.items() if key[1] <= end}, end)
        if not np.array_equal(self._feeder.feed(tokens[-1:], N_TOKENS - 1), expected):
            raise Mismatch("restored KV gives other logits than the KV that was saved")

    def _restore(self, saved: dict[tuple[int, int, PartKind], bytes], n: int) -> None:
        self._context.memory.rm(SEQ_ID)
        for kind in self._kinds:
            for (start, end, _), data in _needed(saved, kind, n):
                if not self._parts.import_(SEQ_ID, (start, end), (start, end), memoryview(data), kind):
                    raise Mismatch(
                        f"llama.cpp refuses the {kind.name} part of [{start}, {end}) that it saved"
                    )
        if not self._parts.is_at(SEQ_ID, n):
            raise Mismatch(f"with all parts restored the sequence is not {n} tokens long")
        for kind in self._kinds:
            for (start, end, _), data in _needed(saved, kind, n):
                if self._export(start, end, kind) != data:
                    raise Mismatch(f"the restored {kind.name} part of [{start}, {end}) has other bytes")

    def _export(self, start: int, end: int, kind: PartKind) -> bytes:
        into = bytearray(self._parts.export_bytes(SEQ_ID, start, end, kind))
        if not into or self._parts.export(SEQ_ID, start, end, memoryview(into), kind) != len(into):
            raise Mismatch(f"llama.cpp does not save all of the {kind.name} part of [{start}, {end})")
        return bytes(into)


def _needed(
    saved: dict[tuple[int, int, PartKind], bytes], kind: PartKind, n: int
) -> list[tuple[tuple[int, int, PartKind], bytes]]:
    """The parts of a kind in ascending order; of states only the one at `n`."""
    return [
        (key, data)
        for key, data in sorted(saved.items())
        if key[2] is kind and (kind is not PartKind.STATE or key[1] == n)
    ]
