"""Rows of a decode, in numpy arrays that llama.cpp reads in place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from erllama.errors import BatchOverflow, InvalidBatch
from erllama.llama import Batch

pytestmark = pytest.mark.model


def _rows(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(token, position, sequence, output) as C sees them."""
    native = batch.native
    return [
        (native.token[i], native.pos[i], native.seq_id[i][0], native.logits[i])
        for i in range(native.n_tokens)
    ]


def test_rows_as_c_sees_them() -> None:
    """Tokens, positions, sequences and output marks of several sequences land in order."""
    batch = Batch(8, n_seq_max=4)
    assert batch.add(0, [10, 11, 12], 5) == 2
    assert batch.add(3, np.array([20], np.int64), 0, output="none") == 3
    assert batch.add(1, (30, 31), 7, output="all") == 4
    assert _rows(batch) == [
        (10, 5, 0, 0),
        (11, 6, 0, 0),
        (12, 7, 0, 1),
        (20, 0, 3, 0),
        (30, 7, 1, 1),
        (31, 8, 1, 1),
    ]
    assert (batch.n_tokens, batch.n_outputs) == (6, 3)
    assert all(batch.native.n_seq_id[i] == 1 for i in range(6))


def test_clear_and_reuse() -> None:
    """A cleared batch starts over, without marks of the step before."""
    batch = Batch(4)
    batch.add(0, [1, 2, 3], 0, output="all")
    batch.clear()
    assert (batch.n_tokens, batch.n_outputs, _rows(batch)) == (0, 0, [])
    batch.add(0, [4, 5], 3)
    assert _rows(batch) == [(4, 3, 0, 0), (5, 4, 0, 1)]


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4, 5]])
def test_rows_that_do_not_fit(tokens: list[int]) -> None:
    """Nothing, or more rows than there is room for, is refused and changes nothing."""
    batch = Batch(4)
    batch.add(0, [9], 0)
    with pytest.raises(BatchOverflow):
        batch.add(0, tokens, 1)
    assert _rows(batch) == [(9, 0, 0, 1)]


@pytest.mark.parametrize("seq_id", [-1, 2])
def test_sequence_beyond_the_batch(seq_id: int) -> None:
    """B14: a sequence id the batch was not made for never becomes a pointer."""
    with pytest.raises(InvalidBatch, match=f"sequence {seq_id}"):
        Batch(4, n_seq_max=2).add(seq_id, [1], 0)


@pytest.mark.parametrize("token", [2**31, 2**40, 2**70, -(2**31) - 1, "x", "12", 1.9, True, None, [1]])
def test_tokens_that_are_no_int32(token: object) -> None:
    """Values that do not fit a token id are refused, and the batch stays as it was."""
    batch = Batch(4)
    with pytest.raises(InvalidBatch):
        batch.add(0, [token], 0)  # type: ignore[list-item]
    assert batch.n_tokens == 0


@pytest.mark.parametrize("tokens", [np.array([1.9, 2.9]), np.array([2**40]), [[1, 2]], [1, [2]], [1.5, 2]])
def test_arrays_that_are_no_ids(tokens: object) -> None:
    """Nothing is rounded, parsed or cut silently."""
    with pytest.raises(InvalidBatch):
        Batch(4).add(0, tokens, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("pos", [2**40, 2**31 - 1, 2**31 - 3, -(2**31) - 1])
def test_positions_beyond_32_bits(pos: int) -> None:
    """The last row's position, and the one after it, are 32-bit integers."""
    batch = Batch(4)
    with pytest.raises(InvalidBatch, match=f"position {pos}"):
        batch.add(0, [1, 2, 3], pos)
    assert batch.n_tokens == 0
    batch.add(0, [1, 2, 3], 2**31 - 5)


def test_fill_makes_the_rows_that_add_makes() -> None:
    """Any single rows at once are the same batch as one after the other, whatever lay there before."""
    rng = random.Random(1)
    for _ in range(200):
        one, other = Batch(16, 20), Batch(16, 20)
        for batch in (one, other):
            batch.add(3, [7] * rng.randint(1, 16), 5, output="none")
        n = rng.randint(1, 16)
        rows = [(rng.randrange(20), rng.randrange(50_000), rng.randrange(2**31 - 1)) for _ in range(n)]
        other.clear()
        indexes = [other.add(seq_id, [token], pos) for seq_id, token, pos in rows]
        one.fill(*(list(column) for column in zip(*rows, strict=True)))
        assert _rows(one) == _rows(other)
        assert (one.n_tokens, one.n_outputs) == (n, n)
        assert indexes == list(range(n))


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (([], [], []), BatchOverflow),
        (([0] * 5, [1] * 5, [0] * 5), BatchOverflow),
        (([3], [1], [0]), InvalidBatch),
        (([-1], [1], [0]), InvalidBatch),
        (([0, 1], [1, 2], [0]), InvalidBatch),
        (([0], [1], [2**31 - 1]), InvalidBatch),
        (([0], [2**31], [0]), InvalidBatch),
        (([0], [2**70], [0]), InvalidBatch),
        (([0], [1.5], [0]), InvalidBatch),
        (([0], ["a"], [0]), InvalidBatch),
    ],
)
def test_fill_refuses_what_add_refuses(columns: tuple[Any, Any, Any], error: type[Exception]) -> None:
    """Nothing reaches llama.cpp, and the batch is empty."""
    batch = Batch(4, 3)
    batch.add(0, [1], 0)
    with pytest.raises(error):
        batch.fill(*columns)
    assert (batch.n_tokens, batch.n_outputs, batch.native.n_tokens) == (0, 0, 0)
