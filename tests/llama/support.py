"""Short helpers of the binding's tests: prompts of any length, feeding, snapshots, child processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from erllama.llama import Batch, Context, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    OpenContext = Callable[..., Context]


def prompt(model: Model, n: int, *, seed: int = 0) -> list[int]:
    """`n` ordinary tokens, the same every time."""
    rng = np.random.default_rng(seed)
    low, high = 10, model.facts.n_vocab - 10
    return [int(t) for t in rng.integers(low, high, n)]


def feed(
    context: Context, tokens: Sequence[int], *, seq_id: int = 0, pos: int = 0, piece: int | None = None
) -> np.ndarray:
    """Decode `tokens` in pieces of `piece` rows; a copy of the last row's logits."""
    piece = piece or context.n_batch
    batch = Batch(piece, context.n_seq_max)
    row = 0
    for start in range(0, len(tokens), piece):
        part = tokens[start : start + piece]
        batch.clear()
        is_last = start + piece >= len(tokens)
        row = batch.add(seq_id, part, pos + start, output="last" if is_last else "none")
        rc = context.decode(batch)
        assert rc == 0, f"llama_decode answered {rc}"
    return context.logits(row).copy()


def step(context: Context, token: int, pos: int, *, seq_id: int = 0) -> np.ndarray:
    """Decode one token; a copy of its logits."""
    return feed(context, [token], seq_id=seq_id, pos=pos)


def save(context: Context, seq_id: int, *, partial: bool = False) -> bytes:
    """One sequence's state as bytes."""
    into = bytearray(context.state_size(seq_id, partial=partial))
    n = context.state_get(seq_id, into, partial=partial)
    return bytes(into[:n])


def off_by(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two rows of logits."""
    return float(np.abs(a - b).max())


def run_python(code: str, *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter of the same environment."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
    )
