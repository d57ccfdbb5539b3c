"""A folder that holds a file tier: its layout, who is alive in it, and how many bytes it holds.

    nodes/        published parts `<name>.<kind>.kvc`, and temporaries `<target>.<owner>.tmp` beside them
    owners/       one locked file per living process; a temporary whose owner's lock is free is a dead one's
    hits/         one hit journal per process
    quarantine/   files that were found damaged, the latest few
    publish.lock  shared: names are being added; exclusive: names are being removed, by one process at a time
    usage         two u64: what nodes/ holds and has reserved, and a change count; shared by all processes

Rule 1: names are added and bytes reserved only under the shared lock, removed only under the exclusive one.
        So under the exclusive lock the listing is the whole truth, reservations included (a temporary is
        created in its final size).
Rule 2: every lock is released by the kernel when its holder dies.
Thread: worker threads only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
import time
import uuid
from typing import TYPE_CHECKING, Final

from .files import READ_ONLY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .files import Files
    from .kinds import PartKind

log = logging.getLogger(__name__)
_USAGE: Final = struct.Struct("<QQ")
_LOCK_RETRY_S: Final = 0.002
QUARANTINE_FILES: Final = 8


class TierBusy(Exception):
    """Another process holds the lock for longer than we wait."""


class TierFull(Exception):
    """The budget has no room for this reservation; `missing` is how many bytes."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} bytes missing")
        self.missing = missing


