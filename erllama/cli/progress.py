"""Progress bars and warnings on stderr, and the default model with a bar."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def bar(title: str, *, announce: bool = False) -> Iterator[Callable[[float], None]]:
    """A callable that takes the finished share, 0 to 1, and draws it.

    The bar appears with the first call and is gone when the block ends. Where stderr is no terminal
    there is no bar; with `announce` the title is printed there instead, once. Any thread may call.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Few redraws: they share the interpreter with the engine's event loop.
    display = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task = display.add_task(title, total=1.0, start=False)
    begun = False

    def draw(share: float) -> None:
        nonlocal begun
        if not begun:
            begun = True
            display.start_task(task)
            if console.is_terminal:
                display.start()
            elif announce:
                print(f"{title} …", file=sys.stderr, flush=True)
        display.update(task, completed=share)

    try:
        yield draw
    finally:
        if console.is_terminal:
            display.stop()


class _OneLine(logging.Handler):
    """Each record is one line on stderr, in the form of the command's errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        print(f"erllama: {' '.join(record.getMessage().split())}", file=sys.stderr, flush=True)


@contextmanager
def show_warnings() -> Iterator[None]:
    """For the block, what erllama warns of appears on stderr."""
    handler, log = _OneLine(logging.WARNING), logging.getLogger("erllama")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


async def default_path() -> Path:
    """Where the default model lies; fetched with a bar if it is not there yet.

    Raises: `FetchFailed`.
    """
    from erllama import models

    size = models.SMOLLM2_135M.n_bytes / 1e6
    with bar(f"Fetching {models.SMOLLM2_135M.file} ({size:.0f} MB)", announce=True) as draw:
        return await models.default_model_async(draw)
