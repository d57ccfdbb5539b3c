"""Putting node parts into a tier's folder so that a crash leaves an orphan, never a lie.

For a group of parts, parents first:

    1 reserve     budget taken, temporaries created in their final size (shared lock)
    2 write       payload, then header and metadata, into each temporary
    3 sync        each temporary's data on stable storage
    4 re-check    is the save still wanted, is the parent still there? (shared lock, to the end)
    5 link        temporary → target, which must not exist; then the temporary's name goes
    6 sync names  one folder sync for the whole group
    7 announce    the caller puts the nodes into the index

A target that already exists is never skipped silently: it is adopted if its head says it is the same part,
computed the same way, of the same size, otherwise replaced. Where hard links are missing, a rename under an
exclusive lock stands in. docs/internals/publish-protocol.md has what each crash leaves behind; a test
generates that table.
Thread: worker threads.
"""

from __future__ import annotations

import contextlib
import enum
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crc32c import crc32c

from .files import LINKS_MISSING
from .header import HEADER_BYTES, Damaged
from .meta import encode_metadata, make_header
from .read import SLICE_BYTES, read_head
from .root import Root, TierBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .kinds import PartKind
    from .meta import NodeMeta
    from .recover import PartId


class Outcome(enum.Enum):
    """What became of one part."""

    PUBLISHED = "published"
    ADOPTED = "adopted"  # an equal file was there
    REPLACED = "replaced"  # junk was there
    ABANDONED = "abandoned"  # no longer wanted
    NO_PARENT = "no_parent"  # the parent's files are gone

    @property
    def is_there(self) -> bool:
        """Whether the part is on the tier now."""
        return self in (Outcome.PUBLISHED, Outcome.ADOPTED, Outcome.REPLACED)


_PARALLEL_SYNC = 4  # groups from this size on are synced by several threads
_SYNC_THREADS = 4


def _always() -> bool:
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """One part to be published.

    `needs`: the part that must be there before it, earlier in the group or on the tier. `wanted` is asked
    again right before the link, from the worker thread.
    """

    meta: NodeMeta
    kind: PartKind
    payload: memoryview
    needs: PartId | None = None
    wanted: Callable[[], bool] = _always
    _metadata: bytes = field(default=b"", init=False)

    @property
    def metadata(self) -> bytes:
        """The encoded metadata."""
        if not self._metadata:
            self._metadata = encode_metadata(self.meta, self.kind)
        return self._metadata

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + len(self.metadata) + len(self.payload)


class _Staged:
    """A temporary on its way."""

    __slots__ = ("fd", "named", "part", "reserved", "target", "temporary")

    def __init__(self, root: Root, part: Outgoing) -> None:
        self.part = part
        self.target = root.target(part.meta.name, part.kind)
        self.temporary = root.temporary(self.target)
        self.fd: int | None = None
        self.named = False  # whether the temporary's name exists
        self.reserved = 0  # bytes to give back unless the target takes them over


def publish(root: Root, group: Sequence[Outgoing]) -> list[Outcome]:
    """Publish a group of parts, parents before children; one outcome each.

    Raises: `TierFull` and `TierBusy` with nothing changed; OSError (no space, read-only, gone) after removing
    what it had staged. Parts linked before an OSError stay: they are complete, the next scan adopts them.
    """
    staged = [_Staged(root, part) for part in group]
    try:
        _reserve(root, staged)
        for item in staged:
            _write(root, item)
        _sync_all(root, staged)
        return _link_all(root, staged)
    finally:
        _clean_up(root, staged)


def _reserve(root: Root, staged: Sequence[_Staged]) -> None:
    with root.adding():
        root.reserve(sum(item.part.file_bytes for item in staged))
        for item in staged:
            item.reserved = item.part.file_bytes
        for item in staged:
            with contextlib.suppress(FileExistsError):
                item.fd = root.files.create(item.temporary)
            if item.fd is None:  # left by an earlier failure of this very process: nobody else has the name
                root.files.unlink(item.temporary)
                item.fd = root.files.create(item.temporary)
            item.named = True
            root.files.set_size(item.fd, item.part.file_bytes)


