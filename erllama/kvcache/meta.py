"""The CBOR metadata of a KVC file: what a node is, in a form other programs can read.

A map with text keys. Required: v, name, parent, shape, salt, compute (byte strings), start, tokens (int32
little endian, packed), text (key bytes), kind, provenance. Optional: expires_ns. Everything else (`facts`) is
for people. `compute` is empty: version 1 has it, nothing reads it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import cbor2
import numpy as np
from crc32c import crc32c

from .header import HEADER_BYTES, Damaged, Header, decode_header
from .key import Identity, Tokens
from .kinds import NAME_BYTES, NodeFlag, PartKind, Provenance, SaveReason

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA_VERSION: Final = 1
_OWN = frozenset(
    [
        *("v", "name", "parent", "shape", "salt", "compute", "start", "tokens", "text", "kind", "provenance"),
        *("expires_ns", "quant_bits", "n_ctx"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeMeta:
    """One node as written into each of its files; `start` is the position of its first token."""

    name: bytes
    parent: bytes
    identity: Identity
    start: int
    tokens: Tokens
    text: bytes = b""
    provenance: Provenance = Provenance.PREFILL
    reason: SaveReason = SaveReason.COLD
    flags: NodeFlag = NodeFlag.NONE
    created_ns: int = 0
    expires_ns: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_bytes(self) -> int:
        """What keeping this in memory costs, roughly: ids, text, objects."""
        return self.tokens.nbytes + len(self.text) + 1024


def encode_metadata(meta: NodeMeta, kind: PartKind) -> bytes:
    """The CBOR map of one part."""
    fields: dict[str, Any] = {
        "v": METADATA_VERSION,
        "name": meta.name,
        "parent": meta.parent,
        "shape": meta.identity.shape_hash,
        "salt": meta.identity.salt,
        "compute": b"",
        "start": meta.start,
        "tokens": meta.tokens.tobytes(),
        "text": meta.text,
        "kind": kind.name.lower(),
        "provenance": meta.provenance.name.lower(),
    }
    if meta.expires_ns is not None:
        fields["expires_ns"] = meta.expires_ns
    for source in (meta.identity.facts, meta.facts):
        fields |= {key: value for key, value in source.items() if key not in _OWN}
    return cbor2.dumps(fields)


def make_header(
    meta: NodeMeta, kind: PartKind, metadata: bytes, *, payload_bytes: int, payload_crc: int
) -> Header:
    """The header of one part, given its encoded metadata."""
    return Header(
        reason=meta.reason,
        kind=kind,
        quant_bits=meta.identity.quant_bits,
        provenance=meta.provenance,
        flags=meta.flags,
        n_tokens=len(meta.tokens),
        n_ctx=meta.identity.n_ctx,
        created_ns=meta.created_ns,
        payload_bytes=payload_bytes,
        metadata_bytes=len(metadata),
        metadata_crc=crc32c(metadata),
        payload_crc=payload_crc,
    )


def encode_head(meta: NodeMeta, kind: PartKind, payload_bytes: int, payload_crc: int) -> bytes:
    """Header and metadata of one part: everything of its file that precedes the payload."""
    metadata = encode_metadata(meta, kind)
    header = make_header(meta, kind, metadata, payload_bytes=payload_bytes, payload_crc=payload_crc)
    return header.encode() + metadata


def decode_metadata(header: Header, data: bytes | memoryview) -> NodeMeta:
    """Read the metadata that belongs to `header`.

    Raises: `Damaged` ("metadata" for a wrong checksum or structure, "name" if the name does not follow
    from identity, parent and tokens).
    """
    if len(data) != header.metadata_bytes or crc32c(data) != header.metadata_crc:
        raise Damaged("metadata", "checksum")
    try:
        with io.BytesIO(data) as stream:
            fields = cbor2.load(stream)
            if stream.read(1):
                raise Damaged("metadata", "bytes behind the map")
        meta = _from_fields(header, fields)
    except Damaged:
        raise
    except Exception as broken:  # whatever a decoder makes of hostile bytes is damage here
        raise Damaged("metadata", f"{type(broken).__name__}: {broken}") from None
    if meta.identity.node_name(meta.parent, meta.tokens.tobytes()) != meta.name:
        raise Damaged("name", meta.name.hex())
    return meta


def _from_fields(header: Header, fields: Any) -> NodeMeta:
    if not isinstance(fields, dict) or fields["v"] != METADATA_VERSION:
        raise Damaged("metadata", "not a map of version 1")
    for key in ("name", "parent", "shape", "salt", "compute", "tokens", "text"):
        if not isinstance(fields[key], bytes):
            raise Damaged("metadata", f"{key} is not a byte string")
    if len(fields["name"]) != NAME_BYTES or len(fields["parent"]) != NAME_BYTES:
        raise Damaged("metadata", "length of a name")
    start, expires = fields["start"], fields.get("expires_ns")
    if type(start) is not int or not 0 <= start < 2**32:
        raise Damaged("metadata", "start")
    if expires is not None and type(expires) is not int:
        raise Damaged("metadata", "expires_ns")
    if header.kind.name.lower() != fields["kind"] or header.provenance.name.lower() != fields["provenance"]:
        raise Damaged("metadata", "kind or provenance differs from the header")
    tokens = np.frombuffer(fields["tokens"], "<i4")
    if len(tokens) != header.n_tokens or not len(tokens):
        raise Damaged("metadata", f"{len(tokens)} tokens, the header says {header.n_tokens}")
    identity = Identity(
        shape_hash=fields["shape"],
        salt=fields["salt"],
        quant_bits=header.quant_bits,
        n_ctx=header.n_ctx,
    )
    return NodeMeta(
        name=fields["name"],
        parent=fields["parent"],
        identity=identity,
        start=start,
        tokens=tokens,
        text=fields["text"],
        provenance=header.provenance,
        reason=header.reason,
        flags=header.flags,
        created_ns=header.created_ns,
        expires_ns=expires,
        facts={str(key): value for key, value in fields.items() if key not in _OWN},
    )


def decode_head(data: bytes | memoryview) -> tuple[Header, NodeMeta]:
    """Header and metadata from the first bytes of a file. Raises: `Damaged`."""
    header = decode_header(data)
    end = HEADER_BYTES + header.metadata_bytes
    if len(data) < end:
        raise Damaged("size", "ends inside the metadata")
    return header, decode_metadata(header, bytes(data[HEADER_BYTES:end]))
