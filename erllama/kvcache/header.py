"""The 48-byte header that starts every KVC file.

Layout, little endian (docs/internals/file-format.md has it with an example):

    0   3s  magic "KVC"          16  u64  creation time, ns since the epoch
    3   u8  format version       24  u64  payload bytes
    4   u8  save reason          32  u32  metadata bytes
    5   u8  part kind            36  u32  CRC32C of the metadata
    6   u8  quantisation bits    40  u32  CRC32C of the payload
    7   u8  provenance | flags   44  u32  CRC32C of bytes 0..43
    8   u32 token count
    12  u32 context size

Rule: a file is metadata-checked when it is indexed and payload-checked when it is used; both sums
and all sizes must agree, otherwise the part does not exist.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from .kinds import NodeFlag, PartKind, Provenance, SaveReason

MAGIC: Final = b"KVC"
VERSION: Final = 1
HEADER_BYTES: Final = 48
MAX_METADATA_BYTES: Final = 64 << 20  # a larger one is damage, not a node: do not allocate for it
_LAYOUT = struct.Struct("<3sBBBBBIIQQIII")
_SUM = struct.Struct("<I")
_PROVENANCE_BITS = 0x03
_FLAG_SHIFT = 2
_RESERVED_BITS = 0xF0


class Damaged(Exception):
    """A file or buffer that is not what its header says.

    `what` is one of: magic, version, header, metadata, payload, size, name, missing, tokens.
    """

    def __init__(self, what: str, detail: str = "") -> None:
        super().__init__(f"{what}: {detail}" if detail else what)
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fixed header of one part; sizes in bytes, `created_ns` since the epoch."""

    reason: SaveReason
    kind: PartKind
    quant_bits: int
    provenance: Provenance
    flags: NodeFlag
    n_tokens: int
    n_ctx: int
    created_ns: int
    payload_bytes: int
    metadata_bytes: int
    metadata_crc: int
    payload_crc: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + self.metadata_bytes + self.payload_bytes

    def encode(self) -> bytes:
        """The 48 bytes, with their own checksum last."""
        body = _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.reason,
            self.kind,
            self.quant_bits,
            self.provenance | self.flags << _FLAG_SHIFT,
            self.n_tokens,
            self.n_ctx,
            self.created_ns,
            self.payload_bytes,
            self.metadata_bytes,
            self.metadata_crc,
            self.payload_crc,
        )
        return body + _SUM.pack(crc32c(body))


def decode_header(data: bytes | memoryview) -> Header:
    """Read a header.

    Raises: `Damaged` with `what` "size", "magic", "version" (a foreign or older file) or "header".
    """
    if len(data) < HEADER_BYTES:
        raise Damaged("size", f"{len(data)} bytes, a header has {HEADER_BYTES}")
    body = bytes(data[: HEADER_BYTES - 4])
    if body[:3] != MAGIC:
        raise Damaged("magic", repr(body[:3]))
    if body[3] != VERSION:
        raise Damaged("version", f"{body[3]}, this library reads {VERSION}")
    if _SUM.unpack(data[HEADER_BYTES - 4 : HEADER_BYTES])[0] != crc32c(body):
        raise Damaged("header", "checksum")
    (_, _, reason, kind, bits, mixed, n_tokens, n_ctx, created, payload, metadata, crc_m, crc_p) = (
        _LAYOUT.unpack(body)
    )
    if mixed & _RESERVED_BITS or metadata > MAX_METADATA_BYTES:
        raise Damaged("header", "reserved bits or sizes out of range")
    try:
        return Header(
            reason=SaveReason(reason),
            kind=PartKind(kind),
            quant_bits=bits,
            provenance=Provenance(mixed & _PROVENANCE_BITS),
            flags=NodeFlag(mixed >> _FLAG_SHIFT),
            n_tokens=n_tokens,
            n_ctx=n_ctx,
            created_ns=created,
            payload_bytes=payload,
            metadata_bytes=metadata,
            metadata_crc=crc_m,
            payload_crc=crc_p,
        )
    except ValueError as unknown:
        raise Damaged("header", str(unknown)) from None
