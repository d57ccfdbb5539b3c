"""Count what a scenario does: Python calls, native calls, crossings to the model's thread, bytes moved.

Counts are the same on a busy machine and on an idle one, so a budget on them does not flake as one on
seconds would.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import erllama
from erllama.engine.actor import Actor

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = str(Path(erllama.__file__).parent)
TURN = Actor._turn.__code__
FAKES = str(Path(OURS) / "testing")  # what stands in for a model is not what is measured


class Meter:
    """Counts while it is `on`. Made before the model is loaded: threads take their hook when they start.

    `calls`: Python functions of erllama that were entered, on all threads; a coroutine counts each time it
    goes on, a fake's functions do not. `native`: calls into the binding, by name. `hops`: calls handed to a
    model's thread. `entries`: how often the actor's turn was begun or gone on with; before it goes
    on, everybody else may have run.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls = self.hops = self.entries = 0
        self.native: Counter[str] = Counter()

    def _hook(self, frame: Any, event: str, arg: Any) -> None:
        if not self.on:
            return
        if event == "call":
            file = frame.f_code.co_filename
            self.calls += file.startswith(OURS) and not file.startswith(FAKES)
            self.entries += frame.f_code is TURN
        elif event == "c_call":
            name = getattr(arg, "__name__", "")
            if name.startswith("el_"):
                self.native[name] += 1
            elif name == "put" and isinstance(getattr(arg, "__self__", None), queue.SimpleQueue):
                self.hops += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero for the block."""
        self.calls = self.hops = self.entries = 0
        self.native.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False

    @contextmanager
    def installed(self) -> Iterator[Meter]:
        """The hook, for the block, in this thread and those that start in it."""
        before, before_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield self
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)


class Moved:
    """Bytes that a backend's `export` wrote and its `import_` was given."""

    def __init__(self, backend: Any) -> None:
        self.exported = self.imported = 0
        self.backend = backend
        export, import_ = backend.export, backend.import_

        def counted_export(*args: Any, **more: Any) -> int:
            n: int = export(*args, **more)
            self.exported += n
            return n

        def counted_import(
            slot: int, block: Any, wanted: Any, data: memoryview, *rest: Any, **more: Any
        ) -> Any:
            self.imported += len(data)
            return import_(slot, block, wanted, data, *rest, **more)

        backend.export, backend.import_ = counted_export, counted_import
