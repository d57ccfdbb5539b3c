"""`erllama version`: what is installed, built and chosen on this machine."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from erllama import models
from erllama.llama.backend import build_info

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> None:
    """Print a line per fact. Those that need no native library come first, so they show without one.

    Raises: `NativeLibraryError` when there is no usable build; the message says what to run.
    """
    _line("erllama", _own_version())
    _line("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    _line("models", str(models.models_dir()))
    build = build_info()
    _line("llama.cpp", build.llama_version + (f" ({build.pin})" if build.pin else ""))
    _line("backend", build.backend)
    _line("cpu variant", build.cpu_variant or "built for this machine")
    _line("build", build.stamp)


def _own_version() -> str:
    try:
        return metadata.version("erllama")
    except metadata.PackageNotFoundError:
        return "run from its sources, not installed"


def _line(name: str, value: str) -> None:
    print(f"{name:<12} {value}", flush=True)
