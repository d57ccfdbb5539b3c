"""Trying out what a context does, once: tokens fed to it, and a verdict that is remembered in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.errors import ErllamaError, LoadCancelled, NativeError
from erllama.files import try_write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from erllama import llama

PASSED = "passed"
FAILED = "failed: "


class Mismatch(Exception):
    """What went in did not come out."""


def verdict(remembered: Path, run: Callable[[], None], memory: llama.Memory) -> str | None:
    """Why `run` fails; None if it passes. Memory is empty afterwards.

    `remembered`: a file that holds the verdict of an earlier try, or will; without it each call tries. What
    may go better another time (no memory, a failed decode) is not remembered.
    Raises: `LoadCancelled` if a decode is aborted.
    """
    known = _read(remembered)
    if known is not None:
        return known.removeprefix(FAILED) if known.startswith(FAILED) else None
    try:
        run()
        failure = None
    except LoadCancelled:
        raise
    except Mismatch as why:
        failure = str(why)
    except ErllamaError as why:
        return str(why)
    finally:
        memory.clear(data=False)
    try_write(remembered, PASSED if failure is None else FAILED + failure)
    return failure


def _read(remembered: Path) -> str | None:
    """The verdict, or None if there is none that can be understood."""
    try:
        text = remembered.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text == PASSED or text.startswith(FAILED) else None


class Feeder:
    """Computes tokens in one sequence of a context. Thread: the context's."""

    def __init__(self, context: llama.Context, batch: llama.Batch, seq_id: int) -> None:
        self._context = context
        self._batch = batch
        self._seq_id = seq_id

    def feed(self, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Compute the tokens; the logits of the last. Raises: `LoadCancelled`, `NativeError`."""
        for i in range(0, len(tokens), self._batch.capacity):
            piece = tokens[i : i + self._batch.capacity]
            self._batch.clear()
            self._batch.add(self._seq_id, piece, pos + i, output="last")
            rc = self._context.decode(self._batch)
            if rc == 2:  # llama.h: aborted
                raise LoadCancelled("given up while its memory was tried out")
            if rc != 0:
                raise NativeError(f"llama_decode answered {rc}")
        return self._context.logits(-1)


def ordinary_tokens(model: llama.Model, n: int) -> list[int]:
    """Tokens spread over the vocabulary, none of them a control token; always the same."""
    n_vocab, vocab = model.facts.n_vocab, model.vocab
    candidates = (1 + i * 7919 % max(1, n_vocab - 1) for i in range(n_vocab))
    chosen = [t for t, _ in zip((t for t in candidates if not vocab.is_control(t)), range(n), strict=False)]
    return [chosen[i % len(chosen)] for i in range(n)] if chosen else [0] * n
