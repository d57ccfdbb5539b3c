"""Whose KV it is: one hash over everything that decides whether saved bytes may be restored.

The content of the model's files counts, not their names. Hashing 100 MB takes a tenth of a second, 100 GB
minutes, so a file's hash is remembered by device, inode, size and times.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import TYPE_CHECKING

from erllama.files import try_write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CHUNK_BYTES = 8 << 20
SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)  # llama.cpp: llama_split_path


def model_files(path: str) -> list[str]:
    """All files of the model that is loaded from `path`: of a split one, each part."""
    split = SPLIT_NAME.fullmatch(path)
    if split is None:
        return [path]
    stem, count = split.groups()
    return [f"{stem}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def file_sha256(path: str, memory: Path) -> str:
    """SHA-256 of a file, from `memory` if the file is the one hashed before. Blocks.

    `memory` is a folder; what it cannot hold is hashed again next time.
    """
    stat = os.stat(path)
    # The change time cannot be set back: what a file was copied over with may keep the modification time.
    identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    key = hashlib.sha256(repr(identity).encode()).hexdigest()
    remembered = memory / key
    try:
        return remembered.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        digest = _hash(path)
    try_write(remembered, digest)  # a read-only cache folder costs a hash per load, nothing else
    return digest


def _hash(path: str) -> str:
    made = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        while chunk := f.read(CHUNK_BYTES):
            made.update(chunk)
    return made.hexdigest()


def shape_hash(facts: Mapping[str, object]) -> bytes:
    """One hash over named facts, independent of their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
