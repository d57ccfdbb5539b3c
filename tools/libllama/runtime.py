"""The modules of the library that the build shares: `child`, `selftest`, `stamp` and `variant`.

They need only the standard library, but importing them the usual way
runs `erllama/__init__.py`, which needs what an isolated build environment does not have (trio, numpy).
So they are imported below hollow stand-ins for the two packages, which are taken away again.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from tools.libllama.pin import ROOT

SELFTEST = ROOT / "erllama" / "llama" / "selftest.py"
NATIVE = ROOT / "erllama" / "llama" / "_native"


def _load(name: str) -> ModuleType:
    """Import `erllama.<name>` without running the packages around it."""
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if key.split(".")[0] == "erllama"}
    try:
        for package, folder in (("erllama", ROOT / "erllama"), ("erllama.llama", ROOT / "erllama" / "llama")):
            hollow = ModuleType(package)
            hollow.__path__ = [str(folder)]
            sys.modules[package] = hollow
        return importlib.import_module(f"erllama.{name}")
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == "erllama"]:
            del sys.modules[key]
        sys.modules.update(kept)


def cache_dir() -> Path:
    """Where archives and finished builds are kept between checkouts: the library's own cache folder."""
    return Path(variant.cache_dir())


child = _load("child")
selftest = _load("llama.selftest")
stamp = _load("llama.stamp")
variant = _load("llama.variant")
# The class that `variant` raises, which is not the one a later, ordinary import of erllama would give.
NativeLibraryError: type[Exception] = variant.NativeLibraryError
