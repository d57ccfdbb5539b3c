"""Owned native pointers: who may use one, and when it is really freed.

Rule 1: a pointer is only ever reached through `Shared` or `Exclusive`; a closed one raises.
Rule 2: a free never overlaps a running call. `Shared` postpones it, `Exclusive` waits for the call.
Rule 3: a native object is freed when its last user lets go: its own handle, and every child made from
it. The order in which handles are closed or collected does not matter.

The garbage collector may run a destructor at any bytecode, in any thread, and in any order within a
cycle. So ownership is kept here (`_owned`), outside of what can be collected, and changes by single
atomic operations on sets and dicts instead of under a lock.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

from erllama.errors import HandleClosed

if TYPE_CHECKING:
    from .ffi import Library

Closed = Literal["freed", "deferred"]

_owned: dict[int, Owned] = {}


class Owned:
    """A native object, the users that keep it, and the parents it keeps in turn."""

    def __init__(
        self, lib: Library, ptr: Any, free: str, parents: tuple[Owned, ...] = (), keep: tuple[Any, ...] = ()
    ) -> None:
        """`keep`: what native memory points to until the free."""
        self.key = int(lib.ffi.cast("uintptr_t", ptr))
        self._ptr = ptr
        self._free = lib.plain(free)
        self._keep = keep
        self._users: set[Owned] = {self}
        self._parents: set[Owned] = set()
        for parent in parents:
            self.lean_on(parent)
        _owned[self.key] = self

    def lean_on(self, parent: Owned) -> None:
        """Keep `parent` at least as long as this."""
        self._parents.add(parent)
        parent._users.add(self)

    def let_go_of(self, parent: Owned) -> None:
        """Undo `lean_on`; frees the parent if nobody else keeps it."""
        self._parents.discard(parent)
        parent.drop(self)

    def drop(self, user: Owned) -> None:
        """One user less; the last one frees."""
        self._users.discard(user)
        if not self._users and _owned.pop(self.key, None) is not None:
            self._free(self._ptr)
            for parent in tuple(self._parents):
                self.let_go_of(parent)

    @property
    def freed(self) -> bool:
        """True once the native object is gone."""
        return _owned.get(self.key) is not self


def _collect(ptr: Any) -> None:
    """The net: the handle of a pointer was closed, or dropped without being closed."""
    owned = _owned.get(int(ptr))
    if owned is not None:
        owned.drop(owned)


def _netted(lib: Library, owned: Owned) -> Any:
    """A token whose collection or release drops the handle's hold on `owned`."""
    return lib.ffi.gc(lib.ffi.cast("void *", owned.key), lambda ptr: _collect(lib.ffi.cast("uintptr_t", ptr)))


class Shared:
    """A pointer many threads may use at once: `with handle as ptr:`."""

    def __init__(self, lib: Library, ptr: Any, free: str, what: str, *parents: Owned, keep: Any = ()) -> None:
        self.owned = Owned(lib, ptr, free, parents, tuple(keep))
        self._lib = lib
        self._ptr = ptr
        self._what = what
        self._lock = threading.Lock()
        self._n_calls = 0
        self._closed = False
        self._net: Any = _netted(lib, self.owned)

    def __enter__(self) -> Any:
        with self._lock:
            if self._closed:
                raise HandleClosed(f"this {self._what} is closed")
            self._n_calls += 1
            return self._ptr

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_calls -= 1
            net = self._take_net()
        self._release(net)

    def close(self) -> Closed:
        """Refuse further use; "freed" if it is free now, "deferred" if its last user will free it."""
        with self._lock:
            self._closed = True
            net = self._take_net()
        self._release(net)
        return "freed" if self.freed else "deferred"

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._closed

    @property
    def freed(self) -> bool:
        """True once the native object is gone."""
        return self.owned.freed

    def _take_net(self) -> Any:
        if not self._closed or self._n_calls > 0:
            return None
        net, self._net = self._net, None
        return net

    def _release(self, net: Any) -> None:
        if net is not None:
            self._lib.ffi.release(net)


class Exclusive:
    """A pointer one call at a time may use: `with handle as ptr:`."""

    def __init__(self, lib: Library, ptr: Any, free: str, what: str, *parents: Owned, keep: Any = ()) -> None:
        self.owned = Owned(lib, ptr, free, parents, tuple(keep))
        self._lib = lib
        self._ptr: Any = ptr
        self._what = what
        self._lock = threading.RLock()
        self._net: Any = _netted(lib, self.owned)

    def __enter__(self) -> Any:
        self._lock.acquire()
        if self._ptr is None:
            self._lock.release()
            raise HandleClosed(f"this {self._what} is closed")
        return self._ptr

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Free now, after the call that is running. Idempotent."""
        with self._lock:
            net, self._net, self._ptr = self._net, None, None
            if net is not None:
                self._lib.ffi.release(net)

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._ptr is None


class Several:
    """Exclusive pointers for one call over all: `with Several(handles) as ptrs:`; None for closed ones."""

    def __init__(self, handles: list[Exclusive]) -> None:
        self._handles = handles

    def __enter__(self) -> list[Any]:
        for handle in sorted(
            self._handles, key=id
        ):  # in the same order everywhere: no two wait for each other
            handle._lock.acquire()
        return [handle._ptr for handle in self._handles]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle._lock.release()
