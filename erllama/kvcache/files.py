"""The operating system as the store sees it: every call that touches a file goes through here.

Tests hand in one that dies at its k-th call, runs out of space, or lacks `link(2)` or `fdatasync`.
Thread: worker threads; each call may block. Paths with NUL bytes are refused by Python (ValueError).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Chunks = Sequence[bytes | memoryview]
# What file systems answer where hard links or locks do not exist (FAT, some network and FUSE mounts).
LINKS_MISSING: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)
READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What no waiting changes: a path that leads nowhere, or to what is no folder of ours.
WRONG_PLACE: Final = READ_ONLY | {
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
}
TOO_LARGE: Final = frozenset({errno.EFBIG})  # one file is more than may be: removing others helps nothing
ALLOCATION_MISSING: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
LOCKS_MISSING: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK})


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a folder."""

    name: str
    n_bytes: int
    mtime: float


class Files:
    """Plain POSIX calls, one method each, so that a stage spy sees the exact order."""

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, mode 0700; an existing one is left as it is."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def create(self, path: str) -> int:
        """Create and open a file for writing, mode 0600. Raises: FileExistsError."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def open_read(self, path: str) -> int:
        """Open a file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def set_size(self, fd: int, n_bytes: int) -> None:
        """Give a new file its final size and, where possible, its blocks.

        Listings count it in full from the start, a full device says so before a byte is copied, and writing
        into allocated blocks is 1.4 times faster than having each page allocated late (ext4).
        """
        if hasattr(os, "posix_fallocate") and n_bytes:
            try:
                os.posix_fallocate(fd, 0, n_bytes)
                return
            except OSError as no:
                if no.errno not in ALLOCATION_MISSING:
                    raise
        os.ftruncate(fd, n_bytes)

    def write(self, fd: int, chunks: Chunks, offset: int) -> int:
        """Gathered write at an offset; may write less than asked."""
        return os.pwritev(fd, chunks, offset)

    def read(self, fd: int, chunks: Sequence[memoryview | bytearray], offset: int) -> int:
        """Scattered read at an offset, straight into the caller's memory; may read less."""
        return os.preadv(fd, chunks, offset)

    def size(self, fd: int) -> int:
        """Size of an open file."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """Put a file's data on stable storage."""
        # macOS has no fdatasync; fsync does more than needed there, never less.
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Hard link. Raises: FileExistsError if the target exists."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Rename over whatever is there."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def exists(self, path: str) -> bool:
        """Whether a name exists."""
        return os.path.lexists(path)

    def sync_folder(self, path: str) -> None:
        """Put a folder's names on stable storage; a file system that cannot says EINVAL, and that is that."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as no:
            if no.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def entries(self, path: str) -> list[Entry]:
        """All files of a folder; one that vanishes meanwhile is left out."""
        found = []
        with os.scandir(path) as listing:
            for item in listing:
                try:
                    stat = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(Entry(item.name, stat.st_size, stat.st_mtime))
        return found

    def size_at(self, path: str) -> int:
        """Size of the file at a path."""
        return os.stat(path).st_size

    def mode(self, path: str) -> int:
        """Permission bits of a path."""
        return os.stat(path).st_mode & 0o777

    def touch(self, path: str, seconds: float) -> None:
        """Set a file's times."""
        os.utime(path, (seconds, seconds))

    def try_lock(self, path: str, *, exclusive: bool) -> int | None:
        """Open `path` and lock it, without waiting. None: somebody else holds it. Unlock by closing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as no:
            if no.errno not in LOCKS_MISSING:
                os.close(fd)
                raise
        return fd

    def read_small(self, path: str) -> bytes:
        """A whole small file."""
        with open(path, "rb") as file:
            return file.read()

    def write_small(self, path: str, data: bytes) -> None:
        """Replace a small file as a whole: write a sibling, sync, rename."""
        temporary = f"{path}.new"
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            self.sync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
