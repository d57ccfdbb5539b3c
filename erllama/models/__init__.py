"""Small models that come from the Python package index, fetched once and checked by hash.

`known` is the table of them, `fetch` brings one into the user's cache directory. Called by `cli` and
by the tests; knows nothing of llama.cpp. A model file that the caller names is never touched here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import outcome
import trio

from .fetch import cache_dir as cache_dir
from .fetch import fetch as fetch
from .fetch import models_dir as models_dir
from .known import GEMMA3_270M as GEMMA3_270M
from .known import SMOLLM2_135M as SMOLLM2_135M
from .known import PackagedModel as PackagedModel
from .known import Wheel as Wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def default_model(progress: Callable[[float], None] | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct, fetched on the first call (98 MB), found on later ones.

    `progress` is called with the finished share, 0 to 1, while something is being fetched.
    Raises: `FetchFailed`. Thread: blocks; from trio use `default_model_async`.
    """
    return fetch(SMOLLM2_135M, progress)


async def default_model_async(progress: Callable[[float], None] | None = None) -> Path:
    """`default_model` for trio tasks. `progress` is called from a worker thread."""
    return await fetch_async(SMOLLM2_135M, progress)


async def fetch_async(model: PackagedModel, progress: Callable[[float], None] | None = None) -> Path:
    """`fetch` in a worker thread.

    Cancellation: the download is stopped, its temporary files are removed, then Cancelled is raised.
    """
    stop = threading.Event()
    ended: list[outcome.Outcome[Path]] = []

    async def work() -> None:
        # Captured, so that an error leaves as itself and not wrapped in the nursery's group.
        ended.append(
            await trio.to_thread.run_sync(lambda: outcome.capture(fetch, model, progress, stop=stop))
        )
        nursery.cancel_scope.cancel()

    # The caller's task waits for the nursery and not for the thread: there Ctrl-C reaches it.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_set_when_cancelled, stop)
        nursery.start_soon(work)
    await trio.lowlevel.checkpoint_if_cancelled()
    return ended[0].unwrap()


async def _set_when_cancelled(stop: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        stop.set()
