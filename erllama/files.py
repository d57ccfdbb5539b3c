"""Small file helpers: error names, path checks, durable directories."""

from __future__ import annotations

import errno
import os
import sys

from .errors import InvalidConfig

# Codes that `errno` does not name on every system. FreeBSD's errno.h: EINTEGRITY 97.
EXTRA_CODES = {("freebsd", 97): "eintegrity"}


def error_name(code: int, platform: str = sys.platform) -> str:
    """A stable lower-case name of an OS error code: "enospc", "eintegrity"; "errno_<n>" if unknown."""
    for (system, number), name in EXTRA_CODES.items():
        if code == number and platform.startswith(system):
            return name
    return errno.errorcode.get(code, f"errno_{code}").lower()


def checked_path(path: str | os.PathLike[str]) -> str:
    """The path as text. Raises: `InvalidConfig` if it is empty or holds a NUL byte."""
    text = os.fspath(path)
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
