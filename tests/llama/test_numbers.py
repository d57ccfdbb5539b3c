"""Which shapes of work give the same bits on this build, and which do not.

These pin facts of llama.cpp's CPU kernels that the engine's exactness rests on. Bits do not depend on
load; a new pin that changes one of them has to be looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.llama import Batch

from .support import feed, off_by, prompt, step

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def tokens(smollm2: Model) -> list[int]:
    """129 tokens: two pieces of 64 and one row."""
    return prompt(smollm2, 129)


@pytest.fixture
def run(smollm2: Model, open_context: OpenContext) -> Callable[..., np.ndarray]:
    """`run(tokens, cuts…)`: logits of the last row of a fresh context, the tokens fed in the given pieces."""

    def run_pieces(tokens: list[int], *pieces: int, **shape: object) -> np.ndarray:
        assert sum(pieces) == len(tokens)
        context = open_context(smollm2, n_ctx=256, **shape)
        pos = 0
        for n in pieces:
            last = feed(context, tokens[pos : pos + n], pos=pos)
            pos += n
        return last

    return run_pieces


def test_pieces_of_64_rows_are_equal(run: Callable[..., np.ndarray], tokens: list[int]) -> None:
    """Prefill pieces of at least 64 rows give equal bits, whatever their size."""
    whole = run(tokens[:128], 128)
    assert off_by(whole, run(tokens[:128], 64, 64)) == 0
    assert off_by(whole, run(tokens[:128], 128)) == 0


def test_same_slices_same_bits(run: Callable[..., np.ndarray], tokens: list[int]) -> None:
    """The law behind the cache: equal cuts give equal bits, the last row alone included."""
    assert off_by(run(tokens, 64, 64, 1), run(tokens, 128, 1)) == 0


def test_small_pieces_differ(run: Callable[..., np.ndarray], tokens: list[int]) -> None:
    """2 to 63 rows, and single rows, go through other attention kernels."""
    whole = run(tokens[:128], 128)
    assert off_by(whole, run(tokens[:128], 88, 40)) > 1e-3
    assert off_by(whole, run(tokens[:128], 124, 1, 1, 1, 1)) > 1e-3


def test_thread_count_does_not_matter_for_many_rows(
    run: Callable[..., np.ndarray], tokens: list[int]
) -> None:
    """128 rows give the same bits on one thread and on two."""
    assert off_by(run(tokens[:128], 128, n_threads=1), run(tokens[:128], 128, n_threads=2)) == 0


@pytest.mark.parametrize(("n_kv", "differs"), [(200, False), (300, True)])
def test_thread_count_matters_for_single_rows(
    tiny: Callable[[str], Model], open_context: OpenContext, n_kv: int, differs: bool
) -> None:
    """From 257 cells on (512 once padded) a single row splits its attention over the threads."""
    model = tiny("dense")
    rows = []
    for n_threads in (1, 2):
        context = open_context(model, n_ctx=1024, n_threads=n_threads)
        feed(context, prompt(model, n_kv))
        rows.append(step(context, 5, n_kv))
    assert (off_by(*rows) > 0) is differs


def test_q8_0_kv_has_one_class(run: Callable[..., np.ndarray], tokens: list[int]) -> None:
    """With q8_0 KV and Q4_1 weights every shape gives the same bits."""
    kv = {"type_k": "q8_0", "type_v": "q8_0"}
    whole = run(tokens[:100], 100, **kv)
    assert off_by(whole, run(tokens[:100], 60, 40, **kv)) == 0
    assert off_by(whole, run(tokens[:100], 96, 1, 1, 1, 1, **kv)) == 0


@pytest.mark.parametrize(("unified", "moves"), [(True, True), (False, False)])
def test_a_resident_neighbour(
    smollm2: Model, open_context: OpenContext, tokens: list[int], unified: bool, moves: bool
) -> None:
    """In a unified cache a resident neighbour moves logits, in separate streams it does not."""
    alone, shared = (
        open_context(smollm2, n_ctx=512, n_seq_max=2, n_batch=128, kv_unified=unified) for _ in range(2)
    )
    feed(shared, prompt(smollm2, 70, seed=9), seq_id=1)
    for context in (alone, shared):
        feed(context, tokens[:100])
    off = off_by(step(alone, 5, 100), step(shared, 5, 100))
    assert (off > 0) is moves


def test_shared_window_cells_are_not_reused(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A shared prefix on window memory answers "no room" with most of the base cache free."""
    model = tiny("window")
    context = open_context(model, n_ctx=4096, n_batch=64, n_seq_max=4)
    n_used = 448
    feed(context, prompt(model, n_used), piece=64)
    for seq_id in (1, 2, 3):
        context.memory.cp(0, seq_id)
    batch = Batch(64, 4)
    pos = [n_used] * 4
    rc = 0
    while rc == 0:
        seq_id = min(range(4), key=pos.__getitem__)
        batch.clear()
        batch.add(seq_id, prompt(model, 64), pos[seq_id], output="none")
        rc = context.decode(batch)
        pos[seq_id] += 64 if rc == 0 else 0
        n_used += 64 if rc == 0 else 0
    assert rc == 1
    assert n_used < 4096 / 4
