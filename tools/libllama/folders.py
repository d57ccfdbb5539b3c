"""The build's folders outside the checkout, locks on them, and publishing a folder whole.

A folder under the cache is either complete or not there: it is assembled under a temporary name on
the same file system and renamed into place. What a killed build leaves behind are temporary names,
which the next build removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from tools.libllama.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# One level down, so that nobody who lists the folder takes a half-made sibling for a finished one.
_WORKSHOP = ".partial"


@contextlib.contextmanager
def locked(path: Path, *, waiting: Callable[[str], None]) -> Iterator[int]:
    """Hold an exclusive lock named by a file; yields its descriptor.

    A child given the descriptor (`pass_fds`) keeps the lock for as long as it lives, so a compiler
    run that outlives a killed build is waited for instead of joined. `waiting` is called once with a
    sentence if somebody else holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another build holds {path}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Assemble a folder: yields an empty temporary one and renames it to `target` at the end.

    If the block raises, `target` is as it was. An older `target` is moved aside first and removed
    afterwards. The caller holds a lock; leftovers of killed builds beside `target` are removed.
    """
    workshop = target.parent / _WORKSHOP
    remove_leftovers(target)
    partial = workshop / f"{target.name}-{os.getpid()}"
    aside = workshop / f"{target.name}-{os.getpid()}-old"
    partial.mkdir(parents=True)
    try:
        yield partial
        _swap(partial, target, aside)
    finally:
        remove_leftovers(target)
        with contextlib.suppress(OSError):  # others may be at work in it
            workshop.rmdir()


def _swap(partial: Path, target: Path, aside: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise


def remove_leftovers(target: Path) -> None:
    """Remove what a killed build of this folder left behind."""
    for leftover in (target.parent / _WORKSHOP).glob(f"{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file at `target`: a hard link where the file system allows, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_tree(source: Path, target: Path) -> None:
    """Every file below `source` to the same place below `target`, hard-linked where possible."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def require_space(folder: Path, need_bytes: int, what: str) -> None:
    """Check that a file system has room before work starts that would fill it.

    Raises: BuildError naming the folder, the need and what there is.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise BuildError(
            f"Not enough disk space for {what}: {folder} has {free / 2**20:.0f} MiB free, "
            f"{need_bytes / 2**20:.0f} MiB are needed.",
            advice="Free some space, or point ERLLAMA_CACHE_DIR (downloads, finished builds) elsewhere.",
        )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full or read-only disk into a sentence.

    Raises: BuildError for ENOSPC, EDQUOT, EROFS and EACCES; every other OSError passes.
    """
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission is denied",
    }
    try:
        yield
    except OSError as error:
        if error.errno not in reasons:
            raise
        place = f" ({error.filename})" if error.filename else ""
        raise BuildError(
            f"{what} failed: {reasons[error.errno]}{place}.",
            advice="Make room or give access, or point ERLLAMA_CACHE_DIR elsewhere; then run again.",
        ) from error
