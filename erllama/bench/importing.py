"""What it costs llama.cpp to take a sequence's blocks back, as a share of memcpy: the native calls alone.

Blocks pass through a scratch sequence, as in the engine: state into it, cells shared with the sequence that
wants them, scratch forgotten. Nothing else runs, and the bytes lie in memory that was used before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from erllama import llama
from erllama.options import ModelOptions

from .own import memcpy_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .settings import Settings

BLOCK = 256  # tokens
PIECE = 32  # tokens of each in turn, where two sequences lie between each other
SEQ, OTHER, SCRATCH = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the cells lie that the blocks come back into. `n_ctx`: 0 for as many as are computed."""

    n_ctx: int = 0
    flash_attn: bool = True  # without it V is transposed: a row of cells for each of its values
    fragmented: bool = False


def shares_of_memcpy(
    settings: Settings, tokens: Sequence[int], lengths: Sequence[int], layout: Layout, n_times: int
) -> dict[int, list[float]]:
    """For each length in tokens: bytes/s of bringing them back as a share of memcpy's, `n_times` measured.

    Computes the longest one first, twice as many tokens where cells are to be fragmented. Blocks its thread.
    """
    longest = max(lengths)
    params = llama.ContextParams(
        n_ctx=layout.n_ctx or (1 + layout.fragmented) * longest,
        n_batch=settings.n_batch,
        n_seq_max=3,
        n_threads=settings.n_threads,
        flash_attn=layout.flash_attn,
        type_k=settings.type_kv,
        type_v=settings.type_kv,
    )
    with (
        llama.Model.open(str(settings.model), ModelOptions()) as model,
        llama.Context.open(model, params) as context,
    ):
        _compute(context, tokens[:longest], between=layout.fragmented)
        blocks = _take_out(context, longest)
        context.memory.rm(SEQ)
        found: dict[int, list[float]] = {}
        for n in lengths:
            wanted = blocks[: -(-n // BLOCK)]
            n_bytes = sum(len(block) for block in wanted)
            _put_back(context, wanted)  # once for the cells' own pages
            memcpy = memcpy_bytes_per_s(n_bytes)
            found[n] = [n_bytes / _put_back(context, wanted) / memcpy for _ in range(n_times)]
        return found


def _compute(context: llama.Context, tokens: Sequence[int], *, between: bool) -> None:
    """Fill SEQ, with another sequence's cells between its own if wanted."""
    n_batch = context.params.n_batch
    batch = llama.Batch(n_batch, context.params.n_seq_max)
    piece = PIECE if between else n_batch
    for at in range(0, len(tokens), piece):
        batch.clear()
        for seq in (SEQ, OTHER) if between else (SEQ,):
            batch.add(seq, tokens[at : at + piece], at, output="none")
        if rc := context.decode(batch):
            raise RuntimeError(f"llama_decode returned {rc} for {piece} tokens at {at}")


def _take_out(context: llama.Context, n: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    blocks = []
    for start in range(0, n, BLOCK):
        context.memory.cp(SEQ, SCRATCH, start, min(start + BLOCK, n))
        block = np.zeros(context.state_size(SCRATCH), np.uint8)
        context.state_get(SCRATCH, block.data)
        context.memory.rm(SCRATCH)
        blocks.append(block)
    return blocks


def _put_back(context: llama.Context, blocks: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> float:
    """Seconds of bringing all of them back; they are forgotten again behind that."""
    memory = context.memory
    began = time.perf_counter()
    for block in blocks:
        taken = context.state_set(SCRATCH, block.data)
        if taken != len(block):
            raise RuntimeError(f"llama.cpp took {taken} of {len(block)} bytes back")
        memory.cp(SCRATCH, SEQ)
        memory.rm(SCRATCH)
    took_s = time.perf_counter() - began
    memory.rm(SEQ)
    return took_s
