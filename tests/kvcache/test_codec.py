"""The KVC file: golden bytes, round trips, and damage of every kind at every place."""

from __future__ import annotations

import dataclasses
import os
import random
import struct
from typing import TYPE_CHECKING

import cbor2
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from erllama.kvcache.files import Files
from erllama.kvcache.header import HEADER_BYTES, Damaged, Header, decode_header
from erllama.kvcache.key import Identity
from erllama.kvcache.kinds import NodeFlag, PartKind, Provenance, SaveReason
from erllama.kvcache.meta import decode_head, encode_head
from erllama.kvcache.read import read_head, read_part, verify_file

from .nodes import IDENTITY, node, payload

if TYPE_CHECKING:
    from pathlib import Path

HEADER = Header(
    reason=SaveReason.FINISH,
    kind=PartKind.WINDOW,
    quant_bits=8,
    provenance=Provenance.DECODED,
    flags=NodeFlag.ANCHOR,
    n_tokens=256,
    n_ctx=4096,
    created_ns=1_700_000_000_000_000_000,
    payload_bytes=0x1122334455,
    metadata_bytes=0x667788,
    metadata_crc=0xAABBCCDD,
    payload_crc=0x01020304,
)
GOLDEN = bytes.fromhex(
    "4b5643 01 05 02 08 06 00010000 00100000 00002a36fe9c9717 5544332211000000 88776600 ddccbbaa 04030201"
)


def write(path: Path, n_bytes: int = 300, kind: PartKind = PartKind.BASE) -> bytes:
    """A valid file; returns its content."""
    meta = node([1, 2, 3])
    body = payload(meta, n_bytes)
    content = encode_head(meta, kind, n_bytes, crc32c(body)) + body
    path.write_bytes(content)
    return content


def test_header_golden_bytes() -> None:
    """K11: the 48 bytes are these, and nothing else, for ever."""
    assert HEADER.encode() == GOLDEN + struct.pack("<I", crc32c(GOLDEN))
    assert len(HEADER.encode()) == HEADER_BYTES == 48
    assert decode_header(HEADER.encode()) == HEADER


def test_an_independent_reader_understands_the_file(tmp_path: Path) -> None:
    """K12: header by offsets and metadata by a plain CBOR decoder, as the documentation describes them."""
    content = write(tmp_path / "f")
    assert content[:4] == b"KVC\x01"
    n_tokens, n_ctx = struct.unpack_from("<II", content, 8)
    created, payload_bytes, metadata_bytes = struct.unpack_from("<QQI", content, 16)
    fields = cbor2.loads(content[48 : 48 + metadata_bytes])
    assert (n_tokens, n_ctx, payload_bytes) == (3, 4096, 300)
    assert created == 1_700_000_000_000_000_000
    assert struct.unpack(f"<{n_tokens}i", fields["tokens"]) == (1, 2, 3)
    assert fields["text"] == b"bcd"
    assert (fields["kind"], fields["provenance"], fields["start"]) == ("base", "prefill", 0)
    assert (fields["fingerprint"], fields["host"]) == ("f" * 64, "here")
    assert (fields["shape"], fields["compute"]) == (IDENTITY.shape_hash, b"")
    assert len(content) == 48 + metadata_bytes + payload_bytes


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300),
    salt=st.binary(max_size=20),
    kind=st.sampled_from(PartKind),
    provenance=st.sampled_from(Provenance),
    facts=st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=4),
)
def test_head_round_trip(
    ids: list[int], salt: bytes, kind: PartKind, provenance: Provenance, facts: dict
) -> None:
    """K12: every field comes back equal, whatever the facts are called."""
    identity = Identity(shape_hash=b"s" * 32, salt=salt, quant_bits=4, n_ctx=7, facts=facts)
    meta = node([abs(i) % 26 for i in ids], identity=identity, provenance=provenance, flags=NodeFlag.ANCHOR)
    header, back = decode_head(encode_head(meta, kind, 12, 99))
    assert header.kind is kind
    assert header.payload_crc == 99
    assert np.array_equal(back.tokens, meta.tokens)
    for field in ("name", "parent", "start", "text", "provenance", "reason", "flags", "created_ns"):
        assert getattr(back, field) == getattr(meta, field)
    assert back.identity == Identity(shape_hash=b"s" * 32, salt=salt, quant_bits=4, n_ctx=7)
    own = {"v", "name", "parent", "shape", "salt", "compute", "start", "tokens", "text", "kind", "provenance"}
    assert back.facts == {
        k: v for k, v in facts.items() if k not in own | {"expires_ns", "quant_bits", "n_ctx"}
    }


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    """K11: every bit of every byte; head damage when the head is read, payload damage when it is used."""
    path, files = tmp_path / "f", Files()
    content = write(path, 40)
    into = memoryview(bytearray(40))
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged):
            read_part(files, str(path), into)
        if at < len(content) - 40:
            with pytest.raises(Damaged):
                read_head(files, str(path))
        with pytest.raises(Damaged):
            verify_file(files, str(path))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """K9: cut at every length, and one byte too long."""
    path, files = tmp_path / "f", Files()
    content = write(path, 40)
    for n in range(len(content)):
        path.write_bytes(content[:n])
        with pytest.raises(Damaged):
            read_head(files, str(path))
    path.write_bytes(content + b"\0")
    with pytest.raises(Damaged, match="size"):
        read_head(files, str(path))


