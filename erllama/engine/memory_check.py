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
from erllama.errors import ErllamaError, LoadCancelled
from erllama.files import try_write

from .llama_parts import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from erllama import llama
    from erllama.backend import Layout

    from .llama_parts import PartMover

RANGES = ((0, 24), (24, 48))
N_TOKENS = RANGES[-1][1] + 1
SEQ_ID = SCRATCH + 1
PASSED = "passed"
FAILED = "failed: "


class Mismatch(Exception):
    """What went in did not come out."""


class MemoryCheck:
    """One try of a context. Thread: the context's, which must be empty and is so afterwards."""

    def __init__(self, context: llama.Context, batch: llama.Batch, parts: PartMover, layout: Layout) -> None:
        self._context = context
        self._batch = batch
        self._parts = parts
        has = {PartKind.BASE: layout.base, PartKind.WINDOW: layout.window > 0, PartKind.STATE: layout.state}
        self._kinds = [kind for kind, there in has.items() if there]

    def failure(self, remembered: Path) -> str | None:
        """Why this context's KV cannot be kept; None if it can. Blocks for one prefill of 48 tokens.

        `remembered`: a file that holds the verdict of an earlier try, or will; without it each load tries.
        Raises: `LoadCancelled` if the decode is aborted.
        """
        known = _read(remembered)
        if known is not None:
            return known.removeprefix(FAILED) if known.startswith(FAILED) else None
        try:
            self._run()
            failure = None
        except LoadCancelled:
            raise
        except (Mismatch, ErllamaError) as why:
            failure = str(why)
        finally:
            self._context.memory.clear(data=False)
        try_write(remembered, PASSED if failure is None else FAILED + failure)
        return failure

    def _run(self) -> None:
        tokens = _ordinary_tokens(self._context.model, N_TOKENS)
        saved: dict[tuple[int, int, PartKind], bytes] = {}
        for start, end in RANGES:
            self._feed(tokens[start:end], start)
            saved |= {(start, end, kind): self._export(start, end, kind) for kind in self._kinds}
        expected = self._feed(tokens[-1:], N_TOKENS - 1)
        for _, end in RANGES:
            self._restore({key: data for key, data in saved.items() if key[1] <= end}, end)
        if not np.array_equal(self._feed(tokens[-1:], N_TOKENS - 1), expected):
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

    def _feed(self, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Compute the tokens; the logits of the last."""
        for i in range(0, len(tokens), self._batch.capacity):
            piece = tokens[i : i + self._batch.capacity]
            self._batch.clear()
            self._batch.add(SEQ_ID, piece, pos + i, output="last")
            rc = self._context.decode(self._batch)
            if rc == 2:  # llama.h: aborted
                raise LoadCancelled("given up while its memory was checked")
            if rc != 0:
                raise Mismatch(f"llama_decode answered {rc}")
        return self._context.logits(-1)


def _needed(
    saved: dict[tuple[int, int, PartKind], bytes], kind: PartKind, n: int
) -> list[tuple[tuple[int, int, PartKind], bytes]]:
    """The parts of a kind in ascending order; of states only the one at `n`."""
    return [
        (key, data)
        for key, data in sorted(saved.items())
        if key[2] is kind and (kind is not PartKind.STATE or key[1] == n)
    ]


def _ordinary_tokens(model: llama.Model, n: int) -> list[int]:
    """Tokens spread over the vocabulary, none of them a control token; always the same."""
    n_vocab, vocab = model.facts.n_vocab, model.vocab
    candidates = (1 + i * 7919 % max(1, n_vocab - 1) for i in range(n_vocab))
    chosen = [t for t, _ in zip((t for t in candidates if not vocab.is_control(t)), range(n), strict=False)]
    return [chosen[i % len(chosen)] for i in range(n)] if chosen else [0] * n


def _read(remembered: Path) -> str | None:
    """The verdict, or None if there is none that can be understood."""
    try:
        text = remembered.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text == PASSED or text.startswith(FAILED) else None
