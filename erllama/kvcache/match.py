"""What a look-up found, and the lease under which it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import trio

from .kinds import ROOT_NAME, PartKind, Provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from .arena import Buffer
    from .catalog import Catalog
    from .key import Identity, Tokens
    from .loader import Loader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedNode:
    """One stored node on the prompt's way.

    `start`: position of its first token in the stored history. `ids`: its tokens; where it was matched
    `by_bytes` they may differ from the prompt's. `parts`: the tier of each usable part.
    """

    name: bytes
    start: int
    ids: Tokens
    n_bytes: int
    by_bytes: bool
    provenance: Provenance
    parts: Mapping[PartKind, str]

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialNode:
    """A stored node that parts from the prompt inside: it shares `n_tokens` ids or `n_bytes` bytes."""

    node: MatchedNode
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """The longest stored beginning of a prompt.

    [0, n_tokens) is covered by `nodes`, whole; `partial` may cover more. `token_pos` is where the prompt goes
    on behind `nodes` in its own tokens, or None inside one of them; `byte_pos` the same in its text.
    """

    identity: Identity
    nodes: tuple[MatchedNode, ...]
    partial: PartialNode | None
    token_pos: int | None
    byte_pos: int
    probes: int = 0

    @property
    def n_tokens(self) -> int:
        """Stored tokens in whole nodes."""
        return self.nodes[-1].end if self.nodes else 0

    @property
    def tip(self) -> bytes:
        """Name of the last whole node; the parent of what is saved behind it."""
        return self.nodes[-1].name if self.nodes else ROOT_NAME

    @property
    def ids(self) -> Tokens:
        """All stored ids, in order; where matched by bytes they replace the prompt's."""
        return np.concatenate([node.ids for node in self.nodes]) if self.nodes else np.zeros(0, np.int32)


class Lease:
    """Holds a match's nodes where they are while they are read. A context manager; sync.

    `nodes` are the match's nodes that are still there, the partial one last if it is (`partial` is True
    then). None of their parts is evicted until the lease ends or the node is released; a copy in RAM of what
    a file tier holds may be, while nobody looks at it, and is read again.
    """

    def __init__(self, catalog: Catalog, loader: Loader, match: Match) -> None:
        self._catalog, self._loader = catalog, loader
        nodes = [*match.nodes] + ([match.partial.node] if match.partial else [])
        there = 0
        while there < len(nodes) and self._is_live(nodes[there].name):
            there += 1
        self.nodes = tuple(nodes[:there])
        self.partial = match.partial is not None and there == len(nodes)
        self._held: list[list[tuple[bytes, PartKind]]] = [self._hold(node.name) for node in self.nodes]
        self._buffers: list[list[tuple[PartKind, Buffer]]] = [[] for _ in self.nodes]
        self._is_open = True
        self._holders = loader.holders
        self._holders.n += 1

    def _is_live(self, name: bytes) -> bool:
        row = self._catalog.tree.find(name)
        return row is not None and self._catalog.is_live(row)

    def _hold(self, name: bytes) -> list[tuple[bytes, PartKind]]:
        tree = self._catalog.tree
        row = tree.find(name)
        assert row is not None
        held = [(name, tree.parts.kind(part)) for part in tree.part_rows(row)]
        self._catalog.leases.update(held)
        return held

    def is_in_ram(self, index: int, kind: PartKind = PartKind.BASE) -> bool:
        """Whether a part of `nodes[index]` can be had without reading a file. A plain read."""
        return self._catalog.part_of((self.nodes[index].name, kind)) in self._catalog.ram

    def n_bytes(self, index: int, kind: PartKind = PartKind.BASE) -> int:
        """How large a part of `nodes[index]` is; 0 if it is not there any more. A plain read."""
        part = self._catalog.part_of((self.nodes[index].name, kind))
        return int(self._catalog.tree.parts.size[part]) if part else 0

    async def load(self, index: int, kind: PartKind = PartKind.BASE) -> memoryview | None:
        """The payload of a part of `nodes[index]`, read-only, valid until released. None is a miss.

        After a miss of a base, nothing behind it can be had either. Cancellation: leaves nothing behind.
        """
        await trio.lowlevel.checkpoint()
        ids = self.nodes[index].ids
        buffer = await self._loader.load(
            (self.nodes[index].name, kind), lambda meta: np.array_equal(meta.tokens, ids)
        )
        if buffer is None:
            return None
        self._buffers[index].append((kind, buffer))
        return buffer.view.toreadonly()

    async def load_many(
        self, indices: Sequence[int], kind: PartKind = PartKind.BASE, *, at_once: int = 4
    ) -> list[memoryview | None]:
        """Load one part of several nodes, `at_once` of them at a time; in the order asked for.

        One read checks what it copies and so is a little slower than memcpy; two or more make up for it.
        Cancellation: leaves nothing behind.
        """
        views: dict[int, memoryview | None] = {}
        todo = iter(enumerate(indices))

        async def work() -> None:
            for i, index in todo:
                views[i] = await self.load(index, kind)

        async with trio.open_nursery() as nursery:
            for _ in range(min(at_once, len(indices))):
                nursery.start_soon(work)
        return [views[i] for i in range(len(indices))]

    async def room_may_come(self) -> bool:
        """After a load that found no room: wait a moment for others. False if nobody else holds anything.

        Cancellation: nothing is left behind.
        """
        if self._holders.n == 1 and not self._catalog.busy:
            return False
        await self._holders.wait()
        return True

    def release(self, index: int) -> None:
        """Let go of one node before the lease ends. Idempotent. Views of it must not be used any more."""
        leases = self._catalog.leases
        for ref in self._held[index]:
            leases[ref] -= 1
            if not leases[ref]:
                del leases[ref]
        self._held[index] = []
        for _, buffer in self._buffers[index]:
            buffer.release()
        self._buffers[index] = []
        self._holders.have_let_go()

    def unload(self, index: int, kind: PartKind = PartKind.BASE) -> None:
        """Give back what was loaded of a part; its node stays held. Views of it must not be used any more."""
        loaded, self._buffers[index] = self._buffers[index], []
        for each in loaded:
            if each[0] == kind:
                each[1].release()
            else:
                self._buffers[index].append(each)
        self._holders.have_let_go()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._holders.n -= 1
        for index in range(len(self.nodes)):
            self.release(index)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
