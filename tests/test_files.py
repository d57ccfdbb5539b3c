"""File helpers: error names, NUL bytes, durable directories."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from erllama import files
from erllama.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("code", "platform", "name"),
    [
        (errno.ENOSPC, "linux", "enospc"),
        (errno.ENOENT, "darwin", "enoent"),
        (97, "freebsd14", "eintegrity"),
        (99_999, "linux", "errno_99999"),
    ],
)
def test_error_names(code: int, platform: str, name: str) -> None:
    """B19: codes have stable lower-case names, FreeBSD's EINTEGRITY included."""
    assert files.error_name(code, platform) == name


def test_freebsd_code_means_something_else_elsewhere() -> None:
    """97 is EINTEGRITY on FreeBSD only."""
    assert files.error_name(97, "linux") != "eintegrity"


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_impossible_paths(path: str) -> None:
    """B19: empty paths and NUL bytes are refused before the system sees them."""
    with pytest.raises(InvalidConfig):
        files.checked_path(path)
    with pytest.raises(InvalidConfig):
        files.fsync_dir(path)


def test_fsync_dir_syncs_that_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B19: fsync is called on a descriptor of the directory, which is closed afterwards."""
    synced: list[tuple[int, os.stat_result]] = []
    real = os.fsync

    def spy(fd: int) -> None:
        synced.append((fd, os.fstat(fd)))
        real(fd)

    monkeypatch.setattr(os, "fsync", spy)
    files.fsync_dir(tmp_path)
    ((fd, seen),) = synced
    assert seen.st_ino == tmp_path.stat().st_ino
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_fsync_of_a_missing_directory(tmp_path: Path) -> None:
    """A directory that is not there is the system's own error."""
    with pytest.raises(FileNotFoundError):
        files.fsync_dir(tmp_path / "absent")
