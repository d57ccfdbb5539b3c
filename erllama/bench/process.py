"""Programs that run beside us for a block, on a leash."""

from __future__ import annotations

import contextlib
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from erllama.child import leashed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


@asynccontextmanager
async def running(command: Sequence[str], log: Path | None = None) -> AsyncIterator[subprocess.Popen[Any]]:
    """The program for the block; what it prints goes to `log`. It ends with the block, and with us.

    Cancellation: it is ended, and waited for: at most `child.KILL_AFTER_S`, in a thread.
    """
    with contextlib.ExitStack() as leash:
        output: Any = subprocess.DEVNULL
        if log is not None:
            output = leash.enter_context(await trio.to_thread.run_sync(log.open, "wb"))
        process = leash.enter_context(leashed(command, stdout=output))
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):  # bounded: what does not end is killed
                await trio.to_thread.run_sync(leash.close)
