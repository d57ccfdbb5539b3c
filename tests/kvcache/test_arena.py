"""The pooled arena: budgets before memory, reuse, and views that outlive their buffer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erllama.kvcache.arena import PAGE, Arena, class_bytes


@given(st.integers(0, 1 << 34))
def test_classes_waste_at_most_an_eighth(n: int) -> None:
    """Class sizes are page multiples, hold the request, and waste no more than 12.5 % above a page."""
    size = class_bytes(n)
    assert size >= n
    assert size % PAGE == 0
    assert n <= 8 * PAGE or size <= n * 1.125
    assert class_bytes(size) == size


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    """K4: a request above the budget gets None, and nothing was allocated for it."""
    arena = Arena(1 << 20)
    assert arena.try_take(6 << 20) is None
    assert arena.statistics().made == 0
    first = arena.try_take(900_000)
    assert first is not None
    assert arena.try_take(200_000) is None
    assert arena.shortfall(200_000) > 0
    first.release()
    assert arena.shortfall(200_000) == 0


def test_a_returned_buffer_is_used_again() -> None:
    """D8: equal blocks reuse each other's pages."""
    arena = Arena(1 << 20)
    for _ in range(10):
        buffer = arena.try_take(100_000)
        assert buffer is not None
        buffer.release()
        buffer.release()
    stats = arena.statistics()
    assert (stats.made, stats.reused, stats.used_bytes) == (1, 9, 0)
    assert arena.trim() == class_bytes(100_000)


def test_memory_never_exceeds_the_budget() -> None:
    """P12: used plus idle stays within the budget over a thousand takes and releases of mixed sizes."""
    arena, rng, held = Arena(3 << 20), random.Random(1), []
    for _ in range(1000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        buffer = arena.try_take(rng.randrange(1, 700_000))
        if buffer is not None:
            held.append(buffer)
        stats = arena.statistics()
        assert stats.used_bytes + stats.idle_bytes <= stats.max_bytes
    assert arena.statistics().reused > 0


@pytest.mark.parametrize("borrow", [lambda b: np.frombuffer(b.view, np.uint8), lambda b: b.view[5:9]])
def test_a_view_that_outlives_its_buffer_keeps_the_memory(borrow) -> None:
    """Rule 2: memory somebody still looks at is never given to anybody else; it is counted as lost."""
    arena = Arena(1 << 20)
    buffer = arena.try_take(100)
    assert buffer is not None
    buffer.view[:] = b"x" * 100
    looked_at = borrow(buffer)
    buffer.release()
    other = arena.try_take(100)
    assert other is not None
    other.view[:] = b"y" * 100
    assert bytes(looked_at[:4]) == b"xxxx"
    assert arena.statistics().lost == 1
    assert arena.statistics().used_bytes == other.held_bytes


def test_retained_buffers_live_until_the_last_release() -> None:
    """A buffer shared by store and reader goes back once."""
    arena = Arena(1 << 20)
    buffer = arena.try_take(10)
    assert buffer is not None
    buffer.retain()
    buffer.release()
    buffer.view[0] = 1
    buffer.release()
    with pytest.raises(ValueError, match="released"):
        buffer.view[0] = 1
    assert "released" in repr(buffer)
    assert "0 of" in repr(arena)


def test_charges_of_others_count() -> None:
    """The index and heads are charged to the same budget."""
    arena = Arena(10 * PAGE)
    arena.charge(9 * PAGE)
    assert arena.try_take(2 * PAGE) is None
    arena.charge(-9 * PAGE)
    assert arena.try_take(2 * PAGE) is not None