class Root:
    """One process's hold on a tier's folder. `open()` makes what is missing; `close()` gives the lock up."""

    def __init__(self, path: str, max_bytes: int, files: Files, *, lock_wait_s: float = 5.0) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.max_bytes = max_bytes
        self.files = files
        self.read_only = False
        self.owner = uuid.uuid4().hex[:16]
        self.nodes = os.path.join(self.path, "nodes")
        self.quarantine = os.path.join(self.path, "quarantine")
        self.owners = os.path.join(self.path, "owners")
        self.hits = os.path.join(self.path, "hits")
        self._lock_path = os.path.join(self.path, "publish.lock")
        self._usage_path = os.path.join(self.path, "usage")
        self._lock_wait_s = lock_wait_s
        self._owner_fd: int | None = None
        self.last_used_bytes = 0  # what the shared counter said when this process last saw it
        self._changes = 0  # the shared change count as of our last look
        self._foreign = True  # whether others changed something since

    def __repr__(self) -> str:
        return f"<Root {self.path} {'open' if self._owner_fd is not None else 'closed'}>"

    # --- coming and going -------------------------------------------------------------------------

    def open(self) -> None:
        """Make the folders and take this process's owner lock; one that cannot be written is `read_only`.

        Raises: OSError.
        """
        try:
            for folder in (self.path, self.nodes, self.quarantine, self.owners, self.hits):
                self.files.make_folder(folder)
            if self._owner_fd is None:
                self._owner_fd = self.files.try_lock(self._owner_path(self.owner), exclusive=True)
            self.read_only = False
        except OSError as no:
            if no.errno not in READ_ONLY or not self.files.exists(self.nodes):
                raise
            self.read_only = True
            log.warning("%s cannot be written; the tier serves what it holds", self.path)
        if self.files.mode(self.path) & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("%s is open to other users; it holds prompts in clear text", self.path)

    def close(self) -> None:
        """Release the owner lock and remove its file. Idempotent."""
        fd, self._owner_fd = self._owner_fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self.files.unlink(self._owner_path(self.owner))
            self.files.close(fd)

    def _owner_path(self, owner: str) -> str:
        return os.path.join(self.owners, f"{owner}.lock")

    def is_dead(self, owner: str) -> bool:
        """Whether the process with this owner id is gone; its lock file is removed then."""
        if owner == self.owner:
            return False
        path = self._owner_path(owner)
        if not self.files.exists(path):
            return True
        fd = self.files.try_lock(path, exclusive=True)
        if fd is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(path)
        self.files.close(fd)
        return True

    # --- names ------------------------------------------------------------------------------------

    def target(self, name: bytes, kind: PartKind) -> str:
        """Path of a published part."""
        return os.path.join(self.nodes, name.hex() + kind.suffix)

    def temporary(self, target: str) -> str:
        """Path of this process's temporary for a target."""
        return f"{target}.{self.owner}.tmp"

    # --- locks ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Hold the lock under which names are added. Raises: `TierBusy`."""
        with self._locked(self._lock_path, exclusive=False):
            yield

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """Be the one process that removes names. Raises: `TierBusy`."""
        fd = self.lock_removing()
        try:
            yield
        finally:
            self.files.close(fd)

    def try_lock_removing(self) -> int | None:
        """The exclusive lock if nobody has it or the shared one right now."""
        return self.files.try_lock(self._lock_path, exclusive=True)

    def lock_removing(self) -> int:
        """The exclusive lock as a descriptor; close it to release. Raises: `TierBusy`."""
        return self._acquire(self._lock_path, exclusive=True)

    def lock_renaming(self) -> int:
        """The lock that stands in for `link(2)`'s refusal to overwrite; close it to release."""
        return self._acquire(os.path.join(self.path, "rename.lock"), exclusive=True)

    @contextlib.contextmanager
    def _locked(self, path: str, *, exclusive: bool) -> Iterator[int]:
        fd = self._acquire(path, exclusive=exclusive)
        try:
            yield fd
        finally:
            self.files.close(fd)

    def _acquire(self, path: str, *, exclusive: bool) -> int:
        give_up = time.monotonic() + self._lock_wait_s
        while (fd := self.files.try_lock(path, exclusive=exclusive)) is None:
            if time.monotonic() > give_up:
                raise TierBusy(path)
            time.sleep(_LOCK_RETRY_S)  # a worker thread; flock without a deadline could hang for ever
        return fd

    # --- the budget -------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """What the folder holds and has reserved, by the shared counter."""
        with self._locked(self._usage_path, exclusive=True) as fd:
            return self._read_usage(fd)

    def reserve(self, n_bytes: int) -> None:
        """Take bytes from the budget; call under `adding()`. Raises: `TierFull`, with nothing taken."""
        with self._locked(self._usage_path, exclusive=True) as fd:
            used = self._read_usage(fd)
            if used + n_bytes > self.max_bytes:
                raise TierFull(used + n_bytes - self.max_bytes)
            self._write_usage(fd, used + n_bytes)

    def give_back(self, n_bytes: int) -> None:
        """Return bytes to the budget."""
        with self._locked(self._usage_path, exclusive=True) as fd:
            self._write_usage(fd, max(0, self._read_usage(fd) - n_bytes))

    def set_used(self, n_bytes: int) -> None:
        """Correct the counter from a listing made under the exclusive lock; others' changes are in it."""
        with self._locked(self._usage_path, exclusive=True) as fd:
            self._read_usage(fd)
            self._foreign = False
            self._write_usage(fd, n_bytes)

    def has_foreign_changes(self) -> bool:
        """Whether another process added or removed something since the last sweep."""
        if self.read_only:
            return False
        self.used_bytes()
        return self._foreign

    def distrust(self) -> None:
        """The index no longer knows all that is here: list anew at the next look."""
        self._foreign = True

    def _read_usage(self, fd: int) -> int:
        data = bytearray(_USAGE.size)
        n = os.preadv(fd, [data], 0)
        used, changes = _USAGE.unpack(data) if n == _USAGE.size else (0, 0)
        if changes != self._changes:
            self._changes, self._foreign = changes, True
        self.last_used_bytes = int(used)
        return int(used)

    def _write_usage(self, fd: int, used: int) -> None:
        self._changes += 1
        self.last_used_bytes = used
        os.pwrite(fd, _USAGE.pack(used, self._changes), 0)  # torn by a crash: the next listing corrects it
