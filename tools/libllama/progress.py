"""What the person in front of the terminal sees while the build runs.

On a terminal a step's progress rewrites one line; in a log file it becomes a line every few seconds,
so that neither is silent for minutes and neither scrolls for pages.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_PACE_AFTER = 20  # objects; the first few tell nothing about the rest
# How ninja, with the status we give it, spells "so many of so many".
_COUNTER = re.compile(r"^\[(\d+)/(\d+)\] ?(.*)")


class Progress:
    """Prints steps and their progress; `clock` and `out` are replaceable for tests."""

    def __init__(
        self,
        out: TextIO | None = None,
        *,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out if out is not None else sys.stderr
        self._live = self._out.isatty()
        self._every_s = every_s
        self._clock = clock
        self._open_line = False
        self._last = clock() - every_s
        self._step_began = clock()

    def step(self, text: str) -> None:
        """Begin a step; its text stays on screen."""
        self._end_line()
        self._step_began = self._clock()
        self._last = self._clock() - self._every_s
        print(f"==> {text}", file=self._out, flush=True)

    def note(self, text: str) -> None:
        """A fact worth keeping, below its step."""
        self._end_line()
        print(f"    {text}", file=self._out, flush=True)

    def update(self, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Progress inside a step: rewritten in place on a terminal, thinned out elsewhere."""
        line = f"    {_bar(done, total)}{text}" if done is not None and total else f"    {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[2K" + line[:width], end="", file=self._out, flush=True)
            self._open_line = True
        elif self._clock() - self._last >= self._every_s or (done is not None and done == total):
            self._last = self._clock()
            print(f"{line}  ({self.elapsed_s:.0f} s)", file=self._out, flush=True)

    def feed(self, line: str) -> None:
        """Take one line of a running command's output as progress, if it counts something."""
        if found := _COUNTER.match(line):
            done, total = int(found[1]), int(found[2])
            self.update(_shorten(found[3]) + self._left(done, total), done=done, total=total)

    def _left(self, done: int, total: int) -> str:
        """How long the rest will take at the pace so far, once there is a pace."""
        left_s = self.elapsed_s / done * (total - done) if done else 0.0
        if done < _PACE_AFTER or left_s < 60:
            return ""
        return f", about {left_s / 60:.0f} min left"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the current step began."""
        return self._clock() - self._step_began

    def _end_line(self) -> None:
        if self._open_line:
            print(file=self._out, flush=True)
            self._open_line = False

    def close(self) -> None:
        """Leave the cursor on a fresh line."""
        self._end_line()


def _bar(done: int, total: int, width: int = 20) -> str:
    full = width * done // total
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total} "


def _shorten(command: str) -> str:
    """`Building CXX object a/CMakeFiles/b.dir/c.cpp.o` → `c.cpp (b)`: what is compiled, not where to."""
    path = command.rsplit(" ", 1)[-1]
    name = path.rsplit("/", 1)[-1]
    target = re.search(r"CMakeFiles/([^/]+)\.dir/", path)
    if target and name.endswith(".o"):
        return f"{name.removesuffix('.o')} ({target[1]})"
    return name or command
