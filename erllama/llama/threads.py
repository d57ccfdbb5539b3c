"""The compute threads of one context: kept from graph to graph.

Without them ggml makes new threads for every graph, and each has to be scheduled for the first time before a
step can begin. What that costs is in docs/performance.md: a little with one request, nothing seen with many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .handle import Owned

if TYPE_CHECKING:
    from .ffi import Library

# How long threads spin for the next graph before they sleep, in 131,072 rounds: not at all. A few
# milliseconds (1) gained nothing with one request, and took cores from this event loop and from other models.
POLL = 0


class ComputeThreads:
    """One pool for each number of threads that a context computes with, none for one thread.

    ggml wakes all threads of a pool for each graph: those that it does not use would spin.
    """

    def __init__(self, lib: Library, context: Owned) -> None:
        self._lib = lib
        self._context = context
        self._pools: dict[int, Any] = {1: lib.ffi.NULL}  # the thread that calls is one of them

    def __repr__(self) -> str:
        return f"<ComputeThreads {sorted(self._pools)}>"

    def provide(self, context_ptr: Any, n_single: int, n_batch: int) -> None:
        """Exactly so many threads for single rows and for more. Thread: the context's.

        All pools stay until the context is freed: ggml looks at one once more when another takes over.
        """
        self._lib.attach_threadpool(context_ptr, self._pool(n_single), self._pool(n_batch))

    def _pool(self, n: int) -> Any:
        if n not in self._pools:
            threads = self._pools[n] = self._lib.threads_new(n, POLL)
            if threads != self._lib.ffi.NULL:
                owned = Owned(self._lib, threads, "threads_free")
                self._context.lean_on(owned)
                owned.drop(owned)  # from now on the context alone keeps them
        return self._pools[n]
