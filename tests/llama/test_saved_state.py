"""What a saved state says about its cells, read before llama.cpp does."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from erllama.llama import saved_state

from .support import feed, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext


def section(cells: list[tuple[int, ...]], *, n_streams: int = 1, n: int | None = None) -> memoryview:
    """An attention section: cells, then what llama.cpp writes of its layers."""
    head = struct.pack("=II", n_streams, len(cells) if n is None else n)
    return memoryview(head + b"".join(struct.pack(f"={len(c)}i", *c) for c in cells) + bytes(64))


def test_cells_in_any_order() -> None:
    """Cell order is not position order: positions come out ascending."""
    positions = saved_state.cell_positions(section([(7, 1, 2), (5, 1, 2), (6, 1, 2)]), 2)
    assert positions is not None
    assert positions.tolist() == [5, 6, 7]


def test_cells_with_more_about_them() -> None:
    """M-RoPE models and those that need the token write three more numbers per cell."""
    cells = [(5, 1, 0, 5, 99, 2), (6, 1, 1, 5, 98, 2)]
    positions = saved_state.cell_positions(section(cells), 2)
    assert positions is not None
    assert positions.tolist() == [5, 6]


@pytest.mark.parametrize(
    "damaged",
    [
        section([(5, 1, 2), (6, 2, 2)]),
        section([(5, 1, 2), (6, 1, 1)]),
        section([(5, 1, 2)], n_streams=2),
        section([(5, 1, 2)], n=2),
        section([(5, 1, 2)], n=2**32 - 1),
        section([])[:5],
        memoryview(b""),
    ],
    ids=["two ids", "another id", "streams", "fewer cells", "far fewer cells", "cut", "empty"],
)
def test_what_is_no_attention_section(damaged: memoryview) -> None:
    """None, and no crash."""
    assert saved_state.cell_positions(damaged, 2) is None


def test_states() -> None:
    """One state with a position; neither none nor two."""
    assert saved_state.state_position(memoryview(struct.pack("=IiI", 1, 41, 0))) == 41
    for other in (
        struct.pack("=IiI", 2, 41, 0),
        struct.pack("=IiI", 1, 41, 1),
        struct.pack("=III", 0, 0, 4),
        b"\1",
    ):
        assert saved_state.state_position(memoryview(other)) is None


def test_labels() -> None:
    """A number of ours in the place of the sequence id; bytes without a header have none."""
    state = bytearray(range(12))
    saved_state.set_label(memoryview(state), 3)
    assert state == bytes((0, 1, 2, 3, 3, 0, 0, 0, 8, 9, 10, 11))
    assert saved_state.label(memoryview(state)) == 3
    assert saved_state.label(memoryview(state)[:7]) is None


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dense", "window", "recurrent", "hybrid"])
def test_of_llama_cpp(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """The pinned llama.cpp writes what this module reads, and does not mind the label."""
    model = tiny(kind)
    context = open_context(model)
    empty = memoryview(save(context, 1))[saved_state.HEADER_BYTES :]
    assert saved_state.has_cells(empty) is (kind != "recurrent")
    feed(context, prompt(model, 30), seq_id=1)
    state = bytearray(save(context, 1))
    body = memoryview(state)[saved_state.HEADER_BYTES :]
    if kind == "recurrent":
        assert saved_state.state_position(body) == 29
    else:
        positions = saved_state.cell_positions(body, 1)
        assert positions is not None
        assert positions.tolist() == list(range(30))
    saved_state.set_label(memoryview(state), 1234567)
    assert context.state_set(2, state) == len(state)
    assert context.memory.pos_max(2) == 29
