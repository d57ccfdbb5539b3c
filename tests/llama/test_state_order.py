"""Cells of a saved state sorted by position: llama.cpp's own states of scattered cells, and made ones."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from erllama.llama import saved_state
from erllama.llama.state_order import first_cells, sort_cells

from .support import feed, off_by, prompt, save, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

HEADER = b"ggsq\0\0\0\0"
SHAPES = [{}, {"flash_attn": False}, {"type_k": "q8_0", "type_v": "q8_0"}]


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "hybrid_window"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scattered_cells(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, shape: dict[str, object]
) -> None:
    """Sorted, they are what a context saves that has them in order, and compute the same."""
    model = tiny(kind)
    context, fresh = open_context(model, **shape), open_context(model, **shape)
    tokens = prompt(model, 60)
    feed(context, prompt(model, 20, seed=1), seq_id=1)
    feed(context, tokens[:20])
    context.memory.rm(1)
    feed(context, tokens[20:35], pos=20)  # before the first 20
    feed(context, tokens[35:], pos=35)  # around them
    state = bytearray(save(context, 0))
    assert not saved_state.is_sorted(memoryview(state)[saved_state.HEADER_BYTES :], 0)
    scattered = bytes(state)
    assert sort_cells(memoryview(state), 0)
    assert bytes(state) != scattered
    assert fresh.state_set(0, state) == len(state)
    assert save(fresh, 0) == state
    other = open_context(model, **shape)
    assert other.state_set(0, scattered) == len(scattered)
    assert off_by(step(fresh, 7, 60), step(other, 7, 60)) < 1  # the order of cells decides about bits


@pytest.mark.model
@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_cells(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, shape: dict[str, object]
) -> None:
    """Of the cells of a window only some, nothing else changed: llama.cpp reads and writes the same."""
    context = open_context(tiny(kind), **shape)
    feed(context, prompt(context.model, 60))
    whole = bytearray(context.state_size(0, partial=True))
    context.state_get(0, whole, partial=True)
    cut = first_cells(memoryview(whole), 0, 25)
    assert cut is not None
    context.memory.rm(0)
    assert context.state_set(0, cut, partial=True) == len(cut) < len(whole)
    again = bytearray(context.state_size(0, partial=True))
    context.state_get(0, again, partial=True)
    assert again == bytes(cut)
    positions = saved_state.cell_positions(cut[saved_state.HEADER_BYTES :], 0)
    assert positions is not None
    assert list(positions) == list(range(25))
    assert first_cells(memoryview(whole)[: len(whole) // 2], 0, 25) is None


@pytest.mark.model
def test_sorted_cells_stay_as_they_are(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Nothing to do changes nothing."""
    context = open_context(tiny("dense"))
    feed(context, prompt(context.model, 30))
    state = bytearray(save(context, 0))
    assert saved_state.is_sorted(memoryview(state)[saved_state.HEADER_BYTES :], 0)
    assert sort_cells(memoryview(state), 0)
    assert state == save(context, 0)


def section(positions: list[int], *, v: str | None = None, n_layers: int = 2, row: int = 3) -> bytes:
    """A section whose rows say which position they belong to."""
    cells = b"".join(struct.pack("=iii", pos, 1, 0) for pos in positions)
    keys = b"".join(bytes([pos + layer] * row) for layer in range(1) for pos in positions)
    body = b"".join(struct.pack("=iQ", 1, row) + keys for _ in range(n_layers))
    if v == "rows":
        body += body
    elif v == "columns":
        columns = b"".join(bytes([pos + j]) for j in range(4) for pos in positions)
        body += b"".join(struct.pack("=iII", 1, 1, 4) + columns for _ in range(n_layers))
    head = struct.pack("=II", 1, len(positions))
    return head + cells + struct.pack("=II", v == "columns", n_layers) + body


@pytest.mark.parametrize("v", [None, "rows", "columns"])
@pytest.mark.parametrize("n_sections", [1, 2])
@pytest.mark.parametrize("tail", [b"", struct.pack("=IiI", 1, 3, 0) + b"state"], ids=["", "state"])
def test_made_states(v: str | None, n_sections: int, tail: bytes) -> None:
    """Models without V, transposed V, two caches one after the other, a recurrent state behind."""
    mixed, in_order = [2, 0, 3, 1], [0, 1, 2, 3]
    state = bytearray(HEADER + section(mixed, v=v) * n_sections + tail)
    assert sort_cells(memoryview(state), 0)
    assert state == HEADER + section(in_order, v=v) * n_sections + tail


def test_bytes_that_are_not_understood_stay_as_they_are() -> None:
    """Cut, longer, damaged, none at all: False."""
    good = HEADER + section([1, 0], v="rows")
    rng = np.random.default_rng(1)
    for state in (good[:-1], good + b"x", good[:30], HEADER, b"", HEADER + section([]), rng.bytes(500)):
        copy = bytearray(state)
        assert not sort_cells(memoryview(copy), 0)
        assert copy == state