def _write(root: Root, item: _Staged) -> None:
    """Payload first, summed slice by slice while it is in the cache; the header, which has the sum, last."""
    part, crc = item.part, 0
    begin = HEADER_BYTES + len(part.metadata)
    for at in range(0, len(part.payload), SLICE_BYTES):
        piece = part.payload[at : at + SLICE_BYTES]
        crc = crc32c(piece, crc)
        _write_full(root, item, piece, begin + at)
    header = make_header(
        part.meta, part.kind, part.metadata, payload_bytes=len(part.payload), payload_crc=crc
    )
    _write_full(root, item, memoryview(header.encode() + part.metadata), 0)


def _write_full(root: Root, item: _Staged, data: memoryview, offset: int) -> None:
    assert item.fd is not None
    done = 0
    while done < len(data):
        done += root.files.write(item.fd, [data[done:]], offset + done)


def _sync_all(root: Root, staged: Sequence[_Staged]) -> None:
    fds = [item.fd for item in staged if item.fd is not None]
    if len(fds) < _PARALLEL_SYNC:
        for fd in fds:
            root.files.sync(fd)
        return
    # Several at once: a device works on one flush while the next file's data is on its way.
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        for _ in pool.map(root.files.sync, fds):
            pass


def _link_all(root: Root, staged: Sequence[_Staged]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    there: set[PartId] = set()
    with root.adding():
        for item in staged:
            outcome = _link(root, item, there)
            outcomes.append(outcome)
            if outcome.is_there:
                there.add((item.part.meta.name, item.part.kind))
        root.files.sync_folder(root.nodes)
    return outcomes


def _link(root: Root, item: _Staged, there: set[PartId]) -> Outcome:
    part = item.part
    if not part.wanted():
        return Outcome.ABANDONED
    needs = part.needs
    if needs is not None and needs not in there and not root.files.exists(root.target(*needs)):
        return Outcome.NO_PARENT
    try:
        _link_new(root, item)
        return Outcome.PUBLISHED
    except FileExistsError:
        return _meet_existing(root, item)


def _link_new(root: Root, item: _Staged) -> None:
    """Give the temporary its target's name. Raises: FileExistsError."""
    try:
        root.files.link(item.temporary, item.target)
    except OSError as no:
        if no.errno not in LINKS_MISSING:
            raise
    else:
        item.reserved = 0
        root.files.unlink(item.temporary)
        item.named = False
        return
    lock = root.lock_renaming()
    try:
        if root.files.exists(item.target):
            raise FileExistsError(item.target)
        root.files.rename(item.temporary, item.target)
        item.named, item.reserved = False, 0
    finally:
        root.files.close(lock)


def _meet_existing(root: Root, item: _Staged) -> Outcome:
    part = item.part
    try:
        header, meta = read_head(root.files, item.target)
        same = meta.name == part.meta.name and header.kind is part.kind
        # Equal tokens computed otherwise are other bytes: the index must be right about what the file holds.
        same = same and header.provenance is part.meta.provenance
        if same and header.payload_bytes == len(part.payload):
            return Outcome.ADOPTED
        old_bytes = header.file_bytes
    except Damaged:
        old_bytes = _size_of(root, item.target)
    root.files.rename(item.temporary, item.target)
    item.named, item.reserved = False, 0
    root.give_back(old_bytes)
    return Outcome.REPLACED


def _size_of(root: Root, path: str) -> int:
    try:
        return root.files.size_at(path)
    except FileNotFoundError:
        return 0


def _clean_up(root: Root, staged: Sequence[_Staged]) -> None:
    """Close and remove what is left of temporaries, and give their bytes back.

    Under the lock, or not at all: a listing must never see a name whose bytes were given back, nor the
    other way round. What cannot be removed now, the next scan removes.
    """
    for item in staged:
        if item.fd is not None:
            with contextlib.suppress(OSError):
                root.files.close(item.fd)
    if not any(item.named or item.reserved for item in staged):
        return
    with contextlib.suppress(OSError, TierBusy), root.adding():
        for item in staged:
            if item.named:
                root.files.unlink(item.temporary)
            root.give_back(item.reserved)
            item.reserved = 0


assert HEADER_BYTES == 48
assert os.name == "posix"
