"""File helpers: error names, NUL bytes, durable directories."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from erllama import files
from erllama.errors import InvalidConfig


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


@pytest.mark.parametrize("path", ["", "a\0b", b"", b"a\0b", "a\ud800.gguf", 7, None])
def test_impossible_paths(path: Any) -> None:
    """B19: what cannot be a path is refused before the system sees it."""
    with pytest.raises(InvalidConfig):
        files.checked_path(path)
    with pytest.raises(InvalidConfig):
        files.fsync_dir(path)


def test_paths_are_text() -> None:
    """Bytes and path objects become text, undecodable bytes too."""
    assert files.checked_path("a") == files.checked_path(b"a") == files.checked_path(Path("a")) == "a"
    assert os.fsencode(files.checked_path(b"\xff.gguf")) == b"\xff.gguf"


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"ERLLAMA_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ("linux", {"ERLLAMA_CACHE_DIR": "~/c"}, "/home/u/c"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/erllama"),
        ("linux", {"ERLLAMA_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/u/.cache/erllama"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/u/Library/Caches/erllama"),
    ],
)
def test_cache_dir(
    monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], expected: str
) -> None:
    """`ERLLAMA_CACHE_DIR` wins, then the platform's place; an empty variable is none."""
    for name in ("ERLLAMA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files.sys, "platform", platform)
    assert files.cache_dir() == Path(expected)


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
