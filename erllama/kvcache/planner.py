"""Which parts leave a tier to make room: pure, over columns of the part table.

Rule 1 (closure): a base leaves only when nothing hangs behind its node, and the last part of a node with
       children never does. So tiers lose suffixes, never heads; a node that loses its base goes whole.
Rule 2: what is leased, being written or already doomed stays.
Rule 3: nothing is evicted for a newcomer that is worth less than what would go.
Rule 4: an empty base only holds the path to what hangs on it. With nothing on it, it goes first.
Rule 5: a plan for RAM takes nothing that a file tier holds but copies in RAM.

Order: window parts and states away from anchors, least recently used first; then by seconds of prefill saved
per byte × reuse; pinned and live paths last, and only where the caller insists. In RAM a copy of what a file
tier holds is worth only the time to read it again. Of two worth the same, the one further behind goes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .costs import PrefillCosts
from .kinds import PartKind
from .parts import RAM
from .score import NEWCOMER_HITS, reuse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from .tree import Tree

READ_S_PER_BYTE: Final = 1e-9  # about 1 GB/s from a file, checksum included
RESUME_SPAN: Final = 2048  # tokens that a window part or state at an anchor saves, against the anchor before
HEADROOM: Final = 0.01  # free a little more than asked, so that a full tier is not planned anew for each save
_CLASS: Final = 1e6  # classes are further apart than any score
_LAST: Final = 3 * _CLASS - 1  # behind everything that is not protected
_SLICE: Final = 256
_NOTHING: Final[frozenset[int]] = frozenset()


@dataclass(slots=True, kw_only=True)
class Want:
    """What to free: `n_bytes` on tier `slot` at time `now` (seconds).

    `locked`: part rows that must stay. `spare`: those of them whose copy in RAM may go, because a file tier
    holds them too and nobody looks at the copy. `protected`: nodes that go last, if `force`. `ceiling`: the
    score of the newcomer; parts worth more stay. `cost_of`: bytes a part row frees on this tier.
    `copies_only`: in RAM, take only copies of what file tiers hold.
    """

    slot: int
    n_bytes: int
    now: float
    cost_of: Callable[[int], int]
    costs: PrefillCosts = field(default_factory=PrefillCosts)
    locked: Collection[int] = _NOTHING
    spare: Collection[int] = _NOTHING
    protected: Collection[int] = _NOTHING
    force: bool = False
    ceiling: float | None = None
    copies_only: bool = False


@dataclass(slots=True)
class Plan:
    """Part rows to drop, in order (leaves first); what that frees on the tier, and whether it is enough."""

    parts: list[int]
    freed_bytes: int
    enough: bool
    n_forced: int = 0


def newcomer_score(seconds: float, size: int) -> float:
    """What a part being saved right now is worth, for `Want.ceiling`; `seconds`: to compute it."""
    return float(2 * _CLASS + seconds / max(size, 1) * reuse(NEWCOMER_HITS, 0.0))


def headroom(n_bytes: int, max_bytes: int) -> int:
    """Bytes to free when `n_bytes` are needed on a tier of `max_bytes`."""
    return max(n_bytes, int(max_bytes * HEADROOM))


class _Planner:
    """One plan. Scores are computed for candidates only: most of a large tier is not at the leaves."""

    def __init__(self, tree: Tree, want: Want) -> None:
        self._tree, self._want = tree, want
        self._gone_parts: set[int] = set()
        self._gone_children: dict[int, int] = {}
        self._gone_nodes: set[int] = set()

    def run(self) -> Plan:
        plan = Plan([], 0, False)
        keys, rows = self._candidates()
        fed = 0
        heap: list[tuple[float, int, int]] = []
        while not plan.enough:
            # Candidates come in slices: most plans need a handful of thousands.
            if fed < len(rows) and (not heap or heap[0][0] > keys[fed]):
                for key, row in zip(keys[fed : fed + _SLICE], rows[fed : fed + _SLICE], strict=True):
                    self._push(heap, key, row)
                fed += _SLICE
            if not heap:
                break
            key, _, part = heapq.heappop(heap)
            self._take(plan, key, part, heap)
        return plan

    def _push(self, heap: list[tuple[float, int, int]], key: float, part: int) -> None:
        heapq.heappush(heap, (key, -self._tree.end(self._tree.parts.node[part]), part))

    def _candidates(self) -> tuple[list[float], list[int]]:
        """Rows that may go as things are and their keys, smallest key first."""
        want, tree = self._want, self._tree
        c = tree.parts.columns()
        here = c["hot"] == 1 if want.slot == RAM else c["home"] == want.slot
        leaf = (np.array(tree.by_tokens.roots, np.int32) == 0)[c["node"]]
        n_parts = self._n_parts()[c["node"]]
        free = leaf | ((c["kind"] != PartKind.BASE) & (n_parts > 1))
        copies = c["home"] != RAM
        if want.slot == RAM:
            free = copies if want.copies_only else free | copies
        allowed = here & free & (c["node"] != 0)
        if want.locked:
            allowed[np.fromiter(want.locked, np.int64)] = False
        if want.slot == RAM and want.spare:
            spare = np.fromiter(want.spare, np.int64)
            allowed[spare] = (here & copies)[spare]
        rows = np.flatnonzero(allowed)
        keys = self._keys({name: column[rows] for name, column in c.items()})
        cheap = keys <= self._limit()
        keys, rows = keys[cheap], rows[cheap]
        node = c["node"][rows]
        ends = np.array(tree.start, np.int64)[node] + np.array(tree.n_tokens, np.int64)[node]
        order = np.lexsort((-ends, keys))
        return keys[order].tolist(), rows[order].tolist()

    def _n_parts(self) -> NDArray[np.int64]:
        """How many parts each node has."""
        tree = self._tree
        return np.bincount(np.array(tree.parts.node, np.int32), minlength=len(tree.parent))

    def _keys(self, c: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """The eviction key of many parts; smaller goes first. `_key` is the same for one."""
        want, node = self._want, c["node"]
        start = np.array(self._tree.start, np.float64)[node]
        n = np.array(self._tree.n_tokens, np.float64)[node]
        size = np.maximum(c["size"].astype(np.float64), 1.0)
        again = reuse(c["hits"].astype(np.float64), want.now - c["used"].astype(np.float64))
        end = start + n
        span = np.where(c["kind"] == PartKind.WHOLE, end, np.minimum(end, RESUME_SPAN))
        is_base = c["kind"] == PartKind.BASE
        start, n = np.where(is_base, start, end - span), np.where(is_base, n, span)
        seconds = want.costs.seconds(np.array(self._tree.shape, np.uint32)[node], start, n)
        keys = 2 * _CLASS + np.minimum(seconds / size * again, _CLASS / 2)
        beside = (c["kind"] == PartKind.WINDOW) | (c["kind"] == PartKind.STATE)
        empty, lone = is_base & (c["size"] == 0), self._n_parts()[node] == 1
        keys = np.where(empty, _LAST, keys)
        loose = (beside & (c["anchor"] == 0)) | (empty & lone)
        keys = np.where(loose, _CLASS + c["used"].astype(np.float64) / 2**32, keys)
        if want.slot == RAM:
            keys = np.where(c["home"] != RAM, 2 * _CLASS + READ_S_PER_BYTE * again, keys)
        if want.protected:
            kept = np.isin(node, np.fromiter(want.protected, np.int32))
            keys = np.where(kept, keys + 2 * _CLASS, keys)
        return np.asarray(keys, np.float64)

    def _key(self, part: int) -> float:
        """The eviction key of one part."""
        want, tree, parts = self._want, self._tree, self._tree.parts
        node, kind = parts.node[part], parts.kind(part)
        again = float(reuse(parts.hits[part], want.now - parts.used[part]))
        if want.slot == RAM and parts.home[part] != RAM:
            key = 2 * _CLASS + READ_S_PER_BYTE * again
        elif self._is_loose(part, kind):
            key = _CLASS + parts.used[part] / 2**32
        elif kind is PartKind.BASE and not parts.size[part]:
            key = _LAST  # it goes with what hangs on it
        else:
            start, n, end = tree.start[node], tree.n_tokens[node], tree.end(node)
            if kind is not PartKind.BASE:
                n = end if kind is PartKind.WHOLE else min(end, RESUME_SPAN)
                start = end - n
            seconds = float(want.costs.seconds(tree.shape[node], start, n))
            key = 2 * _CLASS + min(seconds / max(parts.size[part], 1) * again, _CLASS / 2)
        return key + 2 * _CLASS if node in want.protected else key

    def _is_loose(self, part: int, kind: PartKind) -> bool:
        """Whether a part is worth nothing but its recency: beside a base and no anchor, or an empty path."""
        parts = self._tree.parts
        if kind is PartKind.BASE:
            return not parts.size[part] and len(self._left(parts.node[part])) == 1
        return kind in (PartKind.WINDOW, PartKind.STATE) and not parts.anchor[part]

    def _left(self, node: int) -> list[int]:
        return [row for row in self._tree.part_rows(node) if row not in self._gone_parts]

    def _limit(self) -> float:
        want = self._want
        if want.ceiling is not None:
            return want.ceiling
        return np.inf if want.force else 3 * _CLASS

    def _take(self, plan: Plan, key: float, part: int, heap: list[tuple[float, int, int]]) -> None:
        tree, want = self._tree, self._want
        if part in self._gone_parts:
            return
        node = tree.parts.node[part]
        if want.slot == RAM and tree.parts.home[part] != RAM:
            unit = [part]
        else:
            unit = self._unit(node, part)
            if not unit:
                return
        for row in unit:
            self._gone_parts.add(row)
            plan.parts.append(row)
            if self._is_here(row):
                plan.freed_bytes += want.cost_of(row)
        plan.n_forced += key >= 3 * _CLASS
        plan.enough = plan.freed_bytes >= want.n_bytes
        if node in self._gone_nodes:
            self._expose(tree.parent[node], heap)

    def _is_here(self, part: int) -> bool:
        parts, slot = self._tree.parts, self._want.slot
        return parts.hot[part] == 1 if slot == RAM else parts.home[part] == slot

    def _unit(self, node: int, part: int) -> list[int]:
        """What goes with `part`: everything, if the node cannot live without it; [] if it must stay."""
        tree, left = self._tree, self._left(node)
        beside = not tree.parts.is_base(part) and len(left) > 1
        if beside and not self._holds_nothing([row for row in left if row != part]):
            return [part]
        if not self._is_leaf(node) or any(row in self._want.locked for row in left):
            return [part] if beside else []
        self._gone_nodes.add(node)
        return sorted(left, key=tree.parts.is_base)

    def _holds_nothing(self, left: list[int]) -> bool:
        """Whether all that is left of a node is an empty base; in RAM, one that lives there."""
        parts = self._tree.parts
        if len(left) != 1 or not parts.is_base(left[0]) or parts.size[left[0]]:
            return False
        return self._want.slot != RAM or parts.home[left[0]] == RAM

    def _is_leaf(self, node: int) -> bool:
        if self._tree.is_leaf(node):
            return True
        gone = self._gone_children.get(node, 0)
        return gone > 0 and gone == sum(1 for _ in self._tree.children(node))

    def _expose(self, parent: int, heap: list[tuple[float, int, int]]) -> None:
        """A node went: its parent's parts may be next."""
        self._gone_children[parent] = self._gone_children.get(parent, 0) + 1
        if not self._tree.parent[parent] or not self._is_leaf(parent):
            return
        limit = self._limit()
        for row in self._tree.part_rows(parent):
            if self._is_here(row) and row not in self._want.locked:
                key = self._key(row)
                if key <= limit:
                    self._push(heap, key, row)


def plan_evictions(tree: Tree, want: Want) -> Plan:
    """The cheapest parts whose leaving frees `want.n_bytes`; `enough` is False if they do not suffice."""
    if want.n_bytes <= 0 or not tree.parts.n_parts:
        return Plan([], 0, want.n_bytes <= 0)
    return _Planner(tree, want).run()
