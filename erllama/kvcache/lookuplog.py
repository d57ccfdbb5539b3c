"""A log of look-ups and saves that `kvc sim` can replay under other budgets. Off unless a path is given.

A CBOR sequence in one file, mode 0600: it holds prompts as token ids. Records are arrays:

    ["space", index, shape hash, salt]
    ["find", seconds, space index, token ids, name of the last whole node that matched]
    ["save", seconds, space index, name, parent, start, token ids, text, kind, payload bytes, file bytes,
     provenance, reason, flags]
    ["cost", space index, seconds per token, seconds per pair of tokens]
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import cbor2

from .header import HEADER_BYTES
from .meta import encode_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .key import Identity, Tokens
    from .kinds import PartKind
    from .meta import NodeMeta
    from .score import PrefillCost


class LookupLog:
    """Appends records; `flush` writes them, in a worker thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pending = bytearray()
        self._spaces: dict[tuple[bytes, bytes], int] = {}

    def find(self, at: float, identity: Identity, tokens: Tokens, tip: bytes) -> None:
        """A prompt was looked up; `tip`: name of the last whole node found."""
        self._put("find", at, self._space(identity), tokens.tobytes(), tip)

    def save(self, at: float, meta: NodeMeta, kind: PartKind, payload_bytes: int) -> None:
        """A part was stored."""
        file_bytes = HEADER_BYTES + len(encode_metadata(meta, kind)) + payload_bytes
        node = (meta.name, meta.parent, meta.start, meta.tokens.tobytes(), meta.text)
        facts = (
            int(kind),
            payload_bytes,
            file_bytes,
            int(meta.provenance),
            int(meta.reason),
            int(meta.flags),
        )
        self._put("save", at, self._space(meta.identity), *node, *facts)

    def cost(self, identity: Identity, cost: PrefillCost) -> None:
        """Prefill was measured: from here on it decides who is evicted."""
        self._put("cost", self._space(identity), cost.per_token_s, cost.per_pair_s)

    def _space(self, identity: Identity) -> int:
        index = self._spaces.get(identity.space)
        if index is None:
            index = self._spaces[identity.space] = len(self._spaces)
            self._put("space", index, identity.shape_hash, identity.salt)
        return index

    def _put(self, *record: Any) -> None:
        self._pending += cbor2.dumps(list(record))

    def take(self) -> bytes:
        """What has gathered; it is the caller's to write."""
        data, self._pending = bytes(self._pending), bytearray()
        return data

    def write(self, data: bytes) -> None:
        """Append to the file. Thread: a worker thread. Raises: OSError."""
        fd = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)


def read_log(path: str) -> Iterator[list[Any]]:
    """Records of a log; a torn last one is left out."""
    with open(path, "rb") as stream:
        decoder = cbor2.CBORDecoder(stream)
        while True:
            try:
                record = decoder.decode()
            except (cbor2.CBORDecodeEOF, EOFError):
                return
            yield record
