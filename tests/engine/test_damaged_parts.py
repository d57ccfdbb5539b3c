"""Parts whose bytes are damaged, cut or of something else: refused, and nothing of them stays behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from erllama.backend import PartKind
from erllama.engine.llama_parts import SCRATCH
from erllama.llama.state_order import end_of_cells

from .parts_scenes import KINDS

if TYPE_CHECKING:
    from .parts_scenes import Apart, OpenApart

pytestmark = pytest.mark.model


def is_as_fresh(apart: Apart, fresh: Apart) -> bool:
    """Whether a cold prompt computes the same in each slot as in a fresh context."""
    tokens = fresh.tokens(60, seed=5)
    expected = fresh.feed(0, tokens, 0)
    assert fresh.backend.cut(0, 0)
    for slot in range(3):
        assert apart.backend.is_at(slot, 0)
        got = apart.feed(slot, tokens, 0)
        assert apart.backend.is_at(slot, 60)
        assert apart.backend.cut(slot, 0)
        if not np.array_equal(got, expected):
            return False
    return True


def test_cut_bytes_are_refused(open_apart: OpenApart, kind: str) -> None:
    """FAULTS, a refused restore poisons the context: ours does not, wherever the bytes end."""
    source, target, fresh = (open_apart(kind) for _ in range(3))
    saved = source.compute(0, source.tokens(80), 80)
    for (start, end, part), data in saved.items():
        for n in (0, 3, 8, 11, 16, 20, 31, len(data) // 2, len(data) - 1024, len(data) - 1):
            assert not target.backend.import_(0, (start, end), (start, end), memoryview(data)[:n], part)
        longer = memoryview(data + b"\0")
        assert not target.backend.import_(0, (start, end), (start, end), longer, part)
    assert is_as_fresh(target, fresh)


def bits(start: int, end: int) -> range:
    """The bits of some bytes."""
    return range(8 * start, 8 * end)


def test_damaged_bytes_do_not_poison(open_apart: OpenApart, kind: str) -> None:
    """Any bit of the description of cells flipped: refused; any byte elsewhere: no residue."""
    source, target, fresh = (open_apart(kind) for _ in range(3))
    saved = source.compute(0, source.tokens(20), 20)
    rng = random.Random(1)
    for (start, end, part), data in saved.items():
        described = [*bits(0, 20 if part is PartKind.STATE else 16 + 12 * 20)]  # 12 bytes a cell
        if kind == "hybrid_window" and part is PartKind.STATE:  # cells, then the state
            at = end_of_cells(memoryview(data), SCRATCH)
            assert at is not None
            described = [*bits(0, 16 + 12 * 20), *bits(at, at + 12)]
        spots = [*described, *(rng.randrange(160, 8 * len(data)) for _ in range(40))]
        for spot in spots:
            damaged = bytearray(data)
            damaged[spot // 8] ^= 1 << spot % 8
            taken = target.backend.import_(0, (start, end), (start, end), memoryview(damaged), part)
            assert not (taken and spot in described), (part, spot)
            assert target.backend.cut(0, 0)
    assert is_as_fresh(target, fresh)


def test_bytes_of_something_else_are_refused(open_apart: OpenApart, kind: str) -> None:
    """Another part, another block, another kind of model, no state at all."""
    source, target, fresh = (open_apart(kind) for _ in range(3))
    own = source.compute(0, source.tokens(80), 40)
    foreign = [
        data
        for other in KINDS
        if other != kind
        for data in open_apart(other).compute(0, source.tokens(80), 40).values()
    ]
    for data in (*foreign, b"\xff" * 5000, b"\0" * 5000, b""):
        for part in PartKind:
            assert not target.backend.import_(0, (0, 40), (0, 40), memoryview(data), part) or (
                # The windows of one model have the shape of the other's full attention: told by their names.
                kind != "recurrent" and part is PartKind.BASE
            )
            target.backend.cut(0, 0)
    for (start, end, part), data in own.items():
        for claimed in PartKind:
            for block in ((0, 40), (40, 80), (0, 80), (1, 41)):
                if (claimed, block) != (part, (start, end)):
                    taken = target.backend.import_(0, block, block, memoryview(data), claimed)
                    # A state tells where it ends, not which block it is stored with.
                    assert not taken or (part is claimed is PartKind.STATE and block[1] == end)
                    target.backend.cut(0, 0)
    assert is_as_fresh(target, fresh)


def test_wanted_outside_the_block(open_apart: OpenApart, kind: str) -> None:
    """More than the bytes hold is refused before anything happens."""
    source, target = open_apart(kind), open_apart(kind)
    saved = source.compute(0, source.tokens(40), 40)
    for (start, end, part), data in saved.items():
        for wanted in ((0, 41), (-1, 40), (10, 10), (20, 10)):
            assert not target.backend.import_(0, (start, end), wanted, memoryview(data), part)
    assert target.backend.is_at(0, 0)
