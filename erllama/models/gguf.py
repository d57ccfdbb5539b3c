"""What a GGUF file says about itself, read without native code: its scalars and strings.

Format: ggml's docs/gguf.md. Magic, version, counts, then key-value pairs; tensors are not looked at.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

from erllama.errors import MalformedGguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# gguf.md: enum gguf_metadata_value_type; all little-endian.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
# llama.cpp's encoders: they see a text as a whole and generate nothing.
ENCODERS = frozenset(
    (
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"),
        *("jina-bert-v2", "jina-bert-v3", "gemma-embedding", "llama-embed"),
    )
)


class Length(int):
    """How many values an array has, where the array itself is not read."""


def read_metadata(path: Path, whole: Sequence[str] = ()) -> dict[str, Any]:
    """Keys and values; of an array only its `Length`, unless its key ends with one of `whole`. Blocks.

    Raises: `MalformedGguf`, OSError.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise MalformedGguf(f"{path} is too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, tuple(whole)).metadata()
    except (struct.error, ValueError) as why:  # it ends early, or names what does not exist
        raise MalformedGguf(f"{path} is no readable GGUF file: {why}") from None


def embeds(metadata: dict[str, Any]) -> bool:
    """Whether this is a model for embeddings: it says how to pool, or is an encoder."""
    architecture = metadata.get("general.architecture")
    return architecture in ENCODERS or bool(metadata.get(f"{architecture}.pooling_type"))


class _Reader:
    """A place in the bytes."""

    def __init__(self, data: mmap.mmap, whole: tuple[str, ...]) -> None:
        self._data = data
        self._whole = whole
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, _, n_pairs = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        return dict(self._pair() for _ in range(n_pairs))

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(key.endswith(self._whole))

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _length(self) -> int:
        (n,) = self._unpack("<Q")
        if n > len(self._data) - self._at:
            raise ValueError(f"{n} of something in a file of {len(self._data)} bytes")
        return int(n)

    def _string(self) -> str:
        n = self._length()
        self._at += n
        return self._data[self._at - n : self._at].decode("utf-8", "replace")

    def _value(self, is_whole: bool) -> Any:
        (kind,) = self._unpack("<I")
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array() if is_whole else self._skip_array()
        return self._unpack(_layout(kind))[0]

    def _array(self) -> list[Any]:
        (kind,) = self._unpack("<I")
        n = self._length()
        if kind == STRING:
            return [self._string() for _ in range(n)]
        return [self._unpack(_layout(kind))[0] for _ in range(n)]

    def _skip_array(self) -> Length:
        (kind,) = self._unpack("<I")
        n = self._length()
        if kind == STRING:
            for _ in range(n):
                length = self._length()
                self._at += length
        else:
            self._at += n * struct.calcsize(_layout(kind))
        return Length(n)


def _layout(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"value type {kind}")
    return SCALARS[kind]
