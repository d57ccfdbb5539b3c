"""Small file helpers: error names, path checks, the cache folder, durable directories.

Nothing but the standard library: the build uses this too.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from .errors import InvalidConfig

# Codes that `errno` does not name on every system. FreeBSD's errno.h: EINTEGRITY 97.
EXTRA_CODES = {("freebsd", 97): "eintegrity"}


def error_name(code: int, platform: str = sys.platform) -> str:
    """A stable lower-case name of an OS error code: "enospc", "eintegrity"; "errno_<n>" if unknown."""
    for (system, number), name in EXTRA_CODES.items():
        if code == number and platform.startswith(system):
            return name
    return errno.errorcode.get(code, f"errno_{code}").lower()


def cache_dir() -> Path:
    """Where erllama keeps what can be had again: `ERLLAMA_CACHE_DIR`, else the platform's place for it."""
    if named := os.environ.get("ERLLAMA_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "erllama"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "erllama"


def checked_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path as text, which `os.fsencode` takes.

    Raises: `InvalidConfig` if it is no path, empty, holds a NUL byte, or cannot be a file's name here.
    """
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except (TypeError, UnicodeError) as error:
        raise InvalidConfig(f"{path!r} is no path: {error}", detail={"key": "path", "value": path}) from None
    if not text:
        raise InvalidConfig("an empty path", detail={"key": "path", "value": text})
    if "\0" in text:
        raise InvalidConfig(f"{text!r}: a path cannot hold a NUL byte", detail={"key": "path", "value": text})
    return text


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make the entries of a directory durable. Raises: `InvalidConfig` (NUL), `OSError`."""
    fd = os.open(checked_path(path), os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_write(path: Path, text: str) -> bool:
    """Write a small file, which readers see whole or not at all, and make its folder. Blocks.

    Returns: False if it cannot be written: for what can be had again.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        return False
    return True
