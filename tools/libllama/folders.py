"""The build's folders outside the checkout, locks on them, and publishing a folder whole.

A folder under the cache is either complete or not there: it is assembled under a temporary name on
the same file system and renamed into place. What a killed build leaves behind are temporary names,
which the next build removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.libllama import runtime
from tools.libllama.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# One level down, so that nobody who lists the folder takes a half-made sibling for a finished one.
_WORKSHOP = ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOTDIR: "a file is where a folder has to be",
    errno.EEXIST: "a file is where a folder has to be",
}


@contextlib.contextmanager
def locked(path: Path, *, waiting: Callable[[str], None], shared: bool = False) -> Iterator[int]:
    """Hold a lock named by a file; yields its descriptor. `shared`: with others who only read.

    A child given the descriptor keeps the lock for as long as it lives, so a compiler run that
    outlives a killed build is waited for instead of joined. `waiting` is called once with a
    sentence if somebody else holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another build holds {path}; waiting for it")
            fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Assemble a folder: yields an empty temporary one and puts it at `target` at the end.

    If the block raises, `target` is as it was. At every moment there is a whole folder at `target`, if
    there was one before. The caller holds a lock; leftovers of killed builds beside `target` are removed.
    """
    workshop = target.parent / _WORKSHOP
    remove_leftovers(target)
    partial = workshop / f"{target.name}-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        yield partial
        _make_durable(partial)
        _swap(partial, target)
        _sync(target.parent)
    finally:
        remove_leftovers(target)
        with contextlib.suppress(OSError):  # others may be at work in it
            workshop.rmdir()


def _make_durable(folder: Path) -> None:
    """Force a folder's files to disk, or a power cut could leave its name without their content."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(partial: Path, target: Path) -> None:
    """Put `partial` at `target`; an older folder ends up in the workshop."""
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        # Two steps: killed between them, the next build finds the old folder by its name and puts it back.
        aside = partial.with_name(f"{target.name}-old")
        target.rename(aside)
        try:
            partial.rename(target)
        except OSError:
            aside.rename(target)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step, where the system can (Linux, most file systems)."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def remove_leftovers(target: Path) -> None:
    """Remove what a killed build of this folder left behind; an old folder moved aside goes back first."""
    workshop = target.parent / _WORKSHOP
    aside = workshop / f"{target.name}-old"
    if aside.is_dir() and not target.exists():
        aside.rename(target)
    for leftover in workshop.glob(f"{target.name}-*"):
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
            advice=_advice("Free some space", folder),
        )


@contextlib.contextmanager
def disk_errors(what: str, where: Path) -> Iterator[None]:
    """Turn an error of the operating system into a sentence that names what was to be written.

    `where` is the folder that the step works in, for errors that name no file.

    Raises: BuildError for every OSError with a number; everything else passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        # Of a copy it is the second file that could not be written.
        place = Path(os.fsdecode(error.filename2 or error.filename or where))
        reason = _REASONS.get(error.errno) or (error.strerror or str(error)).lower()
        raise BuildError(f"{what} failed: {reason} ({place}).", advice=_advice(_REMEDY, place)) from error


_REMEDY = "Make room there, give access or move what is in the way"


def _advice(remedy: str, place: Path) -> str:
    cache = runtime.cache_dir()
    elsewhere = f", or point ERLLAMA_CACHE_DIR (now {cache}) elsewhere" if _is_in(place, cache) else ""
    return f"{remedy}{elsewhere}; then run the same command again."


def _is_in(place: Path, folder: Path) -> bool:
    """Whether a path lies in a folder; a parent of it that is no folder counts as well."""
    return place.is_relative_to(folder) or folder.is_relative_to(place)
