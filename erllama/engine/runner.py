"""Where a backend's calls run: one OS thread per model, or inline for backends without native code.

A call, once begun, is never abandoned: native code would go on writing memory that others use. So a
cancelled caller waits for the call to end; `on_cancel` is what makes it end sooner. One crossing
costs two hand-overs (50-100 µs idle); the engine therefore crosses at most once per step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import outcome
import trio

T = TypeVar("T")
Announce = Callable[..., None]  # calls its first argument with the others, soon, in the trio thread


class Runner(Protocol):
    """Runs the calls of one backend, one at a time, in order."""

    async def run(self, fn: Callable[..., T], *args: Any, on_cancel: Callable[[], None] | None = None) -> T:
        """Call `fn(*args)` and return its result.

        Cancellation: calls `on_cancel` once, waits for `fn`, then raises `Cancelled` if `fn` returned.
        """

    def announce(self) -> Announce | None:
        """What a call may use to tell the trio thread something before it ends, in order with its end.

        None where calls run in the trio thread themselves.
        """

    def close(self) -> None:
        """No further calls. Idempotent; does not wait."""


class ThreadRunner:
    """A dedicated OS thread: a queue in, `run_sync_soon` out."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._closed = False

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its arguments must not live until the next one

    async def run(self, fn: Callable[..., T], *args: Any, on_cancel: Callable[[], None] | None = None) -> T:
        """See `Runner.run`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        token = trio.lowlevel.current_trio_token()
        task = trio.lowlevel.current_task()
        cancelled = False
        pending = [(fn, args)]

        def call() -> None:
            made, given = pending.pop()
            result = outcome.capture(made, *given)
            # The caller may release buffers as soon as it is told: nothing here may look at them any more.
            del made, given
            token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.Value(result))

        def abort_fn(_: Any) -> trio.lowlevel.Abort:
            nonlocal cancelled
            cancelled = True
            if on_cancel is not None:
                on_cancel()
            return trio.lowlevel.Abort.FAILED

        self._calls.put(call)
        result = await trio.lowlevel.wait_task_rescheduled(abort_fn)
        if cancelled and isinstance(result, outcome.Value):
            await trio.lowlevel.checkpoint_if_cancelled()
        return result.unwrap()  # type: ignore[no-any-return]  # outcome is untyped here

    def announce(self) -> Announce:
        """See `Runner.announce`."""
        return trio.lowlevel.current_trio_token().run_sync_soon

    def close(self) -> None:
        """End the thread once its present call is done."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)


class InlineRunner:
    """Calls in the trio thread, `delay_s` of (mock) time each: for arithmetic backends in tests."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._delay_s = delay_s
        self._turn = trio.Lock()  # fair: calls of several tasks keep their order

    async def run(self, fn: Callable[..., T], *args: Any, on_cancel: Callable[[], None] | None = None) -> T:
        """See `Runner.run`. The delay passes before `fn` and cannot be cancelled, like a native call."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            await self._turn.acquire()
            await trio.sleep(self._delay_s())
        try:
            return fn(*args)
        finally:
            self._turn.release()

    @property
    def has_waiting(self) -> bool:
        """Whether a call waits for another one to end."""
        return self._turn.statistics().tasks_waiting > 0

    def announce(self) -> Announce | None:
        """See `Runner.announce`."""
        return None

    def close(self) -> None:
        """Nothing to end."""
