"""`erllama version`: what is installed, built and chosen on this machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import erllama
from erllama import models
from erllama.llama.backend import build_info

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> None:
    """Print a line per fact. Those that need no native library come first, so they show without one.

    Raises: `NativeLibraryError` when there is no usable build; the message says what to run.
    """
    _line("erllama", erllama.__version__)
    _line("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    _line("models", str(models.models_dir()))
    build = build_info()
    _line("llama.cpp", f"{build.llama_version} ({_source(build.pin)})")
    _line("backend", build.backend)
    _line("cpu variant", build.cpu_variant or "built for this machine")
    _line("build", build.stamp)


def _source(pin: dict[str, str] | None) -> str:
    """Where the sources of llama.cpp came from."""
    if pin is None:
        return "from a folder of sources"
    return f"from {pin['package']} {pin['version']}, commit {pin['commit'][:12]}"


def _line(name: str, value: str) -> None:
    print(f"{name:<12} {value}", flush=True)
