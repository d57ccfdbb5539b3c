"""llama.cpp's log lines, into Python's logging.

The native callback queues lines (shim_log.cpp); one daemon thread here takes them out and logs them
as `llama.cpp`: warnings and errors as such, all else as DEBUG. `captured()` additionally collects the
lines of the calling thread, for error messages.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .ffi import Library

log = logging.getLogger("llama.cpp")
log.addHandler(logging.NullHandler())  # without any handler Python would print warnings to stderr

# ggml.h: enum ggml_log_level. Its INFO is for developers of llama.cpp: hundreds of lines a load.
LEVELS = {3: logging.WARNING, 4: logging.ERROR}
# Errors that only say that a decode was aborted (ggml.h: status 1; llama.h: code 2), which was our doing.
OUR_ABORTS = (
    "sched_graph_compute_async failed with error 1",
    "failed to compute graph, compute status: 1",
    "failed to decode, ret = 2",
)
CLEARING = "decode: removing memory module entries"  # follows every failed decode, whose error says more
DEBUG, INFO, WARN, ERROR = 1, 2, 3, 4

WAIT_MS = 60_000  # an upper bound only: a line or a shutdown wakes the thread at once
CAPTURE_BYTES = 65_536

_lock = threading.Lock()
_drainer: threading.Thread | None = None


def install_logs(lib: Library) -> None:
    """Route every native log line to the `llama.cpp` logger; again after `shutdown_logs()`.

    Lines below the logger's level at this moment are dropped in C.
    """
    global _drainer
    with _lock:
        if _drainer is None:
            lib.log_install(DEBUG if log.isEnabledFor(logging.DEBUG) else INFO)
            _drainer = threading.Thread(target=_drain, args=(lib,), name="erllama-logs", daemon=True)
            _drainer.start()
            atexit.register(shutdown_logs, lib)


def shutdown_logs(lib: Library) -> None:
    """Log what is queued, end the thread, drop later lines. The native callback stays installed."""
    global _drainer
    with _lock:
        if _drainer is not None:
            lib.log_shutdown()
            _drainer.join()
            _drainer = None
            atexit.unregister(shutdown_logs)


def _drain(lib: Library) -> None:
    line = lib.ffi.new("struct el_log_line *")
    while True:
        if lib.log_wait(line, WAIT_MS):
            _emit(lib, line)
        elif not lib.log_is_open():
            return


def _emit(lib: Library, line: Any) -> None:
    text = lib.ffi.buffer(line.text, line.n_bytes)[:].decode("utf-8", "replace")
    if line.n_dropped:
        log.warning("%d log lines of llama.cpp were dropped", line.n_dropped)
    is_routine = text.endswith(OUR_ABORTS) or text.startswith(CLEARING)
    level = logging.DEBUG if is_routine else LEVELS.get(line.level, logging.DEBUG)
    log.log(level, "%s", text, extra={"native_thread": line.thread_id})


@dataclass
class CapturedLog:
    """The lines of one native call, oldest first, as (level, text)."""

    lines: list[tuple[int, str]] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """The lines of level error."""
        return [text for level, text in self.lines if level == ERROR]

    def tail(self, n: int = 4) -> str:
        """The last error lines, or the last lines of any level if there is none, joined by `; `."""
        chosen = self.errors or [text for _, text in self.lines]
        return "; ".join(chosen[-n:]) or "no log output"


@contextmanager
def captured(lib: Library) -> Iterator[CapturedLog]:
    """Collect the log lines of the calling thread. Not to be nested."""
    result = CapturedLog()
    lib.capture_begin()
    try:
        yield result
    finally:
        buffer = lib.ffi.new("char[]", CAPTURE_BYTES)
        n = lib.capture_end(buffer, CAPTURE_BYTES)
        for raw in lib.ffi.buffer(buffer, n)[:].decode("utf-8", "replace").splitlines():
            if raw[:1].isdigit():
                result.lines.append((int(raw[0]), raw[1:]))
