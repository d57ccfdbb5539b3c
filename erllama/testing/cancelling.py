"""Cancel a piece of code at its first, second, third, … checkpoint, until it runs to its end.

Whatever a cancelled task leaves behind (a slot, a lease, a temporary file) shows up when this is
done for every checkpoint there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class CheckpointLimit(AssertionError):
    """The code passed more checkpoints than the caller allowed for."""


class _Countdown(trio.abc.Instrument):
    """Cancels `scope` when `task` is about to run for the k-th time."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, k: int) -> None:
        self._task, self._scope, self.left = task, scope, k

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.left -= 1
            if self.left == 0:
                self._scope.cancel()


async def cancel_at_every_checkpoint(
    attempt: Callable[[], Awaitable[object]],
    check: Callable[[], Awaitable[object]],
    *,
    most: int = 500,
) -> int:
    """Run `attempt` again and again, cancelled at its k-th step for k = 1, 2, …; `check` after each.

    Returns the number of runs until `attempt` ended uncancelled. Raises `CheckpointLimit` beyond `most`.
    """
    for k in range(1, most + 1):
        with trio.CancelScope() as scope:
            countdown = _Countdown(trio.lowlevel.current_task(), scope, k)
            trio.lowlevel.add_instrument(countdown)
            try:
                await attempt()
            finally:
                trio.lowlevel.remove_instrument(countdown)
        await check()
        if not scope.cancelled_caught and countdown.left > 0:
            return k
    raise CheckpointLimit(f"still not finished after being cancelled at {most} checkpoints")
