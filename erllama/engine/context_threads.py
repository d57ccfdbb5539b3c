"""How many threads one native context computes with, while the machine gives more or less of its cores."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import psutil

from .governor import ThreadGovernor

if TYPE_CHECKING:
    from erllama import llama

log = logging.getLogger("erllama.engine")


class ContextThreads:
    """Thread: that of the context."""

    def __init__(self, path: str, n_single: int, n_batch: int | None, *, adapt: bool) -> None:
        """`n_single` threads for single rows, `n_batch` (None: as many) for more; `adapt`: or fewer."""
        self._path = path
        self._n_single = n_single
        self._n_batch = n_single if n_batch is None else n_batch
        self._adapt = adapt and n_single > 1
        self._governor = self._fresh()

    def __repr__(self) -> str:
        return f"<ContextThreads of {self._path!r}: {self._governor or self._n_single}>"

    def _fresh(self) -> ThreadGovernor | None:
        return ThreadGovernor(self._n_single, time.monotonic(), _idle_s) if self._adapt else None

    def n_for(self, n_tokens: int) -> int:
        """Threads that llama.cpp computes so many tokens with."""
        if self._governor is not None:
            return self._governor.n
        return self._n_single if n_tokens == 1 else self._n_batch

    def opened(self, context: llama.Context) -> None:
        """A context was made, with all threads; what an earlier one found out still holds."""
        if self._governor is not None and self._governor.n != self._n_single:
            context.set_threads(self._governor.n, self._governor.n)

    def use_all(self, context: llama.Context) -> None:
        """What must have the same bits every time is computed with as many threads every time."""
        if self._governor is not None and self._governor.n != self._n_single:
            self._governor = self._fresh()
            context.set_threads(self._n_single, self._n_single)

    def observe(self, context: llama.Context, wall_s: float, cpu_s: float) -> None:
        """A call took so long, and so much CPU time of this process."""
        if self._governor is None:
            return
        before = self._governor.n
        after = self._governor.observe(wall_s, cpu_s, time.monotonic())
        if after != before:
            context.set_threads(after, after)
            log.info("%s: computing with %d threads now, was %d", self._path, after, before)


def _idle_s() -> float:
    """Seconds that this machine's cores have been idle, summed."""
    idle: float = psutil.cpu_times().idle
    return idle
