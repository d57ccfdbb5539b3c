"""The longest-prefix walk: how far a prompt is stored, by tokens, and by bytes where tokenisation differs.

Depth-first over the nodes that match the prompt completely: there is more than one branch only where siblings
of different length (tails, pieces) or of different tokenisation lie on the prompt's way. The cost grows with
the prompt, not with the store. Where a walk ends, the blind search names the one sibling that may share a
part of the prompt; the caller reads that node's head and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .key import Identity, Prompt
    from .tree import Tree


@dataclass(slots=True)  # not frozen: hundreds are made per walk, and a frozen one costs three times as much
class Place:
    """A node on the prompt's way: it covers the prompt from `before` to (`token_pos`, `byte_pos`).

    `token_pos` is None where the node ends inside one of the prompt's tokens. `by_bytes`: its ids differ
    from the prompt's, or are not known to be equal.
    """

    row: int
    token_pos: int | None
    byte_pos: int
    by_bytes: bool = False
    before: Place | None = None

    def path(self) -> list[Place]:
        """From the first block to here; the root is not in it."""
        places: list[Place] = []
        place: Place | None = self
        while place is not None and place.before is not None:
            places.append(place)
            place = place.before
        return places[::-1]


@dataclass(frozen=True, slots=True)
class Maybe:
    """The child of `place` that shares most with the rest of the prompt; how much, only its head can tell."""

    place: Place
    row: int
    by_bytes: bool


@dataclass(frozen=True, slots=True)
class Walk:
    """The furthest place whose path matches completely, what may reach further, and nodes tried."""

    best: Place
    maybe: tuple[Maybe, ...]
    probes: int


class Walker:
    """One walk of one prompt."""

    def __init__(self, tree: Tree, identity: Identity, prompt: Prompt) -> None:
        self._tree, self._identity, self._prompt = tree, identity, prompt
        self._tokens = prompt.tokens.data
        self._token_bytes = self._tokens.cast("B")
        self._text = None if prompt.text is None else memoryview(prompt.text)
        self._probes = 0
        self._maybe: list[Maybe] = []

    def run(self) -> Walk:
        """Walk from the identity's root."""
        root = self._tree.root(self._identity)
        best = Place(root or 0, 0, 0)
        todo = [best] if root else []
        while todo:
            place = todo.pop()
            if self._reach(place) > self._reach(best):
                best = place
            found = list(self._children(place))
            todo += reversed(found)  # the longest match by tokens is walked first
        maybe = [m for m in self._maybe if self._potential(m) > self._reach(best)]
        maybe.sort(key=self._potential, reverse=True)
        return Walk(best, tuple(maybe), self._probes)

    def _reach(self, place: Place) -> tuple[int, int]:
        """How far a place got: in bytes if there are any, then in tokens (some have no text)."""
        return place.byte_pos, place.token_pos or 0

    def _potential(self, maybe: Maybe) -> tuple[int, int]:
        """How far a partial match could reach at most."""
        tree, place = self._tree, maybe.place
        if maybe.by_bytes:
            assert self._text is not None
            return min(place.byte_pos + tree.n_bytes[maybe.row], len(self._text)), len(self._tokens)
        end = min((place.token_pos or 0) + tree.n_tokens[maybe.row], len(self._tokens))
        return self._byte_at(end), end

    def _byte_at(self, token_pos: int) -> int:
        offsets = self._prompt.offsets
        return 0 if offsets is None else int(offsets[token_pos])

    def _children(self, place: Place) -> Iterator[Place]:
        """Children of `place` that match completely, longest first; notes who may match in part."""
        only = 0
        if place.token_pos is not None:
            matched = list(self._token_children(place, place.token_pos))
            yield from matched
            only = matched[0].row if matched else 0
        else:
            matched = []
        root = self._tree.by_bytes.root(place.row)
        # An only child that already matches by tokens leaves nothing for bytes to find.
        if self._text is not None and root and root != only:
            seen = {m.row for m in matched}
            yield from (
                p for p in self._byte_children(place, self._text[place.byte_pos :]) if p.row not in seen
            )

    def _token_children(self, place: Place, pos: int) -> Iterator[Place]:
        trie = self._tree.by_tokens
        rest = self._tokens[pos:]
        if not len(rest) or not trie.root(place.row):
            return
        leaf, ended = trie.descend(place.row, rest)
        certain = self._name_matches(place.row, leaf, pos)
        if certain:
            yield self._token_place(place, leaf, pos)
        else:
            self._maybe.append(Maybe(place, leaf, by_bytes=False))
        for ref in reversed(ended):
            for row in trie.leaves(ref):
                # What parts from a confirmed child by ending earlier is a prefix of it: no need to hash.
                certain = certain or self._name_matches(place.row, row, pos)
                if certain:
                    yield self._token_place(place, row, pos)

    def _token_place(self, place: Place, row: int, pos: int) -> Place:
        end = pos + self._tree.n_tokens[row]
        return Place(row, end, self._byte_at(end), False, place)

    def _name_matches(self, parent: int, row: int, pos: int) -> bool:
        tree = self._tree
        n = tree.n_tokens[row]
        self._probes += 1
        if pos + n > len(self._tokens):
            return False
        ids = self._token_bytes[4 * pos : 4 * (pos + n)]
        return self._identity.node_name(tree.names.name(parent), ids) == tree.names.name(row)

    def _byte_children(self, place: Place, rest: memoryview) -> Iterator[Place]:
        trie = self._tree.by_bytes
        if not len(rest):
            return
        leaf, ended = trie.descend(place.row, rest)
        found = [row for row in trie.same(leaf) if self._bytes_match(row, rest)]
        if not found:
            self._maybe.append(Maybe(place, leaf, by_bytes=True))
        for ref in reversed(ended):
            rows = list(trie.leaves(ref))
            found += rows if found else [row for row in rows if self._bytes_match(row, rest)]
        for row in found:
            end = place.byte_pos + self._tree.n_bytes[row]
            yield Place(row, self._prompt.token_at(end), end, True, place)

    def _bytes_match(self, row: int, rest: memoryview) -> bool:
        self._probes += 1
        n = self._tree.n_bytes[row]
        return n <= len(rest) and self._tree.bytes_match(row, rest[:n])
