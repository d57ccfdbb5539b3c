"""One running file tier: scan, publish, read, remove, quarantine, journal; the store runs it in threads.

It knows files, not the index: what it is asked for comes by name, what it finds it returns.
Thread: worker threads; several at once, except `start`, `refresh` and `remove`, which the store serialises.
Raises: OSError from every method when the file system fails; the store then switches the tier off.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from .files import NO_SPACE, Files
from .journal import Hits, drop_dead_journals, read_journals, write_journal
from .publish import Outcome, Outgoing, publish
from .read import read_head, read_part
from .recover import Scan, quarantine_file, scan, sweep
from .root import Root, TierBusy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .columns import PartColumns
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
        self._owes_a_journal = False  # hits of the dead are counted by us, and still stand in their journals

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

    def start(self, known: PartColumns, now: float) -> tuple[Scan, Hits, int]:
        """Open the folder and find out what is in it; remove leftovers unless another process is removing.

        Returns: the scan, the merged hit counts, and how many leftovers were removed.
        """
        ids = known.ids()
        try:
            self.root.open()
            if self.root.read_only:
                return scan(self.root, ids, now=now), read_journals(self.root), 0
            with self.root.removing():
                found = scan(self.root, ids, now=now)
                removed = sweep(self.root, found)
                hits = read_journals(self.root)
                self._take_over_journals(hits)
                return found, hits, removed
        except TierBusy:
            return scan(self.root, ids, now=now), read_journals(self.root), 0

    def _take_over_journals(self, hits: Hits) -> None:
        """The counts are ours now, and the journals of the dead may go; not where the device is full.

        Such a tier has to start: only then can it evict what may have filled the device.
        """
        try:
            write_journal(self.root, hits)
        except OSError as full:
            if full.errno not in NO_SPACE:
                raise
            self._owes_a_journal = True
        else:
            drop_dead_journals(self.root)

    def refresh(self, known: PartColumns, now: float) -> Scan:
        """What other processes added and removed; sweeps. Call with the removing lock held."""
        found = scan(self.root, known.ids(), now=now)
        sweep(self.root, found)
        return found

    def look(self, known: PartColumns, now: float) -> Scan:
        """What other processes added and removed. Sweeps if the lock is free; otherwise the next look may."""
        ids = known.ids()
        lock = self.root.try_lock_removing()
        if lock is None:
            return scan(self.root, ids, now=now)
        try:
            found = scan(self.root, ids, now=now)
            sweep(self.root, found)
            return found
        finally:
            self.root.files.close(lock)

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
                size = self.root.files.size_at(path)
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

    def write_journal(self, parts: PartColumns) -> None:
        """Replace this process's hit journal with the hits of these parts."""
        if self.root.read_only:
            return
        write_journal(self.root, parts.hits())
        if self._owes_a_journal:
            drop_dead_journals(self.root)
            self._owes_a_journal = False

    def close(self) -> None:
        """Give up this process's hold on the folder."""
        self.root.close()
