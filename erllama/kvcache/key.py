"""Names of nodes, bytes that nodes are matched by, and what a prompt looks like to the store.

A node's name is SHA-256 over: "KVC1", length and bytes of the shape hash, length and bytes of the salt
(lengths as u32), the parent's name (32 bytes, zeros for a first block), the token ids (int32), all little
endian. Equal history under an equal identity gives an equal name, whoever writes it.

Key bytes: the text of ordinary tokens; a control token is 0xFF and its id as u32, big endian. 0xFF never
occurs in UTF-8, so a control token and its characters typed by a user cannot be confused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from .kinds import NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from hashlib import _Hash

Tokens = NDArray[np.int32]
NAME_FORMAT: Final = b"KVC1"
CONTROL_BYTE: Final = 0xFF
_LENGTH = struct.Struct("<I")


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    """Token ids as a contiguous little-endian int32 array; no copy if they already are one."""
    return np.ascontiguousarray(ids, dtype="<i4")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose KV it is: a hit needs equal `shape_hash` and `salt`.

    `shape_hash` covers everything that decides whether bytes may be restored (model content, adapters,
    KV types and layout, rope, build) and, for `exact="cold"`, whether they have the same bits. `facts` is
    written into each file for people and tools (fingerprint and its mode, quantisation, versions); the
    store never decides by it.
    """

    shape_hash: bytes
    salt: bytes = b""
    quant_bits: int = 16
    n_ctx: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    _seed: _Hash = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seed = hashlib.sha256(NAME_FORMAT)
        for piece in (self.shape_hash, self.salt):
            seed.update(_LENGTH.pack(len(piece)) + piece)
        object.__setattr__(self, "_seed", seed)

    @property
    def space(self) -> tuple[bytes, bytes]:
        """What separates trees: shape hash and salt."""
        return self.shape_hash, self.salt

    def node_name(self, parent: bytes, token_bytes: bytes | memoryview) -> bytes:
        """The name of the node with these tokens (int32, little endian) behind `parent`."""
        made = self._seed.copy()
        made.update(parent)
        made.update(token_bytes)
        return made.digest()


def control_piece(token: int) -> bytes:
    """Key bytes of a control token."""
    return bytes((CONTROL_BYTE,)) + struct.pack(">I", token)


@dataclass(frozen=True, eq=False)
class Prompt:
    """What to look up: token ids and, for text and chat input, the key bytes of each token.

    `text` is the concatenated key bytes; `offsets[i]` is where token i's begin, `offsets[n]` the end.
    Without `text` the prompt is matched by tokens only.
    """

    tokens: Tokens
    text: bytes | None = None
    offsets: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, tokens: Sequence[int] | Tokens, pieces: Sequence[bytes] | None = None) -> Prompt:
        """A prompt from ids, and with `pieces` (each token's key bytes) one that may match by bytes.

        Raises: ValueError if there are not as many pieces as tokens.
        """
        ids = as_tokens(tokens)
        if pieces is None:
            return cls(ids)
        if len(pieces) != len(ids):
            raise ValueError(f"{len(pieces)} pieces for {len(ids)} tokens")
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        return cls(ids, b"".join(pieces), offsets)

    def token_at(self, byte_pos: int) -> int | None:
        """The token that begins at this byte, or None inside a token. The end counts as a beginning."""
        if self.offsets is None:
            return None
        # Tokens without text share an offset; the last of them leaves the most behind us.
        i = int(np.searchsorted(self.offsets, byte_pos, "right")) - 1
        return i if self.offsets[i] == byte_pos else None


def common_prefix(a: Tokens | NDArray[np.uint8], b: Tokens | NDArray[np.uint8]) -> int:
    """Length of the longest common prefix of two arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


assert hashlib.sha256().digest_size == NAME_BYTES
