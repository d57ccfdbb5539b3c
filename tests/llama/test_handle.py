"""Owned pointers: deferred frees, refused use, one call at a time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from erllama.errors import HandleClosed
from erllama.llama.handle import Exclusive, Shared


class FakeLibrary:
    """Counts frees; a net is its own pointer, released by calling the destructor."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        nets: dict[int, Any] = {}

        def gc(ptr: int, destructor: Any) -> int:
            nets[ptr] = destructor
            return ptr

        self.ffi = SimpleNamespace(gc=gc, cast=lambda _type, ptr: ptr, release=lambda net: nets[net](net))

    def plain(self, name: str) -> Any:
        assert name == "free"
        return self.freed.append


def test_shared_frees_after_the_running_call() -> None:
    """B8: closing a handle in use answers "deferred"; the end of the call frees it, once."""
    lib: Any = FakeLibrary()
    handle = Shared(lib, 101, "free", "model")
    with handle as ptr:
        assert ptr == 101
        assert handle.close() == "deferred"
        assert handle.close() == "deferred"
        with pytest.raises(HandleClosed, match="this model is closed"), handle:
            pass
        assert lib.freed == []
    assert lib.freed == [101]
    assert handle.close() == "freed"
    assert lib.freed == [101]


def test_children_keep_their_parent() -> None:
    """B8: a parent is freed after its last child, in whatever order handles are closed."""
    lib: Any = FakeLibrary()
    parent = Shared(lib, 201, "free", "model")
    first = Exclusive(lib, 202, "free", "context", parent.owned)
    second = Exclusive(lib, 203, "free", "context", parent.owned)
    assert parent.close() == "deferred"
    first.close()
    assert lib.freed == [202]
    second.close()
    assert lib.freed == [202, 203, 201]
    assert parent.freed


def test_later_parents_are_kept_and_let_go() -> None:
    """A child can take on a parent for a while, as a context does with adapters."""
    lib: Any = FakeLibrary()
    adapter = Shared(lib, 301, "free", "adapter")
    context = Exclusive(lib, 302, "free", "context")
    context.owned.lean_on(adapter.owned)
    assert adapter.close() == "deferred"
    context.owned.let_go_of(adapter.owned)
    assert lib.freed == [301]
    context.close()
    assert lib.freed == [301, 302]


def test_shared_without_users_is_freed_at_once() -> None:
    """Closing an unused handle frees it there and then."""
    lib: Any = FakeLibrary()
    handle = Shared(lib, 401, "free", "model")
    assert handle.close() == "freed"
    assert lib.freed == [401]


def test_exclusive_free_waits_for_the_running_call() -> None:
    """B7: a free never interleaves with a call that is running."""
    lib: Any = FakeLibrary()
    handle = Exclusive(lib, 501, "free", "context")
    inside, leave = threading.Event(), threading.Event()

    def call() -> None:
        with handle:
            inside.set()
            assert leave.wait(5)
            assert lib.freed == []

    caller = threading.Thread(target=call)
    caller.start()
    assert inside.wait(5)
    closer = threading.Thread(target=handle.close)
    closer.start()
    assert lib.freed == []
    leave.set()
    caller.join()
    closer.join()
    assert lib.freed == [501]


def test_exclusive_refuses_use_after_close() -> None:
    """A closed handle raises `freed` and stays usable by nobody; closing again does nothing."""
    lib: Any = FakeLibrary()
    handle = Exclusive(lib, 501, "free", "context")
    handle.close()
    handle.close()
    with pytest.raises(HandleClosed) as caught, handle:
        pass
    assert caught.value.reason == "freed"
    assert lib.freed == [501]
