"""Blind trie: among thousands of siblings, finds the one that shares most with a key, in few steps.

Each parent node has one trie over the keys (token ids, or bytes) of its children. A fork stores only the
bit at which its two sides differ; keys themselves stay where the nodes are. So a descent may end at a child
that does not match at all, but never misses the child with the longest common prefix: whoever descends
compares once, with the child it arrives at (Ferragina and Grossi's blind search, the String B-tree).

A symbol of `width` bits is written as 1 followed by its bits; behind the last symbol come zeros. So a key
that is a prefix of another parts from it at a *presence bit*, and children that end on the way are seen.

Refs: 0 nothing; n > 0 the child node n; -i-1 the fork i. Bits grow from root to leaf. Two equal keys (bytes
of differently tokenised children) hang on a fork with bit SAME, always the lowest.

Rejected: a dictionary per parent and length (hundreds of bytes per node); sorted child lists with the
tokens in memory (a KiB per node); storing the tokens of one sibling per fork (the same, for crowds).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

SAME: Final = 0xFFFFFFFF
FORK_BYTES: Final = 16
CHILD_BYTES: Final = 8
Key = Sequence[int]


class NeedKey(Exception):
    """The key of `node` is not in memory; read it from its tier and call again."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


class BlindTrie:
    """The tries of all parents, over symbols of `width` bits. Nodes are rows of the tree."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._root = array("i")  # per node: its children's trie
        self._up = array("i")  # per node: the fork it hangs on, as ref; 0: it is its parent's root
        self._bit = array("I")
        self._left = array("i")
        self._right = array("i")
        self._fork_up = array("i")
        self._free_fork = 0

    def add_row(self) -> None:
        """Make room for one more node row."""
        self._root.append(0)
        self._up.append(0)

    def root(self, parent: int) -> int:
        """Ref of the parent's trie; 0 if it has no children."""
        return self._root[parent]

    @property
    def roots(self) -> array[int]:
        """The column of root refs, one per node row; to be read only."""
        return self._root

    @property
    def nbytes(self) -> int:
        """Bytes used by all columns."""
        return CHILD_BYTES * len(self._root) + FORK_BYTES * len(self._bit)

    def leaves(self, ref: int) -> Iterator[int]:
        """All children below a ref, shorter and smaller keys first."""
        todo = [ref] if ref else []
        while todo:
            ref = todo.pop()
            if ref > 0:
                yield ref
            else:
                todo += (self._right[-ref - 1], self._left[-ref - 1])

    def same(self, leaf: int) -> Iterator[int]:
        """`leaf` and all its siblings with an equal key."""
        top = leaf
        up = self._up[leaf]
        while up and self._bit[-up - 1] == SAME:
            top, up = up, self._fork_up[-up - 1]
        return self.leaves(top)

    def descend(self, parent: int, key: Key) -> tuple[int, list[int]]:
        """Where a blind search arrives: one child, and the refs of children that end on the way.

        If the key shares its first k symbols with any child, it shares them with the one returned. Each
        ended ref stands for children whose whole key is a prefix of what leads to that child.
        """
        ref, width, n = self._root[parent], self._width, len(key)
        ended: list[int] = []
        while ref < 0:
            fork = -ref - 1
            bit = self._bit[fork]
            if bit == SAME:
                ref = self._left[fork]
                continue
            symbol, inner = divmod(bit, width + 1)
            if inner == 0:
                if symbol < n:
                    ended.append(self._left[fork])
                    ref = self._right[fork]
                else:
                    ref = self._left[fork]
            elif symbol < n and key[symbol] >> (width - inner) & 1:
                ref = self._right[fork]
            else:
                ref = self._left[fork]
        return ref, ended

    def insert(self, parent: int, node: int, key: Key, read: Callable[[int], Key]) -> None:
        """Hang `node` under `parent`. Reads the key of at most one sibling.

        Raises: whatever `read` raises (`NeedKey`), with nothing changed.
        """
        if not self._root[parent]:
            self._root[parent] = node
            self._up[node] = 0
            return
        leaf, _ = self.descend(parent, key)
        bit, goes_right = self._fork_bit(key, read(leaf))
        above, ref = 0, self._root[parent]
        while ref < 0 and self._bit[-ref - 1] < bit:
            above, ref = ref, self._branch(-ref - 1, key)
        fork = self._new_fork(bit, above)
        self._left[-fork - 1], self._right[-fork - 1] = (ref, node) if goes_right else (node, ref)
        self._set_up(ref, fork)
        self._up[node] = fork
        self._replace(parent, above, ref, fork)

    def remove(self, parent: int, node: int) -> None:
        """Take `node` away from its siblings; needs no keys."""
        fork = self._up[node]
        if not fork:
            self._root[parent] = 0
            return
        i = -fork - 1
        sibling = self._left[i] if self._right[i] == node else self._right[i]
        above = self._fork_up[i]
        self._set_up(sibling, above)
        self._replace(parent, above, fork, sibling)
        self._up[node] = 0
        self._left[i] = self._free_fork
        self._free_fork = fork

    def _branch(self, fork: int, key: Key) -> int:
        symbol, inner = divmod(self._bit[fork], self._width + 1)
        one = symbol < len(key) and (inner == 0 or key[symbol] >> (self._width - inner) & 1)
        return self._right[fork] if one else self._left[fork]

    def _fork_bit(self, key: Key, other: Key) -> tuple[int, bool]:
        """The first bit at which two keys differ, and whether `key` has the 1."""
        n = min(len(key), len(other))
        i = _first_difference(key, other, n)
        if i == n:
            if len(key) == len(other):
                return SAME, True
            return n * (self._width + 1), len(key) > len(other)
        differing = (key[i] ^ other[i]) & ((1 << self._width) - 1)
        inner = self._width - differing.bit_length() + 1
        return i * (self._width + 1) + inner, bool(key[i] >> (self._width - inner) & 1)

    def _new_fork(self, bit: int, up: int) -> int:
        if self._free_fork:
            fork = self._free_fork
            self._free_fork = self._left[-fork - 1]
            self._bit[-fork - 1], self._fork_up[-fork - 1] = bit, up
            return fork
        self._bit.append(bit)
        self._left.append(0)
        self._right.append(0)
        self._fork_up.append(up)
        return -len(self._bit)

    def _set_up(self, ref: int, up: int) -> None:
        if ref > 0:
            self._up[ref] = up
        else:
            self._fork_up[-ref - 1] = up

    def _replace(self, parent: int, above: int, old: int, new: int) -> None:
        if not above:
            self._root[parent] = new
        elif self._left[-above - 1] == old:
            self._left[-above - 1] = new
        else:
            self._right[-above - 1] = new


def _first_difference(a: Key, b: Key, n: int) -> int:
    """First index below n at which a and b differ, or n; halving, so that slices compare at C speed."""
    low, high = 0, n
    if a[:n] == b[:n]:
        return n
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
