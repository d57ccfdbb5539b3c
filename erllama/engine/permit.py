"""The compute permit: CPU threads in flight, shared fairly by all models of this process.

Two contexts that compute at once with more threads than there are cores slow each other down by
a factor of 4 to 100, because ggml's threads spin at barriers. So a step takes as many tokens from
the permit as it has threads, and waiters are served strictly in order. Model threads wait here, not
the event loop; nothing in this file knows trio.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from erllama.options import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator


class ComputePermit:
    """A counting semaphore with first-come-first-served order and requests of any size."""

    def __init__(self, n_tokens: int) -> None:
        self._free = self.n_tokens = n_tokens
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def __repr__(self) -> str:
        return f"<ComputePermit {self._free}/{self.n_tokens} free, {len(self._waiting)} waiting>"

    @contextmanager
    def held(self, n_wanted: int) -> Iterator[None]:
        """Hold `n_wanted` tokens (at most all of them) for the block. Blocks the calling thread."""
        n = min(n_wanted, self.n_tokens)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= n)
            self._waiting.popleft()
            self._free -= n
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += n
                self._changed.notify_all()


PROCESS_PERMIT = ComputePermit(usable_cpus())
