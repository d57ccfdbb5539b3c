"""One running file tier: scan, publish, read, remove, quarantine, journal; the store runs it in threads.

It knows files, not the index: what it is asked for comes by name, what it finds it returns.
Thread: worker threads; several at once, except `start`, `refresh` and `remove`, which the store serialises.
Raises: OSError from every method when the file system fails; the store then switches the tier off.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from .files import Files
from .journal import Hits, drop_dead_journals, read_journals, write_journal
from .publish import Outcome, Outgoing, publish
from .read import read_head, read_part
from .recover import Scan, quarantine_file, scan, sweep
from .root import Root, TierBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .header import Header
    from .kinds import PartKind
    from .meta import NodeMeta
    from .recover import PartId
    from .tiers import FileTierOptions, TierKind

log = logging.getLogger(__name__)


class FileTier:
    """A disk or ram_file tier, named as its options say."""

    def __init__(self, options: FileTierOptions, files: Files | None = None) -> None:
        self.options = options
        self.root = Root(options.root, options.max_bytes, files or Files())

    def __repr__(self) -> str:
        return f"<FileTier {self.name} ({self.kind}) at {self.root.path}>"

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.options.name

    @property
    def kind(self) -> TierKind:
        """Disk or memory-backed."""
        return self.options.kind

    def start(
        self, known: Callable[[PartId], bool], known_ids: Sequence[PartId], now: float
    ) -> tuple[Scan, Hits, int]:
        """Open the folder and find out what is in it; remove leftovers unless another process is removing.

        Returns: the scan, the merged hit counts, and how many leftovers were removed.
        """
        self.root.open()
        try:
            with self.root.removing():
                found, removed = self._scan_and_sweep(known, known_ids, now)
                hits = read_journals(self.root)
                write_journal(self.root, hits)
                drop_dead_journals(self.root)
                return found, hits, removed
        except TierBusy:
            return scan(self.root, known, known_ids, now=now), read_journals(self.root), 0
        except PermissionError:
            return self._start_read_only(known, known_ids, now)

    def _start_read_only(
        self, known: Callable[[PartId], bool], known_ids: Sequence[PartId], now: float
    ) -> tuple[Scan, Hits, int]:
        log.warning("%s cannot be written; it serves what it holds", self.root.path)
        return scan(self.root, known, known_ids, now=now), read_journals(self.root), 0

    def refresh(self, known: Callable[[PartId], bool], known_ids: Sequence[PartId], now: float) -> Scan:
        """What other processes added and removed. Call with the removing lock held: sweeps too."""
        return self._scan_and_sweep(known, known_ids, now)[0]

    def look(self, known: Callable[[PartId], bool], known_ids: Sequence[PartId], now: float) -> Scan:
        """What other processes added and removed; takes no lock and removes nothing."""
        return scan(self.root, known, known_ids, now=now)

    def _scan_and_sweep(
        self, known: Callable[[PartId], bool], known_ids: Sequence[PartId], now: float
    ) -> tuple[Scan, int]:
        found = scan(self.root, known, known_ids, now=now)
        return found, sweep(self.root, found)

    def folder_stamp(self) -> int:
        """Changes whenever any process adds or removes a name."""
        return self.root.files.mtime_ns(self.root.nodes)

    def publish(self, group: Sequence[Outgoing]) -> list[Outcome]:
        """See `publish.publish`."""
        return publish(self.root, group)

    def read_head(self, name: bytes, kind: PartKind) -> tuple[Header, NodeMeta]:
        """Header and metadata of a part. Raises: `Damaged`."""
        return read_head(self.root.files, self.root.target(name, kind))

    def read_part(self, name: bytes, kind: PartKind, into: memoryview) -> tuple[Header, NodeMeta]:
        """A part's payload, verified, into pooled memory. Raises: `Damaged`."""
        return read_part(self.root.files, self.root.target(name, kind), into)

    def remove(self, parts: Iterable[PartId]) -> int:
        """Unlink parts in the order given (leaves first), under the removing lock; returns bytes freed."""
        freed = 0
        for name, kind in parts:
            path = self.root.target(name, kind)
            try:
                fd = self.root.files.open_read(path)
                size = self.root.files.size(fd)
                self.root.files.close(fd)
                self.root.files.unlink(path)
            except FileNotFoundError:
                continue
            freed += size
            self.root.give_back(size)
        return freed

    def quarantine(self, name: bytes, kind: PartKind) -> None:
        """Move a damaged part out of the way."""
        size = quarantine_file(self.root, self.root.target(name, kind))
        self.root.give_back(size)

    def touch(self, parts: Iterable[tuple[PartId, int]]) -> None:
        """Write recency into the files' mtimes (seconds); files that are gone are passed over."""
        for (name, kind), seconds in parts:
            with contextlib.suppress(FileNotFoundError):
                self.root.files.touch(self.root.target(name, kind), seconds)

    def write_journal(self, hits: Hits) -> None:
        """Replace this process's hit journal."""
        write_journal(self.root, hits)

    def free_bytes(self) -> int:
        """Room left on the file system itself."""
        stat = os.statvfs(self.root.path)
        return stat.f_bavail * stat.f_frsize

    def close(self) -> None:
        """Give up this process's hold on the folder."""
        self.root.close()
