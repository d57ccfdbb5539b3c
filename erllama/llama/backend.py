"""The process-wide part: ggml's backends and llama.cpp's own initialisation, once.

Importing erllama loads no native code; the first model load calls `ensure_backend()`.
The backend is never torn down: late log lines and a second start must find it alive.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from erllama.errors import NativeLibraryError

from . import ffi, logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU_LIBRARIES = ("cuda", "metal", "vulkan", "hip", "blas")
BUILD_FILE = "build.json"  # written by build_libllama.py

_lock = threading.Lock()
_ready: ffi.Library | None = None
_variant: str | None = None


def ensure_backend() -> ffi.Library:
    """The library with its backends loaded; initialises on the first call, exactly once.

    Raises: `NativeLibraryError`. Thread: any; concurrent first callers wait for one of them.
    """
    global _ready, _variant
    if _ready is not None:
        return _ready
    with _lock:
        if _ready is None:
            lib = ffi.library()
            logs.install_logs(lib)
            _variant = _load_backends(lib)
            lib.backend_init()
            _ready = lib
    return _ready


def shutdown_logs() -> None:
    """Stop log delivery; safe at any time. The next `resume_logs()` starts it again."""
    if _ready is not None:
        logs.shutdown_logs(_ready)


def resume_logs() -> None:
    """Deliver logs again after `shutdown_logs()`; nothing to do if they are delivered."""
    if _ready is not None:
        logs.install_logs(_ready)


def _load_backends(lib: ffi.Library) -> str | None:
    if lib.ggml_backend_dev_count() > 0:
        return None  # linked in, not loadable: a build without GGML_BACKEND_DL
    chosen = _choose_variant(lib.native_dir)
    if chosen is None:
        lib.ggml_backend_load_all_from_path(os.fsencode(lib.native_dir))
    else:
        for name in GPU_LIBRARIES:
            for path in sorted(lib.native_dir.glob(f"libggml-{name}.*")):
                lib.ggml_backend_load(os.fsencode(path))
        if lib.ggml_backend_load(os.fsencode(chosen)) == lib.ffi.NULL:
            raise NativeLibraryError(
                f"ggml cannot load {chosen}; run: {ffi.BUILD_COMMAND}", detail={"path": str(chosen)}
            )
    if lib.ggml_backend_dev_count() == 0:
        raise NativeLibraryError(
            f"no ggml backend in {lib.native_dir} runs on this machine; run: {ffi.BUILD_COMMAND}",
            detail={"path": str(lib.native_dir)},
        )
    return chosen.stem.removeprefix("libggml-cpu-") if chosen else None


def _choose_variant(native_dir: Path) -> Path | None:
    """The CPU library that survived a trial run; None where ggml's own scoring has to do."""
    if importlib.util.find_spec("erllama.llama.variant") is None:
        return None
    choose: Callable[[Path], Path | None] = importlib.import_module("erllama.llama.variant").choose
    return choose(native_dir)


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device. `kind` is "cpu", "gpu", "igpu" or "accel"; memory in bytes."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


KINDS = ("cpu", "gpu", "igpu", "accel")


def devices() -> list[Device]:
    """The devices ggml found, with their memory at this moment."""
    lib = ensure_backend()
    found = []
    kinds = {lib.constant("GGML_BACKEND_DEVICE_TYPE", kind): kind for kind in KINDS}
    for i in range(lib.ggml_backend_dev_count()):
        dev = lib.ggml_backend_dev_get(i)
        free, total = lib.ffi.new("size_t *"), lib.ffi.new("size_t *")
        lib.ggml_backend_dev_memory(dev, free, total)
        found.append(
            Device(
                name=lib.ffi.string(lib.ggml_backend_dev_name(dev)).decode("utf-8", "replace"),
                description=lib.ffi.string(lib.ggml_backend_dev_description(dev)).decode("utf-8", "replace"),
                kind=kinds.get(lib.ggml_backend_dev_type(dev), "other"),
                free_bytes=free[0],
                total_bytes=total[0],
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What native build is running.

    `pin` names the source archive (package, version, sha256, commit); None when built from a folder.
    `cpu_variant` is None where ggml made the choice itself.
    """

    llama_version: str
    pin: dict[str, str] | None
    backend: str
    cpu_variant: str | None
    stamp: str
    system_info: str


def build_info() -> BuildInfo:
    """Facts of the loaded library; initialises the backend."""
    lib = ensure_backend()
    return BuildInfo(
        llama_version=lib.ffi.string(lib.version()).decode(),
        pin=_recorded_pin(lib.native_dir),
        backend=lib.backend,
        cpu_variant=_variant,
        stamp=lib.ffi.string(lib.stamp()).decode(),
        system_info=lib.ffi.string(lib.print_system_info()).decode("utf-8", "replace"),
    )


def _recorded_pin(native_dir: Path) -> dict[str, str] | None:
    try:
        pin = json.loads((native_dir / BUILD_FILE).read_text())["pin"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {str(key): str(value) for key, value in pin.items()} if isinstance(pin, dict) else None
