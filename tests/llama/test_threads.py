"""Compute threads that stay: how many there are, when they go, and that they change no bit."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from erllama.llama import Context, ContextParams

from .support import feed, prompt, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc"),
]


class NewTasks:
    """Threads of this process that came after this was made, as the kernel counts them."""

    def __init__(self) -> None:
        gc.collect()
        self._before = set(os.listdir("/proc/self/task"))

    def n(self) -> int:
        """How many live now."""
        return len(set(os.listdir("/proc/self/task")) - self._before)

    def cpu_s(self) -> float:
        """Processor time that they have used, seconds."""
        used = 0
        for task in set(os.listdir("/proc/self/task")) - self._before:
            fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])
        return used / os.sysconf("SC_CLK_TCK")


def test_threads_live_as_long_as_their_context(tiny: Callable[[str], Model]) -> None:
    """One context with three threads brings two to life; closing it, or losing it, ends them."""
    model = tiny("dense")
    new = NewTasks()
    context = Context.open(model, ContextParams(n_ctx=256, n_threads=3))
    assert new.n() == 2
    feed(context, [5, 6, 7])
    assert new.n() == 2, "a step made threads of its own"
    context.close()
    assert new.n() == 0
    context = Context.open(model, ContextParams(n_ctx=256, n_threads=1, n_threads_batch=2))
    assert new.n() == 1
    del context
    gc.collect()
    assert new.n() == 0


def test_each_number_of_threads_has_its_own(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """One thread needs no other; what was made stays when fewer are used, and computes the same."""
    model = tiny("dense")
    new = NewTasks()
    context = open_context(model, n_ctx=256, n_threads=1)
    assert new.n() == 0
    alone = feed(context, prompt(model, 20))
    for n in (2, 1, 4, 2):
        context.set_threads(n)
        context.memory.clear()
        assert np.array_equal(feed(context, prompt(model, 20)), alone), n
    assert new.n() == 1 + 3
    context.close()
    assert new.n() == 0


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 3), (1, 3))])
def test_threads_that_are_not_used_do_not_run(
    tiny: Callable[[str], Model],
    open_context: OpenContext,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    """Single rows with one thread leave the threads of other steps asleep: they would spin behind each."""
    model = tiny("dense")
    new = NewTasks()
    context = open_context(model, n_ctx=512, n_threads=before[0], n_threads_batch=before[1])
    feed(context, prompt(model, 20))
    context.set_threads(*after)
    step(context, 5, 20)
    time.sleep(0.1)  # what spun behind the last graph of theirs is asleep
    spent = new.cpu_s()
    for pos in range(21, 221):
        step(context, 5, pos)
    assert new.cpu_s() - spent <= 0.05
    assert new.n() >= 1


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
