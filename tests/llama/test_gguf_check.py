"""The look at a file's first bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from erllama.errors import InvalidConfig, MalformedGguf, NotSupported
from erllama.llama.gguf_check import HEADER, check_gguf

if TYPE_CHECKING:
    from pathlib import Path


def _file(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"FUGG" + bytes(40), "not a GGUF file"),
        (b"GGUF\x03\x00", "ends inside its header"),
        (HEADER.pack(b"GGUF", 1, 1, 1), "version 1"),
        (HEADER.pack(b"GGUF", 50_331_648, 1, 1), "version 50331648"),  # the other byte order
        (HEADER.pack(b"GGUF", 3, 2**60, 1), "claims"),
        (HEADER.pack(b"GGUF", 3, 1, 2**63), "claims"),
    ],
)
def test_refusals(tmp_path: Path, content: bytes, match: str) -> None:
    """Wrong magic, version, byte order, sizes and truncated headers are malformed_gguf."""
    with pytest.raises(MalformedGguf, match=match):
        check_gguf(_file(tmp_path, content))


def test_vocabulary_only_file(tmp_path: Path) -> None:
    """X29: a file without tensors is refused, unless only the vocabulary is wanted."""
    path = _file(tmp_path, HEADER.pack(b"GGUF", 3, 0, 20))
    with pytest.raises(NotSupported, match="no weights"):
        check_gguf(path)
    check_gguf(path, vocab_only=True)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    """What cannot be opened is named, with the system's reason."""
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(InvalidConfig, match=os.fspath(path)):
            check_gguf(os.fspath(path))
