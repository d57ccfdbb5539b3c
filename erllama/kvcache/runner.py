"""Where blocking file work runs: worker threads with a limiter of their own, or inline in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Runner(Protocol):
    """Runs a blocking function; its effect is never abandoned half-way."""

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T:
        """The function's result. Cancellation: takes effect before or after the call, not during it."""
        ...


class ThreadRunner:
    """Worker threads, at most `n_threads` at once, so that file work cannot starve other thread users."""

    def __init__(self, n_threads: int) -> None:
        self._limiter = trio.CapacityLimiter(n_threads)

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See `Runner`."""
        return await trio.to_thread.run_sync(fn, *args, limiter=self._limiter)


class InlineRunner:
    """Runs everything in the caller's thread, for tests with a fake clock."""

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T:
        """See `Runner`."""
        await trio.lowlevel.checkpoint()
        return fn(*args)
