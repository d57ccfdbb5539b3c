"""The store's state and every change to it: tree, copies in RAM, leases, pins. One owner, no awaits.

Rule 1: only this file changes the tree; callers are synchronous between awaits, so each change is atomic and
        readers need no lock.
Rule 2: a part is *usable* if a copy is in RAM or its tier is on, and it is not doomed. A walk ends before
        the first node whose parts are all unusable.
Rule 3: a doomed part is being removed from its tier: nobody may lease it any more.
Rule 4: a lease holds the part, not its copy in RAM: where a file tier has it too the copy may go.
Rule 5: dropping returns what must be unlinked on file tiers; the index forgets first, files follow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .columns import PartColumns
from .costs import PrefillCosts
from .kinds import ROOT_NAME, NodeFlag, PartKind, SaveReason
from .parts import RAM
from .pins import Pins
from .planner import Plan, Want, newcomer_score, plan_evictions
from .score import add_hit
from .tree import Tree
from .walk import Walker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .arena import Arena, Buffer
    from .key import Identity, Prompt
    from .meta import NodeMeta
    from .recover import FoundPart, PartId
    from .score import PrefillCost
    from .walk import Walk

TOUCH_EVERY_S = 60  # a file's mtime is written at most this often
HEAD_ESTIMATE = 420  # bytes of header and metadata besides ids and text; only plans use it


@dataclass(slots=True)
class RamPart:
    """A part's copy in RAM, with the head that verifies it."""

    buffer: Buffer
    meta: NodeMeta

    @property
    def cost_bytes(self) -> int:
        """What it takes from the RAM budget."""
        return self.buffer.held_bytes + self.meta.head_bytes


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file to be removed: tier slot, name, kind."""

    slot: int
    name: bytes
    kind: PartKind


class Catalog:
    """What is stored, where, and who holds it. `clock` gives seconds since the epoch."""

    def __init__(
        self, arena: Arena, clock: Callable[[], float], cost: PrefillCost, pin_fraction: float
    ) -> None:
        self.tree = Tree()
        self.arena = arena
        self._costs = PrefillCosts(cost)
        self.clock = clock
        self.ram: dict[int, RamPart] = {}
        # By name, not by row: a damaged node may go, and its row serve another, while a lease is held.
        self.leases: Counter[PartId] = Counter()
        self.busy: Counter[PartId] = Counter()  # being written: they stay where they are
        self.abandoned: set[PartId] = set()  # dropped while being written; the writer must not publish them
        self.doomed: set[int] = set()
        self.off: set[int] = set()  # slots of tiers that are switched off
        self.expires: dict[int, float] = {}
        self.pins = Pins(self.tree, clock, pin_fraction)
        self.pins.tier_max[RAM] = arena.max_bytes
        self._index_charge = 0
        self.touched: set[PartId] = set()  # used since their mtime was last written
        self.evicted: Counter[int] = Counter()  # parts by slot
        self.evicted_unused_bytes = 0

    # --- reading ----------------------------------------------------------------------------------

    def is_usable(self, part: int) -> bool:
        """Whether a part may be leased."""
        parts = self.tree.parts
        return part not in self.doomed and (parts.hot[part] == 1 or parts.home[part] not in self.off)

    def is_live(self, row: int) -> bool:
        """Whether a node may be handed out: some part usable, not expired."""
        until = self.expires.get(row)
        if until is not None and until <= self.clock():
            return False
        return any(self.is_usable(part) for part in self.tree.part_rows(row))

    def walk(self, identity: Identity, prompt: Prompt) -> Walk:
        """The longest-prefix walk; the caller cuts it where nodes are not live."""
        return Walker(self.tree, identity, prompt).run()

    def has(self, name: bytes, kind: PartKind) -> bool:
        """Whether a part is stored and usable."""
        row = self.tree.find(name)
        if row is None:
            return False
        part = self.tree.part(row, kind)
        return part != 0 and self.is_usable(part)

    def ref_of(self, part: int) -> PartId:
        """Name and kind of a part row."""
        return self.tree.names.name(self.tree.parts.node[part]), self.tree.parts.kind(part)

    def part_of(self, ref: PartId) -> int:
        """Part row of a name and kind, or 0."""
        row = self.tree.find(ref[0])
        return 0 if row is None else self.tree.part(row, ref[1])

    def known_parts(self, slot: int) -> PartColumns:
        """A copy of what the index holds of one tier, to be compared with a listing by a thread."""
        columns = self.tree.parts.columns()
        rows = np.flatnonzero((columns["home"] == slot) & (columns["node"] != 0))
        return PartColumns(self.tree.names.dump(), **{k: columns[k][rows] for k in PartColumns.KEYS})

    def slot_of(self, row: int) -> int | None:
        """The file tier a node has parts on, or None if it is only in RAM (or a root)."""
        homes = {self.tree.parts.home[part] for part in self.tree.part_rows(row)} - {RAM}
        return min(homes) if homes else None

    def is_ram_only(self, row: int) -> bool:
        """Whether some part of a node lives in RAM only."""
        return any(self.tree.parts.home[part] == RAM for part in self.tree.part_rows(row))

    def needed_part(self, part: int) -> int:
        """The part that must be on a tier before this one: the node's base, for a base the parent's; 0: none.

        Where a node has no base, any part of it stands for it.
        """
        tree = self.tree
        row = tree.parts.node[part]
        if not tree.parts.is_base(part):
            base = tree.part(row, PartKind.BASE)
            if base:
                return base
        parent = tree.parent[row]
        if not tree.parent[parent]:
            return 0
        return tree.part(parent, PartKind.BASE) or tree.first_part[parent]

    def durable_slot(self, row: int) -> int | None:
        """The file tier that a node or its nearest ancestor is on: where its own parts have to go."""
        while self.tree.parent[row]:
            slot = self.slot_of(row)
            if slot is not None:
                return slot
            row = self.tree.parent[row]
        return None

    def file_cost(self, part: int) -> int:
        """Roughly the size of a part's file."""
        tree, node = self.tree, self.tree.parts.node[part]
        return int(tree.parts.size[part]) + HEAD_ESTIMATE + 4 * tree.n_tokens[node] + tree.n_bytes[node]

    def ram_cost(self, part: int) -> int:
        """What a part's copy takes from the RAM budget."""
        copy = self.ram.get(part)
        return 0 if copy is None else copy.cost_bytes

    # --- adding -----------------------------------------------------------------------------------

    def parent_row(self, meta: NodeMeta) -> int | None:
        """Where a node belongs: its parent's row, or its identity's root; None if that is gone or going."""
        if meta.parent == ROOT_NAME:
            return self.tree.add_root(meta.identity) if meta.start == 0 else None
        row = self.tree.find(meta.parent)
        if (
            row is None
            or self.tree.end(row) != meta.start
            or self.doomed.issuperset(self.tree.part_rows(row))
        ):
            return None
        return row

    def ensure_node(self, meta: NodeMeta, read: Callable[[int], NodeMeta]) -> int | None:
        """The node's row, inserted if new; None without its parent. Raises: `NeedKey`, nothing changed."""
        row = self.tree.find(meta.name)
        if row is None:
            parent = self.parent_row(meta)
            if parent is None:
                return None
            row = self.tree.insert(parent, meta, read)
            if meta.expires_ns is not None:
                self.expires[row] = meta.expires_ns / 1e9
            self._charge_index()
        return row

    def join(self, row: int, meta: NodeMeta) -> None:
        """A node came again: it is an anchor if any of its saves said so."""
        if meta.flags & NodeFlag.ANCHOR:
            self.tree.set_anchor(row)

    def add_copy(self, row: int, kind: PartKind, copy: RamPart) -> int:
        """Add a part whose only copy is in RAM; the catalog owns the buffer from here on."""
        part = self.tree.add_part(row, kind, copy.buffer.n_bytes, RAM, self._now())
        self.keep_copy(part, copy)
        self.join(row, copy.meta)
        self._charge_index()
        return part

    def add_found(self, slot: int, found: FoundPart, read: Callable[[int], NodeMeta]) -> bool:
        """Index a file found by a scan; False if its parent is not there. Raises: `NeedKey`."""
        row = self.ensure_node(found.meta, read)
        if row is None:
            return False
        part = self.tree.part(row, found.kind)
        if part:
            if self.tree.parts.home[part] == RAM:
                self.tree.parts.home[part] = slot  # another process published what we only have in RAM
            return True  # on another tier too: that copy is served, this one waits for its turn
        used = max(0, min(int(found.mtime), 2**32 - 1))
        self.tree.add_part(row, found.kind, found.payload_bytes, slot, used)
        self.join(row, found.meta)
        if found.meta.reason is SaveReason.AGENT_PREFIX:
            self.pins.pin(("agent", found.meta.name), found.meta.name)
        self._charge_index()
        return True

    def keep_copy(self, part: int, copy: RamPart) -> None:
        """Attach a RAM copy to a part."""
        assert part not in self.ram
        self.ram[part] = copy
        self.tree.parts.hot[part] = 1
        self.arena.charge(copy.meta.head_bytes)

    def announce(self, part: int, slot: int) -> None:
        """A part was published on a file tier: that is its home now, its RAM copy a mere copy."""
        self.tree.parts.home[part] = slot

    def add_hits(self, hits: dict[bytes, tuple[float, int]]) -> None:
        """Hit counts from journals."""
        for key, (n, at) in hits.items():
            row = self.tree.find(key[:-1])
            part = 0 if row is None else self.tree.part(row, PartKind(key[-1]))
            if part:
                self.tree.parts.hits[part] = n
                self.tree.parts.used[part] = max(self.tree.parts.used[part], min(at, self._now()))

    def hits_on(self, slot: int) -> PartColumns:
        """A copy of a tier's parts that were hit, to be written into its journal by a thread."""
        columns = self.tree.parts.columns()
        rows = np.flatnonzero((columns["home"] == slot) & (columns["hits"] > 0))
        return PartColumns(self.tree.names.dump(), **{k: columns[k][rows] for k in PartColumns.KEYS})

    def take_touched(self, slot: int) -> list[tuple[PartId, int]]:
        """Parts of a tier whose mtime is to be written, and the time; they count as written from here on."""
        found = []
        for ref in list(self.touched):
            part = self.part_of(ref)
            if part and self.tree.parts.home[part] != slot:
                continue
            self.touched.discard(ref)
            if part:
                found.append((ref, self.tree.parts.used[part]))
        return found

    def hit(self, rows: Iterable[int]) -> None:
        """Record a use of nodes: of their bases, and of whatever else they have."""
        parts, now = self.tree.parts, self._now()
        for row in rows:
            for part in self.tree.part_rows(row):
                if parts.home[part] != RAM and now - parts.used[part] >= TOUCH_EVERY_S:
                    self.touched.add((self.tree.names.name(row), parts.kind(part)))
                parts.hits[part] = add_hit(parts.hits[part], now - parts.used[part])
                parts.used[part] = now

    # --- dropping ---------------------------------------------------------------------------------

    def drop_copy(self, part: int) -> None:
        """Give back a part's RAM copy; the part itself stays (its home is a file tier)."""
        copy = self.ram.pop(part)
        self.tree.parts.hot[part] = 0
        self.arena.charge(-copy.meta.head_bytes)
        copy.buffer.release()

    def drop_part(self, part: int) -> list[FileRef]:
        """Forget a part, and its node if that has nothing left. A base takes what hangs behind it along."""
        tree = self.tree
        row = tree.parts.node[part]
        lone = len(tree.part_rows(row)) == 1
        if tree.parts.is_base(part) or lone:
            return self.drop_subtree(row)
        return self._forget_part(part)

    def drop_subtree(self, row: int) -> list[FileRef]:
        """Forget a node and everything behind it."""
        files: list[FileRef] = []
        names = []
        for node in self.tree.subtree(row):
            for part in self.tree.part_rows(node):
                files += self._forget_part(part)
            names.append(self.tree.names.name(node))
            self.expires.pop(node, None)
            self.tree.remove(node)
        if len(self.pins):
            self.pins.forget(names)
        return files

    def _forget_part(self, part: int) -> list[FileRef]:
        parts = self.tree.parts
        ref = FileRef(parts.home[part], self.tree.names.name(parts.node[part]), parts.kind(part))
        if (ref.name, ref.kind) in self.busy:
            self.abandoned.add((ref.name, ref.kind))
        if part in self.ram:
            self.drop_copy(part)
        self.doomed.discard(part)
        self.tree.remove_part(part)
        return [] if ref.slot == RAM else [ref]

    def count_eviction(self, part: int, slot: int) -> None:
        """Statistics of one eviction, before the part is dropped."""
        parts = self.tree.parts
        self.evicted[slot] += 1
        if parts.hits[part] == 0 and parts.home[part] == slot:
            self.evicted_unused_bytes += int(parts.size[part])

    # --- planning ---------------------------------------------------------------------------------

    def plan(
        self,
        slot: int,
        n_bytes: int,
        *,
        force: bool = False,
        ceiling: float | None = None,
        copies_only: bool = False,
    ) -> Plan:
        """Which parts to drop from a tier to free `n_bytes`; `copies_only`: in RAM, none that lives there."""
        leased, busy = self._rows_of(self.leases), self._rows_of(self.busy)
        locked = leased | busy | self.doomed
        spare = {part for part in leased - busy - self.doomed if self._has_spare_copy(part)}
        return plan_evictions(
            self.tree,
            Want(
                slot=slot,
                n_bytes=n_bytes,
                now=self.clock(),
                cost_of=self.ram_cost if slot == RAM else self.file_cost,
                costs=self._costs,
                locked=locked,
                spare=spare if slot == RAM else (),
                copies_only=copies_only,
                protected=self.pins.protected(),
                force=force,
                ceiling=ceiling,
            ),
        )

    def _rows_of(self, refs: Iterable[PartId]) -> set[int]:
        return {part for part in map(self.part_of, refs) if part}

    def _has_spare_copy(self, part: int) -> bool:
        """Whether a part's RAM copy can go without the part: its tier serves it, and nobody looks at it."""
        copy, home = self.ram.get(part), self.tree.parts.home[part]
        return copy is not None and home != RAM and home not in self.off and not copy.buffer.is_shared

    def ceiling(self, shape: int, start: int, n_tokens: int, size: int) -> float:
        """What a newcomer is worth, for `plan`; `shape`: the tree's number of its identity's shape hash."""
        return newcomer_score(float(self._costs.seconds(shape, start, n_tokens)), size)

    def set_cost(self, identity: Identity, cost: PrefillCost) -> None:
        """Prefill of this model was measured; its salts share it."""
        self._costs.set(self.tree.shape_number(identity.shape_hash), cost)

    def prefill_s(self, identity: Identity, start: int, n_tokens: int) -> float:
        """Seconds that this model takes to compute `n_tokens` behind `start` others."""
        return float(self._costs.seconds(self.tree.shape_number(identity.shape_hash), start, n_tokens))

    def expired(self) -> list[int]:
        """Nodes whose time is over."""
        now = self.clock()
        return [row for row, until in self.expires.items() if until <= now]

    # --- small things -----------------------------------------------------------------------------

    def prolong(self, row: int, expires_ns: int | None) -> None:
        """A node was saved again: it lives as long as the longest of its saves asked for.

        What is in its file stays as it was: after a restart the file's time counts.
        """
        if row not in self.expires:
            return
        if expires_ns is None:
            del self.expires[row]
        else:
            self.expires[row] = max(self.expires[row], expires_ns / 1e9)

    def is_private(self, row: int) -> bool:
        """Whether a node, or one it hangs behind, must stay off file tiers."""
        return any(self.tree.flags(node) & NodeFlag.PRIVATE for node in self.tree.path(row))

    def set_anchor(self, name: bytes) -> bool:
        """A node is an anchor from now on; False if it is gone."""
        row = self.tree.find(name)
        if row is not None:
            self.tree.set_anchor(row)
        return row is not None

    def set_private(self, row: int, *, private: bool) -> None:
        """Keep a node off file tiers, unless it is on one already: the same content was saved openly then."""
        if self.slot_of(row) is None:
            self.tree.set_flag(row, NodeFlag.PRIVATE, on=private)

    def _now(self) -> int:
        return max(0, min(int(self.clock()), 2**32 - 1))

    def _charge_index(self) -> None:
        """The index lives in the RAM budget too."""
        grown = self.tree.nbytes - self._index_charge
        if grown > 4096:
            self._index_charge += grown
            self.arena.charge(grown)
