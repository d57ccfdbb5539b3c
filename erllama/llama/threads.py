"""The compute threads of one context: kept from graph to graph, asleep in between.

Without them ggml makes new threads for every graph. That costs 2 to 3 % of a step of a small model on a quiet
machine, and more on a busy one, where each has to be scheduled for the first time before the step can begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .handle import Owned

if TYPE_CHECKING:
    from .ffi import Library

# How long threads spin for the next graph before they sleep, in 131,072 rounds: a few milliseconds, more than
# lies between two steps. Spinning longer takes a core from this event loop, or from another model.
POLL = 1


class ComputeThreads:
    """Attaches threads to a context as it asks for more, and never for one alone."""

    def __init__(self, lib: Library, context: Owned) -> None:
        self._lib = lib
        self._context = context
        self.n = 1  # the thread that calls is one of them

    def __repr__(self) -> str:
        return f"<ComputeThreads {self.n}>"

    def provide(self, context_ptr: Any, n: int) -> None:
        """At least `n` threads from the next graph on. Thread: who holds the context.

        Fewer are kept until the context is freed: ggml looks at them once more when others take over.
        """
        if n <= self.n:
            return
        threads = self._lib.threads_new(n, POLL)
        if threads == self._lib.ffi.NULL:
            return  # no CPU backend that offers them: ggml makes its own
        owned = Owned(self._lib, threads, "threads_free")
        self._context.lean_on(owned)
        owned.drop(owned)  # from now on the context alone keeps them
        self._lib.attach_threadpool(context_ptr, threads, threads)
        self.n = n
