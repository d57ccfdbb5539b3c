"""The one door to the native library.

`library()` imports the binding of one backend, once, and refuses a missing or stale one. What it
returns is a facade: `lib.decode(...)` calls `el_decode`, and an exception that C++ threw arrives as
`NativeError`. Nothing outside `erllama/llama/` sees a cffi object, and nothing inside calls the raw
library.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erllama.errors import NativeError, NativeLibraryError

from . import stamp

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE_DIR = Path(__file__).resolve().parent
NATIVE_DIR = PACKAGE_DIR / "_native"
BUILD_COMMAND = "python build_libllama.py"
CHECKOUT = PACKAGE_DIR.parent.parent  # where the sources lie, if this is no installation

OUT_OF_MEMORY = 1  # struct el_error.kind


class _ThreadError(threading.local):
    """One `struct el_error` per thread, so that a call allocates none."""

    def __init__(self, ffi: Any) -> None:
        self.err = ffi.new("struct el_error *")


class Library:
    """The wrappers as attributes, without their `el_` prefix; plus `ffi` and where it was loaded from.

    Each call releases the GIL. Raises (from any call): `NativeError`.
    """

    def __init__(self, binding: Any, native_dir: Path) -> None:
        self.ffi: Any = binding.ffi
        self.native_dir = native_dir
        self.backend = native_dir.name
        self._raw = binding.lib
        self._errors = _ThreadError(self.ffi)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raw = getattr(self._raw, "el_" + name)
        errors = self._errors
        text = self.ffi.string

        def call(*args: Any) -> Any:
            err = errors.err
            result = raw(*args, err)
            if err.kind:
                raise take_error(err, name, text)
            return result

        call.__name__ = name
        self.__dict__[name] = call  # found directly from now on
        return call

    def constant(self, prefix: str, name: str) -> int:
        """The number of an enumerator of the pin: `constant("LLAMA_SPLIT_MODE", "row")`."""
        return int(getattr(self._raw, f"{prefix}_{name.upper()}"))

    def plain(self, name: str) -> Callable[[Any], None]:
        """`el_<name>` for freeing one pointer, with an error struct of its own that nobody reads.

        The collector may call it in the middle of another call, whose error it must not touch.
        """
        raw = getattr(self._raw, "el_" + name)
        err = self.ffi.new("struct el_error *")

        def free(ptr: Any) -> None:
            raw(ptr, err)

        return free


def take_error(err: Any, name: str, text: Callable[[Any], bytes]) -> NativeError:
    """What a `struct el_error` says, which is empty again afterwards."""
    kind, message = err.kind, text(err.message).decode("utf-8", "replace")
    err.kind = 0
    return NativeError(
        f"{name}: {message}", reason="oom" if kind == OUT_OF_MEMORY else "exception", detail={"call": name}
    )


_lock = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """The native library, loaded on first use.

    Raises: `NativeLibraryError` if it is missing, was built from other sources, or cannot be loaded.
    Thread: any.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = load(choose_native_dir())
    return _library


def choose_native_dir(root: Path = NATIVE_DIR) -> Path:
    """The folder of the backend named by ERLLAMA_BACKEND, else of the first one built, CPU last."""
    wanted = os.environ.get("ERLLAMA_BACKEND")
    if wanted:
        return root / wanted
    built = sorted(
        (path for path in (root.iterdir() if root.is_dir() else ()) if (path / stamp.STAMP_FILE).is_file()),
        key=lambda path: (path.name == "cpu", path.name),
    )
    return built[0] if built else root / "cpu"


def build_advice(backend: str, checkout: Path = CHECKOUT) -> str:
    """What to run to have this backend's library: a build among the sources, else a new installation."""
    if (checkout / "build_libllama.py").is_file():
        return f"run: {BUILD_COMMAND}" + ("" if backend == "cpu" else f" --backend {backend}")
    chosen = "" if backend == "cpu" else f"ERLLAMA_BACKEND={backend} "
    return f"install it again: {chosen}pip install --force-reinstall --no-binary erllama erllama"


def load(native_dir: Path, package_dir: Path = PACKAGE_DIR) -> Library:
    """Import the binding in `native_dir` and check its stamp."""
    expected = stamp.expected_stamp(native_dir, package_dir)
    path = _binding_path(native_dir)
    if expected is None or path is None:
        raise NativeLibraryError(
            f"erllama's native library is not built ({native_dir} holds no binding for this Python); "
            f"{build_advice(native_dir.name)}",
            detail={"path": str(native_dir)},
        )
    name = f"erllama.llama._native.{native_dir.name}._binding"
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        binding = importlib.util.module_from_spec(spec)
        loader.exec_module(binding)
    except ImportError as error:
        raise NativeLibraryError(
            f"erllama's native library cannot be loaded ({error}); {build_advice(native_dir.name)}",
            detail={"path": str(path)},
        ) from error
    found = Library(binding, native_dir)
    actual = found.ffi.string(found.stamp()).decode()
    if actual != expected:
        raise NativeLibraryError(
            f"erllama's native library was built from other sources ({actual}, expected {expected}); "
            f"{build_advice(native_dir.name)}",
            detail={"path": str(path), "actual": actual, "expected": expected},
        )
    sys.modules.setdefault(name, binding)
    return found


def _binding_path(native_dir: Path) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = native_dir / ("_binding" + suffix)
        if path.is_file():
            return path
    return None
