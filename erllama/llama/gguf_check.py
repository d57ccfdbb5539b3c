"""A look at a GGUF's first bytes, before llama.cpp sees the file.

Cheap refusals with plain words; llama.cpp still checks everything else. Layout: ggml's docs/gguf.md:
magic "GGUF", version u32, tensor count u64, metadata count u64, little-endian.
"""

from __future__ import annotations

import os
import stat
import struct

from erllama.errors import InvalidConfig, MalformedGguf, NotSupported

HEADER = struct.Struct("<4sIQQ")
VERSIONS = (2, 3)  # gguf.h: GGUF_VERSION 3; version 1 is refused by llama.cpp
MAX_ENTRIES = 1 << 24  # of either kind; real files have thousands


def check_gguf(path: str, *, vocab_only: bool = False) -> None:
    """Refuse what cannot be a model file.

    Raises: `InvalidConfig` (no such file, a folder or pipe, unreadable), `MalformedGguf`,
    `NotSupported` (no tensors).
    """
    try:
        # Asked first: opening a pipe waits for its other end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidConfig(f"{path} is not a file", detail={"key": "model", "value": path})
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
            n_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidConfig(
            f"{path}: {error.strerror or error}", detail={"key": "model", "value": path}
        ) from error
    detail = {"path": path, "n_bytes": n_bytes}
    if head[:4] != b"GGUF":
        raise MalformedGguf(f"{path} is not a GGUF file (it starts with {head[:4]!r})", detail=detail)
    if len(head) < HEADER.size:
        raise MalformedGguf(f"{path} ends inside its header ({n_bytes} bytes)", detail=detail)
    _, version, n_tensors, n_entries = HEADER.unpack(head)
    if version not in VERSIONS:
        raise MalformedGguf(f"{path} has GGUF version {version}; known are {VERSIONS}", detail=detail)
    if n_tensors > MAX_ENTRIES or n_entries > MAX_ENTRIES:
        raise MalformedGguf(f"{path} claims {n_tensors} tensors and {n_entries} entries", detail=detail)
    if n_tensors == 0 and not vocab_only:
        raise NotSupported(f"{path} holds a vocabulary but no weights", detail=detail)
