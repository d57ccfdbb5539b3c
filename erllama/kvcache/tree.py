"""The index: which nodes exist and how they hang together, in at most 160 bytes per node.

Rule 1: a node's parent exists as long as the node does; rows are recycled, so only names are kept elsewhere.
Rule 2: token ids and text are not here. A walk confirms a child by its name (SHA-256 over parent and ids);
        the one child that a prompt may share a part of is returned for the caller to read and compare.
Rule 3: everything is synchronous and does no I/O. `insert` may need the key of one sibling: it asks `read`,
        which raises `NeedKey` if that node's head is not in memory; nothing has changed then.

A row costs 89 bytes here and in the tries, 32 more where siblings fork, 5 to 8
in the name table, 28 per part.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from typing import TYPE_CHECKING, Final

from .kinds import NodeFlag, PartKind, Provenance, SaveReason
from .names import NameTable
from .parts import PartTable
from .trie import BlindTrie, NeedKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .key import Identity
    from .meta import NodeMeta

_PROVENANCES: Final = tuple(Provenance)  # by number; a look-up is five times cheaper than the enum's own
_TOKEN_BITS: Final = 32
_BYTE_BITS: Final = 8
_COLUMN_BYTES: Final = 4 * 6 + 8 + 1


class Tree:
    """All nodes of all identities. Row 0 stands for none; a root row has no name and no parts.

    A root goes with its last node.
    """

    def __init__(self) -> None:
        self.names = NameTable()
        self.parts = PartTable()
        self.by_tokens = BlindTrie(_TOKEN_BITS)
        self.by_bytes = BlindTrie(_BYTE_BITS)
        self.parent = array("i")
        self.start = array("I")
        self.n_tokens = array("I")
        self.n_bytes = array("I")
        self.first_part = array("i")
        self.shape = array("I")  # number of the identity's shape hash: which model's KV it is
        self._byte_hash = array("Q")
        self._info = array("B")  # provenance, reason, flags
        self._free = 0
        self._roots: dict[tuple[bytes, bytes], int] = {}
        self._identities: dict[int, Identity] = {}
        self._shapes: dict[bytes, int] = {}
        self._secret = os.urandom(16)  # so that nobody can craft texts that collide in 64 bits
        self.n_nodes = 0
        self._append_row()

    # --- reading ----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the whole index."""
        tries = self.by_tokens.nbytes + self.by_bytes.nbytes
        return self.names.nbytes + self.parts.nbytes + tries + _COLUMN_BYTES * len(self.parent)

    def find(self, name: bytes) -> int | None:
        """The row of a name."""
        return self.names.find(name)

    def root(self, identity: Identity) -> int | None:
        """The root row of an identity, if it has nodes."""
        return self._roots.get(identity.space)

    def identity(self, row: int) -> Identity:
        """Whose node it is; walks up to the root."""
        while self.parent[row]:
            row = self.parent[row]
        return self._identities[row]

    def identities(self) -> list[tuple[int, Identity]]:
        """Root rows and their identities."""
        return list(self._identities.items())

    def path(self, row: int) -> list[int]:
        """Rows from the first block to `row`."""
        rows = []
        while self.parent[row]:
            rows.append(row)
            row = self.parent[row]
        return rows[::-1]

    def end(self, row: int) -> int:
        """Position behind the node's last token."""
        return self.start[row] + self.n_tokens[row]

    def is_leaf(self, row: int) -> bool:
        """Whether nothing hangs behind the node."""
        return self.by_tokens.root(row) == 0

    def children(self, row: int) -> Iterator[int]:
        """Rows behind a node, in token order."""
        return self.by_tokens.leaves(self.by_tokens.root(row))

    def subtree(self, row: int) -> list[int]:
        """`row` and everything behind it, leaves first."""
        rows, todo = [], [row]
        while todo:
            row = todo.pop()
            rows.append(row)
            todo += self.children(row)
        return rows[::-1]

    def rows(self) -> Iterator[int]:
        """All nodes, parents before children."""
        for root in self._identities:
            todo = list(self.children(root))
            while todo:
                row = todo.pop()
                yield row
                todo += self.children(row)

    def part(self, row: int, kind: PartKind) -> int:
        """The part row of that kind, or 0."""
        return self.parts.find(self.first_part[row], kind)

    def part_rows(self, row: int) -> list[int]:
        """All part rows of a node."""
        return self.parts.rows(self.first_part[row])

    def provenance(self, row: int) -> Provenance:
        """How the node was computed, as its first part says."""
        return _PROVENANCES[self._info[row] & 3]

    def reason(self, row: int) -> SaveReason:
        """Why the node was stored."""
        return SaveReason(self._info[row] >> 2 & 7)

    def flags(self, row: int) -> NodeFlag:
        """Anchor, private."""
        return NodeFlag(self._info[row] >> 5 & 7)

    def byte_hash(self, text: bytes | memoryview) -> int:
        """Keyed 64-bit hash of key bytes."""
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._secret).digest(), "little")

    def bytes_match(self, row: int, text: bytes | memoryview) -> bool:
        """Whether the node's key bytes are `text`, as far as the index can tell."""
        return self._byte_hash[row] == self.byte_hash(text)

    # --- writing ----------------------------------------------------------------------------------

    def shape_number(self, shape_hash: bytes) -> int:
        """The number of a shape hash, for good; a new one if it has none."""
        return self._shapes.setdefault(shape_hash, len(self._shapes))

    def add_root(self, identity: Identity) -> int:
        """The root row of an identity, made if new: a node is to be inserted behind it."""
        row = self._roots.get(identity.space)
        if row is None:
            row = self._new_row()
            self._roots[identity.space] = row
            self._identities[row] = identity
            self.shape[row] = self.shape_number(identity.shape_hash)
        return row

    def insert(self, parent: int, meta: NodeMeta, read: Callable[[int], NodeMeta]) -> int:
        """Add a node without parts behind `parent` (a node or a root); returns its row.

        Raises: `NeedKey` from `read`, with nothing changed. The name must be new.
        """
        row = self._new_row()
        try:
            self.by_tokens.insert(parent, row, meta.tokens.data, lambda r: read(r).tokens.data)
            if meta.text:
                self._insert_bytes(parent, row, meta, read)
        except NeedKey:
            self._free_row(row)
            raise
        self.names.put(meta.name, row)
        self.parent[row] = parent
        self.start[row] = meta.start
        self.shape[row] = self.shape[parent]
        self.n_tokens[row] = len(meta.tokens)
        self.n_bytes[row] = len(meta.text)
        self._byte_hash[row] = self.byte_hash(meta.text)
        self._info[row] = meta.provenance | meta.reason << 2 | meta.flags << 5
        self.n_nodes += 1
        return row

    def _insert_bytes(self, parent: int, row: int, meta: NodeMeta, read: Callable[[int], NodeMeta]) -> None:
        try:
            self.by_bytes.insert(parent, row, meta.text, lambda r: read(r).text)
        except NeedKey:
            self.by_tokens.remove(parent, row)
            raise

    def remove(self, row: int) -> None:
        """Remove a node that has neither children nor parts."""
        assert self.is_leaf(row), "a node with children cannot go"
        assert not self.first_part[row], "a node with parts cannot go"
        parent = self.parent[row]
        self.by_tokens.remove(parent, row)
        if self.n_bytes[row]:
            self.by_bytes.remove(parent, row)
        self.names.remove(self.names.name(row))
        self.n_nodes -= 1
        self._free_row(row)
        if not self.parent[parent] and self.is_leaf(parent):
            self._remove_root(parent)

    def _remove_root(self, row: int) -> None:
        """Clients choose salts, so identities come without end: one without nodes is forgotten."""
        del self._roots[self._identities.pop(row).space]
        self._free_row(row)

    def set_flag(self, row: int, flag: NodeFlag, *, on: bool) -> None:
        """Set or clear one flag."""
        bits = self._info[row]
        self._info[row] = bits | flag << 5 if on else bits & ~(flag << 5)

    def set_anchor(self, row: int) -> None:
        """The node is an anchor from now on, with every part it has."""
        self.set_flag(row, NodeFlag.ANCHOR, on=True)
        for part in self.part_rows(row):
            self.parts.anchor[part] = 1

    def add_part(self, row: int, kind: PartKind, size: int, home: int, used: int) -> int:
        """Add a part the node does not have yet; returns its part row."""
        assert not self.part(row, kind)
        part = self.parts.add(self.first_part[row], row, kind, size, home, used)
        self.parts.anchor[part] = bool(self.flags(row) & NodeFlag.ANCHOR)
        self.first_part[row] = part
        return part

    def remove_part(self, part: int) -> None:
        """Remove one part; its node stays."""
        row = self.parts.node[part]
        self.first_part[row] = self.parts.remove(self.first_part[row], part)

    # --- rows -------------------------------------------------------------------------------------

    def _append_row(self) -> None:
        for column in (self.parent, self.start, self.n_tokens, self.n_bytes, self.first_part, self.shape):
            column.append(0)
        self._byte_hash.append(0)
        self._info.append(0)
        self.names.add_row()
        self.by_tokens.add_row()
        self.by_bytes.add_row()

    def _new_row(self) -> int:
        if self._free:
            row, self._free = self._free, self.parent[self._free]
            self.parent[row] = 0
            return row
        self._append_row()
        return len(self.parent) - 1

    def _free_row(self, row: int) -> None:
        self.parent[row], self._free = self._free, row
