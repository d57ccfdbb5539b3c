"""Owned pointers: deferred frees, refused use, one call at a time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from erllama.errors import HandleClosed
from erllama.llama.handle import Exclusive, Shared


class FakeLibrary:
    """Counts frees; `gc` hands out the pointer itself."""

    def __init__(self) -> None:
        self.freed: list[Any] = []
        self.ffi = SimpleNamespace(gc=lambda ptr, _free: ptr, release=self.freed.append)

    def destructor(self, name: str, *_keep: object) -> str:
        return name


def test_shared_frees_with_its_last_user() -> None:
    """B8: closing a handle in use answers "deferred"; the last user frees it, once."""
    lib: Any = FakeLibrary()
    handle = Shared(lib, "p", "free", "model")
    assert handle.retain() == "p"
    assert handle.retain() == "p"
    assert handle.close() == "deferred"
    assert handle.close() == "deferred"
    with pytest.raises(HandleClosed, match="this model is closed"):
        handle.retain()
    handle.release()
    assert lib.freed == []
    handle.release()
    assert lib.freed == ["p"]
    assert handle.close() == "freed"
    assert lib.freed == ["p"]


def test_shared_without_users_is_freed_at_once() -> None:
    """Closing an unused handle frees it there and then."""
    lib: Any = FakeLibrary()
    handle = Shared(lib, "p", "free", "model")
    assert handle.close() == "freed"
    assert handle.freed


def test_exclusive_free_waits_for_the_running_call() -> None:
    """B7: a free never interleaves with a call that is running."""
    lib: Any = FakeLibrary()
    handle = Exclusive(lib, "p", "free", "context")
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
    assert lib.freed == ["p"]


def test_exclusive_refuses_use_after_close() -> None:
    """A closed handle raises `freed` and stays usable by nobody; closing again does nothing."""
    lib: Any = FakeLibrary()
    handle = Exclusive(lib, "p", "free", "context")
    assert handle.close()
    assert not handle.close()
    with pytest.raises(HandleClosed) as caught, handle:
        pass
    assert caught.value.reason == "freed"
    assert lib.freed == ["p"]
