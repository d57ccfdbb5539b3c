"""Compute threads that stay: how many there are, when they go, and that they change no bit."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from erllama.llama import Context, ContextParams

from .support import feed, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc"),
]


def n_tasks() -> int:
    """Threads of this process, as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


def test_threads_live_as_long_as_their_context(tiny: Callable[[str], Model]) -> None:
    """One context with three threads brings two to life; closing it, or losing it, ends them."""
    model = tiny("dense")
    gc.collect()
    before = n_tasks()
    context = Context.open(model, ContextParams(n_ctx=256, n_threads=3))
    assert n_tasks() == before + 2
    feed(context, [5, 6, 7])
    assert n_tasks() == before + 2, "a step made threads of its own"
    context.close()
    assert n_tasks() == before
    context = Context.open(model, ContextParams(n_ctx=256, n_threads=1, n_threads_batch=2))
    assert n_tasks() == before + 1
    del context
    gc.collect()
    assert n_tasks() == before


def test_more_threads_come_when_they_are_asked_for(
    tiny: Callable[[str], Model], open_context: OpenContext
) -> None:
    """One thread needs no other; what was added stays when fewer are used, and computes the same."""
    model = tiny("dense")
    before = n_tasks()
    context = open_context(model, n_ctx=256, n_threads=1)
    assert n_tasks() == before
    alone = feed(context, prompt(model, 20))
    for n in (2, 1, 4, 2):
        context.set_threads(n)
        context.memory.clear()
        assert np.array_equal(feed(context, prompt(model, 20)), alone), n
    # Two, and then four: ggml puts the first to sleep when it meets the second, so both stay.
    assert n_tasks() == before + 1 + 3
    context.close()
    assert n_tasks() == before


def test_a_cancelled_step_leaves_the_threads_usable(
    tiny: Callable[[str], Model], open_context: OpenContext
) -> None:
    """After an abort the next step computes with the same threads."""
    model = tiny("dense")
    context = open_context(model, n_ctx=256, n_threads=2)
    expected = feed(context, prompt(model, 20))
    for _ in range(3):
        context.memory.clear()
        context.abort.raise_flag()
        with pytest.raises(AssertionError):
            feed(context, prompt(model, 20))
        context.abort.clear()
        context.memory.clear()
        assert np.array_equal(feed(context, prompt(model, 20)), expected)
