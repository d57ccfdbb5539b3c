"""Owned native pointers: who may use one, and when it is really freed.

Rule 1: a pointer is only ever reached through `Shared` or `Exclusive`; a closed one raises.
Rule 2: a free never overlaps a running call. `Shared` postpones it, `Exclusive` waits for the call.
Rule 3: the `ffi.gc` destructor is a net for handles nobody closed; closing releases it at once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

from erllama.errors import HandleClosed

if TYPE_CHECKING:
    from .ffi import Library

Closed = Literal["freed", "deferred"]


class Shared:
    """A pointer many threads may use at once; freed when closed and no longer used.

    Users are running calls and child handles alike: `retain()`/`release()`, or `with`.
    """

    def __init__(self, lib: Library, ptr: Any, free: str, what: str, *keep: Any) -> None:
        self._lib = lib
        self._what = what
        self._lock = threading.Lock()
        self._n_users = 0
        self._closed = False
        self._ptr: Any = lib.ffi.gc(ptr, lib.destructor(free, *keep))

    def retain(self) -> Any:
        """The pointer, which stays valid until `release()`. Raises: `HandleClosed`."""
        with self._lock:
            if self._closed:
                raise HandleClosed(f"this {self._what} is closed")
            self._n_users += 1
            return self._ptr

    def release(self) -> None:
        """Undo one `retain()`; frees if this was the last user of a closed handle."""
        with self._lock:
            self._n_users -= 1
            doomed = self._take_if_free()
        self._free(doomed)

    __enter__ = retain

    def __exit__(self, *_: object) -> None:
        self.release()

    def close(self) -> Closed:
        """Refuse new users; "freed" if it is free now, "deferred" if the last user will free it."""
        with self._lock:
            self._closed = True
            doomed = self._take_if_free()
            answer: Closed = "freed" if self._ptr is None else "deferred"
        self._free(doomed)
        return answer

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._closed

    @property
    def freed(self) -> bool:
        """True once the native object is gone."""
        return self._ptr is None

    def _take_if_free(self) -> Any:
        if not self._closed or self._n_users > 0:
            return None
        doomed, self._ptr = self._ptr, None
        return doomed

    def _free(self, doomed: Any) -> None:
        if doomed is not None:
            self._lib.ffi.release(doomed)


class Exclusive:
    """A pointer one call at a time may use: `with handle as ptr:`."""

    def __init__(self, lib: Library, ptr: Any, free: str, what: str, *keep: Any) -> None:
        self._lib = lib
        self._what = what
        self._lock = threading.RLock()
        self._ptr: Any = lib.ffi.gc(ptr, lib.destructor(free, *keep))

    def __enter__(self) -> Any:
        self._lock.acquire()
        if self._ptr is None:
            self._lock.release()
            raise HandleClosed(f"this {self._what} is closed")
        return self._ptr

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> bool:
        """Free now, after the call that is running; False if it was closed before."""
        with self._lock:
            doomed, self._ptr = self._ptr, None
            if doomed is None:
                return False
            self._lib.ffi.release(doomed)
            return True

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._ptr is None
