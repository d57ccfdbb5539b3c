"""Replay of a look-up log under another budget: what the hit rate would have been.

Uses the store's own walk, planner and scores on a file tier of the given size. What the live store found and
the simulated one has lost is stored again, as an engine would have after computing it; so at the log's own
budget the simulation does exactly what the store did.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arena import Arena
from .catalog import Catalog
from .key import Identity, Prompt, common_prefix
from .kinds import ROOT_NAME, NodeFlag, PartKind, Provenance, SaveReason
from .meta import NodeMeta
from .planner import headroom
from .recover import FoundPart
from .score import PrefillCost

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """Outcome of a replay. `hit_rate`: matched tokens per token asked for."""

    max_bytes: int
    n_finds: int
    tokens_asked: int
    tokens_matched: int
    bytes_written: int
    evictions: int
    refused: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were stored."""
        return self.tokens_matched / self.tokens_asked if self.tokens_asked else 0.0


class Simulation:
    """One replay. Feed records with `replay`, read `result()`."""

    def __init__(
        self, max_bytes: int, *, cost: PrefillCost | None = None, pin_fraction: float = 0.25
    ) -> None:
        self._now = 0.0
        self._catalog = Catalog(
            Arena(1 << 62), lambda: self._now, cost=cost or PrefillCost(), pin_fraction=pin_fraction
        )
        self._catalog.pins.tier_max[SLOT] = max_bytes
        self._max = max_bytes
        self._used = 0
        self._spaces: dict[int, Identity] = {}
        self._seen: dict[bytes, dict[PartKind, FoundPart]] = {}
        self._metas: dict[bytes, NodeMeta] = {}
        self._n_finds = self._asked = self._matched = self._written = self._evicted = self._refused = 0

    def replay(self, records: Iterable[list[Any]]) -> SimResult:
        """Feed all records of a log."""
        for what, *fields in records:
            if what == "space":
                index, shape, salt = fields
                self._spaces[index] = Identity(shape_hash=shape, salt=salt)
            elif what == "find":
                self._find(*fields)
            elif what == "save":
                self._save(*fields)
            elif what == "cost":
                space, *measured = fields
                self._catalog.set_cost(self._spaces[space], PrefillCost(*measured))
        return self.result()

    def result(self) -> SimResult:
        """The figures so far."""
        return SimResult(
            max_bytes=self._max,
            n_finds=self._n_finds,
            tokens_asked=self._asked,
            tokens_matched=self._matched,
            bytes_written=self._written,
            evictions=self._evicted,
            refused=self._refused,
        )

    def _find(self, at: float, space: int, ids: bytes, tip: bytes) -> None:
        self._now = at
        catalog, prompt = self._catalog, Prompt(np.frombuffer(ids, "<i4"))
        walk = catalog.walk(self._spaces[space], prompt)
        rows = [place.row for place in walk.best.path()]
        matched = catalog.tree.end(rows[-1]) if rows else 0
        for maybe in walk.maybe[:1]:
            begin = maybe.place.token_pos or 0
            meta = self._metas[catalog.tree.names.name(maybe.row)]
            shared = common_prefix(meta.tokens, prompt.tokens[begin:])
            if begin + shared > matched:
                matched = begin + shared
                rows = [*(place.row for place in maybe.place.path()), maybe.row]
        self._n_finds += 1
        self._asked += len(prompt.tokens)
        self._matched += matched
        catalog.hit(rows)
        self._restore(tip)

    def _restore(self, name: bytes) -> None:
        """Store again what the live store had and this one lost, up to `name`."""
        missing = []
        while name != ROOT_NAME and name in self._seen and self._catalog.tree.find(name) is None:
            missing.append(name)
            name = self._metas[name].parent
        for lost in reversed(missing):
            for part in self._seen[lost].values():
                self._store(part)

    def _save(
        self, at: float, space: int, name: bytes, parent: bytes, start: int, ids: bytes, *facts: Any
    ) -> None:
        self._now = at
        text, kind, payload_bytes, file_bytes, provenance, reason, flags = facts
        known = self._metas.get(name)
        meta = (
            dataclasses.replace(known, flags=NodeFlag(flags))
            if known
            else NodeMeta(
                name=name,
                parent=parent,
                identity=self._spaces[space],
                start=start,
                tokens=np.frombuffer(ids, "<i4"),
                text=text,
                provenance=Provenance(provenance),
                reason=SaveReason(reason),
                flags=NodeFlag(flags),
            )
        )
        self._metas.setdefault(name, meta)
        part = FoundPart(
            meta=meta, kind=PartKind(kind), payload_bytes=payload_bytes, file_bytes=file_bytes, mtime=at
        )
        self._seen.setdefault(name, {})[part.kind] = part
        self._restore(parent)
        self._store(part)

    def _store(self, part: FoundPart) -> None:
        catalog, meta = self._catalog, part.meta
        if catalog.part_of(part.id) or (meta.parent != ROOT_NAME and catalog.tree.find(meta.parent) is None):
            return
        if not self._make_room(part):
            self._refused += 1
            return
        part.mtime = self._now
        catalog.add_found(SLOT, part, lambda row: self._metas[catalog.tree.names.name(row)])
        self._used += part.file_bytes
        self._written += part.file_bytes

    def _make_room(self, part: FoundPart) -> bool:
        need = self._used + part.file_bytes - self._max
        if need <= 0:
            return True
        catalog, tree, meta = self._catalog, self._catalog.tree, part.meta
        keep = set() if meta.parent == ROOT_NAME else {(meta.parent, PartKind.BASE)}
        catalog.leases.update(keep)  # a node is not evicted to make room for its own child
        shape = tree.shape_number(meta.identity.shape_hash)
        ceiling = catalog.ceiling(shape, meta.start, len(meta.tokens), part.payload_bytes)
        plan = catalog.plan(SLOT, headroom(need, self._max), ceiling=ceiling)
        catalog.leases.subtract(keep)
        catalog.leases += type(catalog.leases)()  # drops the zeros
        if plan.freed_bytes < need:
            return False
        for row in plan.parts:
            ref = tree.names.name(tree.parts.node[row]), tree.parts.kind(row)
            self._used -= self._seen[ref[0]][ref[1]].file_bytes
            catalog.drop_part(row)
            self._evicted += 1
        return True
