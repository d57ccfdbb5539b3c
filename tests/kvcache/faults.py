"""Operating systems that fail: at the k-th call, for lack of space, of links, of power."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from erllama.kvcache.files import Chunks, Files

if TYPE_CHECKING:
    from collections.abc import Callable


class Died(BaseException):
    """The process was killed here."""


# Every call that changes a file, a name or a lock; reads cannot leave anything behind.
CHANGING = ("make_folder", "create", "set_size", "write", "sync", "link", "rename", "unlink", "sync_folder")


class SpyFiles(Files):
    """Records changing calls as (call, file name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}

    def before(self, call: str, path: str) -> None:
        """Hook: runs before each changing call."""
        self.calls.append((call, os.path.basename(path)))

    def make_folder(self, path: str) -> None:
        self.before("make_folder", path)
        super().make_folder(path)

    def create(self, path: str) -> int:
        self.before("create", path)
        fd = super().create(path)
        self._paths[fd] = path
        return fd

    def set_size(self, fd: int, n_bytes: int) -> None:
        self.before("set_size", self._paths[fd])
        super().set_size(fd, n_bytes)

    def write(self, fd: int, chunks: Chunks, offset: int) -> int:
        self.before("write", self._paths[fd])
        # Short writes always: half of what is asked, or its last byte.
        first = memoryview(chunks[0]).cast("B")
        return super().write(fd, [first[: max(1, len(first) // 2)]], offset)

    def sync(self, fd: int) -> None:
        self.before("sync", self._paths.get(fd, "journal"))
        super().sync(fd)

    def link(self, source: str, target: str) -> None:
        self.before("link", target)
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self.before("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.before("unlink", path)
        super().unlink(path)

    def sync_folder(self, path: str) -> None:
        self.before("sync_folder", path)
        super().sync_folder(path)


class DyingFiles(SpyFiles):
    """Dies right before its k-th changing call (counted from 1), and at every call after that.

    With `power`, what was not synced is lost as well: file content since the last sync, and names added or
    removed since the last folder sync, those of odd (`power="odd"`), even or all positions.
    """

    def __init__(self, k: int, power: str | None = None) -> None:
        super().__init__()
        self.k, self.power = k, power
        self.dead = False
        self._unsynced: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._n_kept = 0

    def before(self, call: str, path: str) -> None:
        super().before(call, path)
        if self.dead or len(self.calls) >= self.k:
            self.dead = True
            raise Died(f"{call} {path}")

    def create(self, path: str) -> int:
        fd = super().create(path)
        self._unsynced.add(path)
        self._undo.append(lambda: _remove(path))
        return fd

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._unsynced.discard(self._paths.get(fd, ""))

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        if source in self._unsynced:
            self._unsynced.add(target)
        self._undo.append(lambda: _remove(target))

    def rename(self, source: str, target: str) -> None:
        kept_source, kept_target = self._keep(source), self._keep(target)
        super().rename(source, target)
        self._undo.append(lambda: (_restore(kept_target, target), _restore(kept_source, source))[0])

    def unlink(self, path: str) -> None:
        kept = self._keep(path)
        super().unlink(path)
        self._undo.append(lambda: _restore(kept, path))

    def sync_folder(self, path: str) -> None:
        super().sync_folder(path)
        self._undo.clear()

    def _keep(self, path: str) -> str | None:
        """A second name, outside the tier, for a file whose name is about to go."""
        if self.power is None or not os.path.exists(path):
            return None
        folder = os.path.join(os.path.dirname(os.path.dirname(path)), "..", "kept")
        os.makedirs(folder, exist_ok=True)
        self._n_kept += 1
        kept = os.path.join(folder, str(self._n_kept))
        os.link(path, kept)
        return kept

    def lose_power(self) -> None:
        """Make the folder look as it may after a power cut."""
        assert self.power is not None
        for path in self._unsynced:
            if os.path.exists(path):
                size = os.path.getsize(path)
                with open(path, "r+b") as file:
                    file.seek(size // 2)
                    file.write(bytes(size - size // 2))
        for i, undo in reversed(list(enumerate(self._undo))):
            if self.power == "all" or (i % 2 == 1) == (self.power == "odd"):
                undo()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _restore(kept: str | None, path: str) -> None:
    _remove(path)
    if kept is not None:
        os.link(kept, path)


class FailingFiles(SpyFiles):
    """Raises an OSError at the given changing calls: all calls of a name, or only the n-th call at all."""

    def __init__(self, error: int, *, call: str | None = None, at: int | None = None) -> None:
        super().__init__()
        self.error, self.call, self.at = error, call, at
        self.on = True

    def before(self, call: str, path: str) -> None:
        super().before(call, path)
        if self.on and (call == self.call or len(self.calls) == self.at):
            raise OSError(self.error, os.strerror(self.error), path)


def no_links() -> FailingFiles:
    """A file system without hard links."""
    return FailingFiles(errno.EPERM, call="link")
