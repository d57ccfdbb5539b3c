"""Reading KVC files: heads for the index, payloads straight into pooled buffers, never through a mapping.

Whatever is wrong with a file (gone, cut, flipped, foreign) is `Damaged`: callers have one thing to catch.
Thread: worker threads.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from .header import HEADER_BYTES, Damaged, Header, decode_header
from .meta import NodeMeta, decode_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .files import Files

SLICE_BYTES: Final = 1 << 20  # copied and checksummed in turn: the sum then reads from cache, not memory
_FIRST_READ: Final = 4096  # header and metadata of a 256-token node fit, so most heads take one call


@contextlib.contextmanager
def opened(files: Files, path: str) -> Iterator[int]:
    """A file for reading. Raises: `Damaged` "missing" if it is gone."""
    try:
        fd = files.open_read(path)
    except FileNotFoundError:
        raise Damaged("missing", path) from None
    try:
        yield fd
    finally:
        files.close(fd)


def read_full(files: Files, fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from `offset` on. Raises: `Damaged` "size" if the file ends before."""
    done = 0
    while done < len(into):
        n = files.read(fd, [into[done:]], offset + done)
        if n == 0:
            raise Damaged("size", "file ends early")
        done += n


def read_head_from(files: Files, fd: int) -> tuple[Header, NodeMeta]:
    """Header and metadata of an open file; its size must be what the header says. Raises: `Damaged`."""
    size = files.size(fd)
    data = memoryview(bytearray(min(_FIRST_READ, size)))
    read_full(files, fd, data, 0)
    header = decode_header(data)
    if size != header.file_bytes:
        raise Damaged("size", f"{size} bytes, the header says {header.file_bytes}")
    end = HEADER_BYTES + header.metadata_bytes
    if end > len(data):
        whole = memoryview(bytearray(end))
        whole[: len(data)] = data
        read_full(files, fd, whole[len(data) :], len(data))
        data = whole
    return header, decode_metadata(header, bytes(data[HEADER_BYTES:end]))


def read_head(files: Files, path: str) -> tuple[Header, NodeMeta]:
    """Header and metadata of a file. Raises: `Damaged`, OSError other than not found."""
    with opened(files, path) as fd:
        return read_head_from(files, fd)


def read_part(files: Files, path: str, into: memoryview) -> tuple[Header, NodeMeta]:
    """Read a part's payload into `into`, which must have its size, and verify all of it.

    Raises: `Damaged`; what is in `into` must not be used then.
    """
    with opened(files, path) as fd:
        header, meta = read_head_from(files, fd)
        if header.payload_bytes != len(into):
            raise Damaged("size", f"payload of {header.payload_bytes} bytes, {len(into)} expected")
        crc, begin = 0, HEADER_BYTES + header.metadata_bytes
        for at in range(0, len(into), SLICE_BYTES):
            piece = into[at : at + SLICE_BYTES]
            read_full(files, fd, piece, begin + at)
            crc = crc32c(piece, crc)
    if crc != header.payload_crc:
        raise Damaged("payload", "checksum")
    return header, meta


def verify_file(files: Files, path: str) -> tuple[Header, NodeMeta]:
    """Check a whole file in a small buffer. Raises: `Damaged`."""
    with opened(files, path) as fd:
        header, meta = read_head_from(files, fd)
        buffer = memoryview(bytearray(min(SLICE_BYTES, max(header.payload_bytes, 1))))
        done, crc = 0, 0
        while done < header.payload_bytes:
            piece = buffer[: min(len(buffer), header.payload_bytes - done)]
            read_full(files, fd, piece, HEADER_BYTES + header.metadata_bytes + done)
            crc = crc32c(piece, crc)
            done += len(piece)
    if crc != header.payload_crc:
        raise Damaged("payload", "checksum")
    return header, meta
