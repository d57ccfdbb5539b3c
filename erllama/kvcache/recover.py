"""What a tier's folder holds: the scan at start-up and later, and the removal of what crashes left behind.

A file is indexed if its header and metadata are whole, its size is what they say, and its name follows from
its content. It is *closed* if its parent is, up to the root; what is not closed is an orphan: never indexed,
removed by whoever holds the removing lock. Payloads are not read here: a damaged one is found on first use.
Thread: worker threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .header import Damaged
from .kinds import NAME_BYTES, ROOT_NAME, NodeFlag, PartKind
from .read import read_head
from .root import QUARANTINE_FILES

if TYPE_CHECKING:
    from collections.abc import Set

    from .files import Entry
    from .meta import NodeMeta
    from .root import Root

log = logging.getLogger(__name__)
PartId = tuple[bytes, PartKind]


@dataclass(slots=True, kw_only=True, eq=False)
class FoundPart:
    """One file that may be indexed."""

    meta: NodeMeta
    kind: PartKind
    payload_bytes: int
    file_bytes: int
    mtime: float

    @property
    def id(self) -> PartId:
        """Name and kind."""
        return self.meta.name, self.kind


@dataclass(slots=True, kw_only=True)
class Scan:
    """Outcome of a scan: `found` new parts, parents first; `vanished` known parts that are gone."""

    found: list[FoundPart] = field(default_factory=list)
    vanished: list[PartId] = field(default_factory=list)
    orphans: list[PartId] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_files: list[str] = field(default_factory=list)
    temporaries: list[str] = field(default_factory=list)
    total_bytes: int = 0


def parse_file_name(name: str) -> PartId | None:
    """Name and kind from a published file's name, or None if it is not one."""
    digits, _, suffix = name.partition(".")
    for kind in PartKind:
        if "." + suffix == kind.suffix and len(digits) == 2 * NAME_BYTES:
            with contextlib.suppress(ValueError):
                return bytes.fromhex(digits), kind
    return None


def scan(root: Root, known_ids: Set[PartId], *, now: float) -> Scan:
    """List the folder; read the heads of files that are not known yet.

    `now` (seconds since the epoch) bounds modification times: a clock that was ahead must not make a file
    immortal. Expired nodes are orphans. Raises: OSError if the folder cannot be listed.
    """
    result = Scan()
    seen: set[PartId] = set()
    for entry in root.files.entries(root.nodes):
        result.total_bytes += entry.n_bytes
        if entry.name.endswith(".tmp"):
            result.temporaries.append(entry.name)
            continue
        part = parse_file_name(entry.name)
        if part is None:
            _reject(result, entry.name, "name")
            continue
        seen.add(part)
        if part not in known_ids:
            _read_entry(root, entry, part, result, now)
    result.vanished = [part for part in known_ids if part not in seen]
    _close(result, known_ids, now)
    return result


def _read_entry(root: Root, entry: Entry, part: PartId, result: Scan, now: float) -> None:
    try:
        header, meta = read_head(root.files, os.path.join(root.nodes, entry.name))
        if (meta.name, header.kind) != part:
            raise Damaged("name", "content belongs to another name")
    except Damaged as damage:
        if damage.what != "missing":  # removed by another process while we were listing
            _reject(result, entry.name, damage.what)
        return
    except OSError as broken:
        log.warning("%s cannot be read: %s", entry.name, str(broken))  # a record pins no frames
        _reject(result, entry.name, "unreadable")
        return
    result.found.append(
        FoundPart(
            meta=meta,
            kind=header.kind,
            payload_bytes=header.payload_bytes,
            file_bytes=header.file_bytes,
            mtime=min(entry.mtime, now),
        )
    )


def _reject(result: Scan, name: str, what: str) -> None:
    result.rejected[what] += 1
    result.rejected_files.append(name)


def _close(result: Scan, known_ids: Set[PartId], now: float) -> None:
    """Keep what hangs together, parents first; the rest are orphans.

    A base needs its parent's base: a hole could not be restored over. Other parts need a parent of any kind.
    """
    ends: dict[bytes, int | None] = {ROOT_NAME: 0}
    bases = {ROOT_NAME}
    closed = []
    for part in sorted(result.found, key=lambda p: (p.meta.start, p.kind)):
        meta, parent = part.meta, part.meta.parent
        if parent not in ends and any((parent, kind) in known_ids for kind in PartKind):
            ends[parent] = None  # indexed before: its end was checked then
        fits = parent in ends and ends[parent] in (None, meta.start)
        if part.kind is PartKind.BASE:
            fits = fits and (parent in bases or (parent, PartKind.BASE) in known_ids)
        expired = meta.expires_ns is not None and meta.expires_ns <= now * 1e9
        if fits and not expired and not meta.flags & NodeFlag.PRIVATE:
            ends.setdefault(meta.name, meta.start + len(meta.tokens))
            if part.kind is PartKind.BASE:
                bases.add(meta.name)
            closed.append(part)
        else:
            result.orphans.append(part.id)
    result.found = closed


def sweep(root: Root, result: Scan) -> int:
    """Remove orphans, rejected files and dead processes' temporaries; call under the removing lock.

    The listing of `result` must have been made under the same lock. Rejected files go to quarantine.
    Returns how many names were removed; corrects the shared byte counter.
    """
    n = 0
    total = result.total_bytes
    for name, kind in reversed(result.orphans):
        n, total = _remove(root, root.target(name, kind), n, total)
    for file in result.rejected_files:
        log.warning("quarantined %s", file)
        total -= quarantine_file(root, os.path.join(root.nodes, file))
        n += 1
    for file in result.temporaries:
        owner = file.rsplit(".", 2)[-2]
        if root.is_dead(owner):
            n, total = _remove(root, os.path.join(root.nodes, file), n, total)
    root.set_used(max(0, total))
    result.total_bytes = max(0, total)
    return n


def _remove(root: Root, path: str, n: int, total: int) -> tuple[int, int]:
    try:
        size = root.files.size_at(path)
        root.files.unlink(path)
    except FileNotFoundError:
        return n, total
    return n + 1, total - size


def quarantine_file(root: Root, path: str) -> int:
    """Move a damaged file out of the way, keeping only the latest few; returns its size."""
    try:
        size = root.files.size_at(path)
        root.files.rename(path, os.path.join(root.quarantine, os.path.basename(path)))
    except FileNotFoundError:
        return 0
    kept = sorted(root.files.entries(root.quarantine), key=lambda entry: entry.mtime)
    for entry in kept[:-QUARANTINE_FILES]:
        with contextlib.suppress(FileNotFoundError):
            root.files.unlink(os.path.join(root.quarantine, entry.name))
    return size