def test_a_file_cut_or_removed_while_it_is_read(tmp_path: Path) -> None:
    """K9: another process truncates between two reads, or unlinks before the first: a typed miss."""
    path = tmp_path / "f"
    write(path, 9000)

    class Cutting(Files):
        def read(self, fd, chunks, offset):  # type: ignore[no-untyped-def]
            n = super().read(fd, [chunks[0][:4096]], offset)
            os.truncate(path, 5000)
            return n

    with pytest.raises(Damaged, match="size"):
        read_part(Cutting(), str(path), memoryview(bytearray(9000)))
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        read_part(Files(), str(path), memoryview(bytearray(9000)))


def with_compute(value: bytes | str | None) -> bytes:
    """A head whose metadata say this under `compute`; None: they have no such key."""
    head = encode_head(node([1, 2, 3]), PartKind.BASE, 5, 0)
    fields = cbor2.loads(head[48:])
    del fields["compute"]
    if value is not None:
        fields["compute"] = value
    metadata = cbor2.dumps(fields)
    header = decode_header(head)
    header = dataclasses.replace(header, metadata_bytes=len(metadata), metadata_crc=crc32c(metadata))
    return header.encode() + metadata


def test_what_stands_in_compute_is_ignored_as_long_as_it_is_bytes() -> None:
    """K12: version 1 has the key; files of earlier builds may hold something there."""
    metas = [decode_head(with_compute(value))[1] for value in (b"", b"avx512")]
    assert metas[0].identity == metas[1].identity
    assert metas[0].name == metas[1].name == node([1, 2, 3]).name
    assert "compute" not in metas[1].facts
    for wrong in (None, "avx512"):
        with pytest.raises(Damaged, match="compute"):
            decode_head(with_compute(wrong))


def test_foreign_and_older_versions_are_refused() -> None:
    """K10: a version this library does not write is not guessed at."""
    data = bytearray(HEADER.encode())
    data[3] = 0
    with pytest.raises(Damaged) as damage:
        decode_header(bytes(data))
    assert damage.value.what == "version"
    with pytest.raises(Damaged, match="magic"):
        decode_header(b"GGUF" + bytes(60))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 2**32))
def test_random_bytes_are_damage_never_another_error(data: bytes, seed: int) -> None:
    """Fuzz: random bytes, and valid heads with random metadata under right checksums."""
    with pytest.raises(Damaged):
        decode_head(data)
    meta = node([1, 2, 3])
    head = encode_head(meta, PartKind.BASE, 5, 0)
    rng = random.Random(seed)
    metadata = bytearray(head[48:])
    for _ in range(rng.randrange(1, 4)):
        metadata[rng.randrange(len(metadata))] = rng.randrange(256)
    if bytes(metadata) == head[48:]:
        return
    body = bytearray(head[:44])
    struct.pack_into("<I", body, 36, crc32c(metadata))
    forged = bytes(body) + struct.pack("<I", crc32c(body)) + metadata
    try:
        _, back = decode_head(forged)
    except Damaged:
        return
    # Facts and text are not in the name; what identifies the node is.
    assert (back.name, list(back.tokens)) == (meta.name, [1, 2, 3])


def test_a_hostile_metadata_size_allocates_nothing() -> None:
    """A header that announces gigabytes of metadata is damage before anything is allocated."""
    with pytest.raises(Damaged):
        decode_header(
            Header(**{f: getattr(HEADER, f) for f in HEADER.__slots__} | {"metadata_bytes": 2**31}).encode()
        )
